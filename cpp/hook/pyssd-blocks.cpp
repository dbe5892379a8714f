#include "pyssd-blocks.h"

#include "pyssd-hook.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

const ggml_tensor * pyssd_root(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// before allocation only tensors that outlive the graph have a buffer: weights, adapters, KV cells, recurrent state
static bool is_persistent(const ggml_tensor * t) {
    return pyssd_root(t)->buffer != nullptr;
}

static bool is_weight(const ggml_tensor * t) {
    const ggml_tensor * root = pyssd_root(t);
    return root->buffer && ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool pyssd_is_write(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return t->view_src && is_persistent(t) && !is_weight(t);
    }
}

ggml_tensor * pyssd_strip(ggml_tensor * t) {
    while (true) {
        switch (t->op) {
            case GGML_OP_GET_ROWS:
            case GGML_OP_SCALE:
            case GGML_OP_RESHAPE:
            case GGML_OP_CONT:
                if (!t->src[0] || t->src[0]->op == GGML_OP_NONE) {
                    return t;
                }
                t = t->src[0];
                break;
            default:
                return t;
        }
    }
}

pyssd_graph::pyssd_graph(ggml_cgraph * gf, const ggml_tensor * input,
                         const std::vector<ggml_tensor *> & recurrent_state)
    : recurrent(recurrent_state.begin(), recurrent_state.end()) {
    const int n = ggml_graph_n_nodes(gf);

    nodes.assign(ggml_graph_nodes(gf), ggml_graph_nodes(gf) + n);
    n_uses.assign(n, 0);
    from_input.assign(n, 0);
    index.reserve(2 * n);

    for (int i = 0; i < n; ++i) {
        ggml_tensor * t = nodes[i];
        index[t]        = i;
        from_input[i]   = t == input;
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (!t->src[k]) {
                continue;
            }
            const int j = find(t->src[k]);
            if (j >= 0) {
                n_uses[j]++;
                from_input[i] |= from_input[j];
            } else if (t->src[k] == input) {
                from_input[i] = 1;
            }
        }
        if (pyssd_is_write(t)) {
            state.insert(pyssd_root(t));
        }
    }
}

int pyssd_graph::find(const ggml_tensor * t) const {
    const auto it = index.find(t);
    return it == index.end() ? -1 : it->second;
}

bool pyssd_graph::depends(const ggml_tensor * t) const {
    const int i = find(t);
    return i >= 0 && from_input[i];
}

bool pyssd_graph::is_add(const ggml_tensor * t, bool root) const {
    if (t->op != GGML_OP_ADD || !depends(t->src[0]) || !depends(t->src[1])) {
        return false;
    }
    return ggml_are_same_shape(t->src[0], t->src[1]) && (root || n_uses[find(t)] == 1);
}

static void collect_leaves(const pyssd_graph & g, ggml_tensor * t, bool root, std::vector<ggml_tensor *> & out) {
    if (!g.is_add(t, root)) {
        out.push_back(t);
        return;
    }
    collect_leaves(g, t->src[0], false, out);
    collect_leaves(g, t->src[1], false, out);
}

// visit the ancestors of b that come after a, b included; true if a is an ancestor of b
// the nodes are in topological order, so nothing before a needs a visit
template <typename visit_fn>
static bool visit_between(const pyssd_graph & g, const ggml_tensor * a, const ggml_tensor * b, visit_fn visit) {
    const int            ia    = g.find(a);
    bool                 found = false;
    std::vector<uint8_t> seen(g.nodes.size(), 0);
    std::vector<int>     stack = { g.find(b) };
    while (!stack.empty()) {
        const int i = stack.back();
        stack.pop_back();
        if (i < ia || i < 0 || seen[i]) {
            continue;
        }
        if (i == ia) {
            found = true;
            continue;
        }
        seen[i] = 1;
        visit(i);
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (g.nodes[i]->src[k]) {
                stack.push_back(g.find(g.nodes[i]->src[k]));
            }
        }
    }
    return found;
}

static bool is_ancestor(const pyssd_graph & g, const ggml_tensor * a, const ggml_tensor * b) {
    return visit_between(g, a, b, [](int) {});
}

// a sum on a residual stream: several users, and one operand is computed from the other
static bool is_join(const pyssd_graph & g, int i) {
    const ggml_tensor * t = g.nodes[i];
    if (g.n_uses[i] < 2 || !g.is_add(t, true)) {
        return false;
    }
    const ggml_tensor * lhs = pyssd_strip(t->src[0]);
    const ggml_tensor * rhs = pyssd_strip(t->src[1]);
    return is_ancestor(g, lhs, rhs) || is_ancestor(g, rhs, lhs);
}

// does the way from a to b pass a residual stream of its own: then b is no plain branch of a
static bool has_joins(const pyssd_graph & g, const ggml_tensor * a, const ggml_tensor * b) {
    bool any = false;
    visit_between(g, a, b, [&](int i) { any = any || is_join(g, i); });
    return any;
}

// the leaf that carries the residual stream: the one from which others are computed; NULL if none, or if it is not clear which
static ggml_tensor * find_stream(const pyssd_graph & g, const std::vector<ggml_tensor *> & leaves, int & n_found) {
    std::vector<ggml_tensor *> feeding;
    for (ggml_tensor * a : leaves) {
        // both sides stripped: in the last layer the stream and the branch are gathered separately
        const bool feeds = std::any_of(leaves.begin(), leaves.end(), [&](ggml_tensor * b) {
            return pyssd_strip(a) != pyssd_strip(b) && is_ancestor(g, pyssd_strip(a), pyssd_strip(b));
        });
        if (feeds) {
            feeding.push_back(a);
        }
    }
    n_found = (int) feeding.size();
    if (feeding.empty()) {
        return nullptr;
    }
    const auto earlier = [&](ggml_tensor * a, ggml_tensor * b) {
        return g.find(pyssd_strip(a)) < g.find(pyssd_strip(b));
    };
    ggml_tensor * first = *std::min_element(feeding.begin(), feeding.end(), earlier);
    for (ggml_tensor * other : leaves) {
        // one branch may feed another, but only the stream itself has joins
        if (other != first && has_joins(g, pyssd_strip(first), pyssd_strip(other))) {
            return nullptr;
        }
        const bool fed = is_ancestor(g, pyssd_strip(first), pyssd_strip(other));
        if (other != first && !fed && std::count(feeding.begin(), feeding.end(), other)) {
            return nullptr;
        }
    }
    return first;
}

static int layer_of_weight(const ggml_tensor * t) {
    int layer = -1;
    return sscanf(t->name, "blk.%d.", &layer) == 1 ? layer : -1;
}

// walk one branch between its leaf and the stream; fills kind, layer, bytes and device
static void describe(const pyssd_graph & g, int stage, const ggml_tensor * stream, pyssd_found & block,
                     const std::vector<std::vector<ggml_tensor *>> & writes_at, std::vector<uint8_t> & seen) {
    std::fill(seen.begin(), seen.end(), 0);
    if (g.find(stream) >= 0) {
        seen[g.find(stream)] = 1;
    }
    bool                                    has_state = false;
    bool                                    recurrent = false;
    std::unordered_set<const ggml_tensor *> weights;

    std::vector<ggml_tensor *> stack(block.leaves.begin(), block.leaves.end());
    bool                       with_writes = false;
    while (true) {
        while (!stack.empty()) {
            ggml_tensor * t = stack.back();
            stack.pop_back();
            const int i = g.find(t);
            if (i < 0 || seen[i] || (g.stage[i] >= 0 && g.stage[i] != stage)) {
                continue; // a leaf of the graph, or before the stream
            }
            seen[i] = 1;
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                ggml_tensor * src = t->src[k];
                if (!src) {
                    continue;
                }
                stack.push_back(src);
                const ggml_tensor * root = pyssd_root(src);
                has_state                = has_state || g.state.count(root) > 0;
                recurrent                = recurrent || g.recurrent.count(root) > 0;
                if (!is_weight(src) || g.stage[i] < 0 || !weights.insert(root).second) {
                    continue;
                }
                block.nbytes += (int64_t) ggml_nbytes(root);
                block.n_matrices += ggml_nrows(root) > 1;
                if (block.layer < 0) {
                    block.layer = layer_of_weight(root);
                }
                if (block.device.empty()) {
                    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(root->buffer));
                    block.device           = dev ? ggml_backend_dev_name(dev) : "CPU";
                }
            }
        }
        if (with_writes || !has_state) {
            break;
        }
        // keys and values reach the attention through the cache, not through an edge of the graph
        with_writes = true;
        if (stage < (int) writes_at.size()) {
            block.writes = writes_at[stage];
            stack.insert(stack.end(), block.writes.begin(), block.writes.end());
        }
    }
    block.kind = recurrent ? PYSSD_BLOCK_KIND_MIXER : has_state ? PYSSD_BLOCK_KIND_ATTN : PYSSD_BLOCK_KIND_FFN;
}

// group the branches of every join into at most one block of a kind
static void find_blocks(pyssd_graph & g, const std::vector<std::vector<ggml_tensor *>> & branches, pyssd_blocks & out) {
    const int n = (int) g.nodes.size();

    // stage of a node = joins on its way from the input
    std::unordered_map<const ggml_tensor *, int> stage_of_root;
    for (size_t j = 0; j < out.joins.size(); ++j) {
        stage_of_root[out.joins[j].root] = (int) j + 1;
    }
    g.stage.assign(n, -1);
    std::vector<std::vector<ggml_tensor *>> writes_at(out.joins.size());
    for (int i = 0; i < n; ++i) {
        int stage = g.from_input[i] ? 0 : -1;
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            const int j = g.nodes[i]->src[k] ? g.find(g.nodes[i]->src[k]) : -1;
            stage       = std::max(stage, j >= 0 ? g.stage[j] : -1);
        }
        const auto it = stage_of_root.find(g.nodes[i]);
        g.stage[i]    = it == stage_of_root.end() ? stage : it->second;
        if (pyssd_is_write(g.nodes[i]) && stage >= 0 && stage < (int) writes_at.size()) {
            writes_at[stage].push_back(g.nodes[i]);
        }
    }

    std::vector<uint8_t> seen(n);
    int                  layer = -1;
    for (size_t j = 0; j < out.joins.size(); ++j) {
        std::vector<pyssd_found> group;
        for (ggml_tensor * leaf : branches[j]) {
            // mostly j; a branch may also start from the stream before an earlier join (Arctic's experts)
            const int stage = g.stage[g.find(leaf)];
            if (stage < 0 || stage > (int) j) {
                continue;
            }
            pyssd_found part;
            part.join   = (int32_t) j;
            part.leaves = { leaf };
            describe(g, stage, pyssd_strip(out.joins[stage].stream), part, writes_at, seen);
            if (part.n_matrices == 0 && stage < (int) j) {
                continue; // an earlier value of the stream added once more: no block, stays whatever is skipped
            }
            auto same =
                std::find_if(group.begin(), group.end(), [&](const pyssd_found & b) { return b.kind == part.kind; });
            if (same == group.end()) {
                group.push_back(part);
                continue;
            }
            same->leaves.push_back(leaf);
            same->nbytes += part.nbytes;
            same->n_matrices += part.n_matrices;
            same->writes.insert(same->writes.end(), part.writes.begin(), part.writes.end());
            same->layer  = std::max(same->layer, part.layer);
            same->device = same->device.empty() ? part.device : same->device;
        }
        std::sort(group.begin(), group.end(), [](const pyssd_found & a, const pyssd_found & b) {
            return a.kind != b.kind && (a.kind != PYSSD_BLOCK_KIND_FFN && b.kind == PYSSD_BLOCK_KIND_FFN);
        });
        for (pyssd_found & block : group) {
            if (block.layer < 0) {
                block.layer = std::max(layer, 0);
            }
            if (block.device.empty()) {
                block.device = "CPU";
            }
            if (block.n_matrices == 0) {
                out.refusal =
                    std::string("the branch '") + block.leaves[0]->name + "' of the residual stream has no weights";
            }
            layer = block.layer;
            out.blocks.push_back(block);
        }
    }
}

pyssd_blocks pyssd_blocks_walk(pyssd_graph & g, ggml_tensor * logits, const ggml_tensor * input) {
    pyssd_blocks                            out;
    std::vector<std::vector<ggml_tensor *>> branches;

    ggml_tensor * t = logits;
    while (t != input) {
        if (!g.depends(t)) {
            out.refusal = "the residual stream ends before the token embeddings";
            return out;
        }
        if (g.is_add(t, true)) {
            std::vector<ggml_tensor *> leaves;
            collect_leaves(g, t, true, leaves);
            int           n_found = 0;
            ggml_tensor * stream  = find_stream(g, leaves, n_found);
            if (!stream) {
                out.refusal = std::string(n_found ? "several operands" : "no operand") + " of the sum '" + t->name +
                              "' could carry the residual stream";
                return out;
            }
            leaves.erase(std::find(leaves.begin(), leaves.end(), stream));
            out.joins.push_back({ t, stream });
            branches.push_back(leaves);
            t = stream;
            continue;
        }
        ggml_tensor * next = nullptr;
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            ggml_tensor * src = t->src[k];
            if (!src || src == next || !(src == input || g.depends(src))) {
                continue;
            }
            if (next) {
                out.refusal = std::string("the residual stream passes through '") + t->name + "' (" +
                              ggml_op_name(t->op) + "), which has two computed operands";
                return out;
            }
            next = src;
        }
        if (!next) {
            break; // the embedding look-up itself
        }
        t = next;
    }
    if (out.joins.empty()) {
        out.refusal = "no attention or FFN block was found on the residual stream";
        return out;
    }
    std::reverse(out.joins.begin(), out.joins.end());
    std::reverse(branches.begin(), branches.end());
    find_blocks(g, branches, out);
    return out;
}
