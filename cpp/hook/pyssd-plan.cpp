#include "pyssd-plan.h"

#include "pyssd-access.h"
#include "pyssd-blocks.h"
#include "pyssd-fault.h"
#include "pyssd-hook.h"
#include "pyssd-mark.h"
#include "pyssd-rows.h"

#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

bool pyssd_plan_same(uint64_t a, uint64_t b) {
    return a == b || pyssd_fault("plan-id");
}

uint32_t pyssd_extra_nodes(const llama_context & ctx) {
    return pyssd_access::state(ctx).owner ? 1024 : 0;
}

namespace {

// rewrites the residual stream of one graph
struct surgeon {
    pyssd_graph &        g;
    const pyssd_blocks & b;
    ggml_context *       ctx;

    std::unordered_set<const ggml_tensor *>                dropped;  // operands of skipped blocks
    std::unordered_map<const ggml_tensor *, ggml_tensor *> replaced; // old sum -> what stands for it now
    std::unordered_set<const ggml_tensor *>                skipped_writes;
    std::vector<ggml_tensor *>                             added;

    // what stands for t after the joins before it were rewritten
    ggml_tensor * resolve(ggml_tensor * t) const {
        for (auto it = replaced.find(t); it != replaced.end(); it = replaced.find(t)) {
            t = it->second;
        }
        return t;
    }

    // the sum t without its dropped operands, NULL if nothing is left of it; keeps upstream's order of additions
    ggml_tensor * rebuild(ggml_tensor * t, bool root) {
        if (dropped.count(t)) {
            return nullptr;
        }
        if (!g.is_add(t, root)) {
            return t;
        }
        ggml_tensor * lhs = rebuild(t->src[0], false);
        ggml_tensor * rhs = rebuild(t->src[1], false);
        if (lhs == t->src[0] && rhs == t->src[1]) {
            return t;
        }
        if (!lhs || !rhs) {
            return lhs ? lhs : rhs;
        }
        ggml_tensor * sum = ggml_add(ctx, lhs, rhs);
        ggml_set_name(sum, t->name);
        added.push_back(sum);
        return sum;
    }

    void skip(const std::vector<uint8_t> & bits) {
        std::vector<uint8_t> touched(b.joins.size(), 0);
        for (size_t i = 0; i < b.blocks.size(); ++i) {
            if (bits[i]) {
                touched[b.blocks[i].join] = 1;
                dropped.insert(b.blocks[i].leaves.begin(), b.blocks[i].leaves.end());
                skipped_writes.insert(b.blocks[i].writes.begin(), b.blocks[i].writes.end());
            }
        }
        for (size_t j = 0; j < b.joins.size(); ++j) {
            ggml_tensor * root = b.joins[j].root;
            ggml_tensor * sum  = touched[j] ? rebuild(root, true) : root;
            if (sum != root) {
                replaced[root] = sum;
            }
        }
        const auto redirect = [&](ggml_tensor * t) {
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                if (t->src[k]) {
                    t->src[k] = resolve(t->src[k]);
                }
            }
        };
        std::for_each(g.nodes.begin(), g.nodes.end(), redirect);
        std::for_each(added.begin(), added.end(), redirect);
    }
};

void mark(ggml_tensor * t, std::unordered_set<const ggml_tensor *> & live) {
    std::vector<ggml_tensor *> stack = { t };
    while (!stack.empty()) {
        ggml_tensor * cur = stack.back();
        stack.pop_back();
        if (!live.insert(cur).second) {
            continue;
        }
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (cur->src[k]) {
                stack.push_back(cur->src[k]);
            }
        }
    }
}

// nodes that the outputs need, and the writes of the cells that a live node reads
std::unordered_set<const ggml_tensor *> find_live(const surgeon & s, const std::vector<ggml_tensor *> & outputs) {
    std::unordered_set<const ggml_tensor *> live;
    for (ggml_tensor * t : outputs) {
        mark(t, live);
    }
    for (ggml_tensor * t : s.g.nodes) {
        if (pyssd_is_write(t) && !s.skipped_writes.count(t)) {
            mark(t, live);
        }
    }
    // layers that share cells: a skipped attention keeps its writes as long as another layer reads them
    for (bool again = true; again;) {
        again = false;
        std::unordered_set<const ggml_tensor *> read;
        for (const ggml_tensor * t : live) {
            for (int k = 0; k < GGML_MAX_SRC && !pyssd_is_write(t); ++k) {
                if (t->src[k] && t->src[k]->op != GGML_OP_NONE) {
                    read.insert(pyssd_root(t->src[k]));
                } else if (t->src[k]) {
                    read.insert(t->src[k]);
                }
            }
        }
        for (const ggml_tensor * w : s.skipped_writes) {
            if (!live.count(w) && read.count(pyssd_root(w))) {
                mark(const_cast<ggml_tensor *>(w), live);
                again = true;
            }
        }
    }
    return live;
}

// the LM head over its first rows: re-makes the element-wise tail behind the product; NULL if the tail is not understood
ggml_tensor * trim_head(ggml_context * ctx, ggml_tensor * t, const ggml_tensor * output, int64_t rows) {
    if (t->op == GGML_OP_MUL_MAT && t->src[0] == output) {
        ggml_tensor * w    = t->src[0];
        ggml_tensor * view = ggml_view_2d(ctx, w, w->ne[0], rows, w->nb[1], 0);
        // settle buffer and packed layout now: the scheduler places the product by the view's buffer
        if (ggml_backend_view_init(view) != GGML_STATUS_SUCCESS) {
            return nullptr;
        }
        return ggml_mul_mat(ctx, view, t->src[1]);
    }
    ggml_tensor * in = t->src[0] ? trim_head(ctx, t->src[0], output, rows) : nullptr;
    if (!in) {
        return nullptr;
    }
    float scale_bias[2];
    switch (t->op) {
        case GGML_OP_SCALE:
            memcpy(scale_bias, t->op_params, sizeof(scale_bias));
            return ggml_scale_bias(ctx, in, scale_bias[0], scale_bias[1]);
        case GGML_OP_UNARY:
            return ggml_unary(ctx, in, ggml_get_unary_op(t));
        case GGML_OP_ADD:
            if (t->src[1]->op != GGML_OP_NONE || ggml_nrows(t->src[1]) != 1) {
                return nullptr;
            }
            return ggml_add(ctx, in, ggml_view_1d(ctx, t->src[1], rows, 0));
        default:
            return nullptr;
    }
}

} // namespace

bool pyssd_has_prefix_rows(const ggml_tensor * w) {
    const ggml_tensor * root = pyssd_root(w);
    if (!root->buffer) {
        return false;
    }
    const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(root->buffer));
    for (const char * known : { "CPU", "CUDA", "ROCm", "Vulkan", "Metal", "MTL", "RPC" }) {
        if (strncmp(name, known, strlen(known)) == 0) {
            return !strstr(name, "Split");
        }
    }
    return false;
}

std::vector<ggml_tensor *> pyssd_recurrent_state(const llama_context & ctx) {
    const llama_memory_i *         memory = pyssd_access::memory(ctx).get();
    const llama_memory_recurrent * r      = dynamic_cast<const llama_memory_recurrent *>(memory);
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        r = hybrid->get_mem_recr();
    } else if (const auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        r = hybrid_iswa->get_mem_recr();
    } else if (const auto * hybrid_idx = dynamic_cast<const llama_memory_hybrid_idx *>(memory)) {
        r = hybrid_idx->get_mem_recr();
    }
    std::vector<ggml_tensor *> out;
    for (const auto * states : { r ? &r->r_l : nullptr, r ? &r->s_l : nullptr }) {
        if (states) {
            std::copy_if(states->begin(), states->end(), std::back_inserter(out),
                         [](const ggml_tensor * t) { return t != nullptr; });
        }
    }
    return out;
}

bool pyssd_graph_apply(llama_context & lctx, llm_graph_result & res) {
    pyssd_state & state = pyssd_access::state(lctx);
    ggml_cgraph * gf    = res.get_gf();

    state.n_built += pyssd_fault("graph-counter") ? 0 : 1;
    state.n_nodes = ggml_graph_n_nodes(gf);

    for (int i = 0; state.invariant && i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * t = ggml_graph_node(gf, i);
        if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            t->op_params[pyssd::attention_mark_slot] = pyssd::attention_mark;
        }
    }

    for (int i = 0; state.single_rows && i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * t = ggml_graph_node(gf, i);
        if (t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID ||
            (t->op == GGML_OP_FLASH_ATTN_EXT && !state.invariant)) {
            pyssd_rows_mark(t);
        }
    }

    const pyssd_graph_plan & plan = state.plan;
    if (plan.id == 0) {
        return true;
    }
    state.error.clear();
    pyssd_outputs & kept = state.outputs[pyssd_access::n_outputs(lctx) > 0];
    kept                 = {};
    if (!res.t_logits) {
        state.error = "this graph computes no logits";
        return false;
    }

    const ggml_tensor * input = res.t_inp_embd ? res.t_inp_embd : res.t_inp_tokens;
    pyssd_graph         g(gf, input, pyssd_recurrent_state(lctx));
    pyssd_blocks        b = pyssd_blocks_walk(g, res.t_logits, input);
    surgeon             s = { g, b, res.get_ctx(), {}, {}, {}, {} };

    if (!plan.skip.empty()) {
        if (!b.refusal.empty() || b.blocks.size() != plan.skip.size()) {
            state.error = !b.refusal.empty() ? b.refusal
                                             : "the plan has " + std::to_string(plan.skip.size()) +
                                                   " blocks, this graph has " + std::to_string(b.blocks.size());
            return false;
        }
        for (size_t i = 0; i < plan.skip.size(); ++i) {
            if (plan.skip[i] && b.blocks[i].kind == PYSSD_BLOCK_KIND_MIXER) {
                state.error = "block " + std::to_string(i) + " keeps recurrent state and cannot be skipped";
                return false;
            }
        }
        s.skip(plan.skip);
    }

    std::vector<ggml_tensor *>
        leafs; // inputs stay allocated even if nothing reads them any more: set_inputs fills them all
    for (const ggml_tensor * t : g.nodes) {
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (t->src[k] && (t->src[k]->flags & GGML_TENSOR_FLAG_INPUT)) {
                leafs.push_back(t->src[k]);
            }
        }
    }
    for (int i = 0; i < (int) g.nodes.size(); ++i) {
        if (g.nodes[i]->flags & GGML_TENSOR_FLAG_INPUT) {
            leafs.push_back(g.nodes[i]);
        }
    }

    ggml_tensor * logits = res.t_logits;
    if (plan.head_rows > 0) {
        logits = trim_head(res.get_ctx(), logits, pyssd_access::model(lctx).output, plan.head_rows);
        if (!logits) {
            state.error = "the operations behind the LM head are not understood, so it cannot be trimmed";
            return false;
        }
        kept.logits = logits;
    }
    std::vector<ggml_tensor *> outputs;
    if (plan.argmax) {
        kept.argmax = ggml_argmax(res.get_ctx(), logits);
        outputs.push_back(kept.argmax);
    } else {
        outputs.push_back(logits);
    }
    for (int32_t tap : plan.taps) {
        if (!b.refusal.empty() || tap > (int32_t) b.blocks.size()) {
            state.error =
                !b.refusal.empty() ? b.refusal : "no block " + std::to_string(tap) + " to read the residual stream at";
            return false;
        }
        const bool    last = tap == (int32_t) b.blocks.size();
        ggml_tensor * t    = last ? b.joins.back().root : b.joins[b.blocks[tap].join].stream;
        for (t = s.resolve(t); t->op == GGML_OP_GET_ROWS && g.depends(t->src[0]); t = s.resolve(t->src[0])) {
            // the last layer gathers the rows that have outputs; a tap shows all of them
        }
        t = ggml_cont(res.get_ctx(), t);
        kept.taps.push_back(t);
        outputs.push_back(t);
    }
    for (ggml_tensor * t : { res.t_embd, res.t_embd_pooled, res.t_h_nextn }) {
        if (t && g.find(t) >= 0) {
            outputs.push_back(s.resolve(t));
        }
    }
    std::for_each(outputs.begin(), outputs.end(), ggml_set_output);

    // the same nodes in the same order, less those that nothing needs; clearing also renews the use counts that fusion reads
    const auto live = find_live(s, outputs);
    ggml_graph_clear(gf);
    for (ggml_tensor * t : g.nodes) {
        if (live.count(t)) {
            if (t->flags & GGML_TENSOR_FLAG_COMPUTE) {
                ggml_build_forward_expand(gf, t);
            } else {
                ggml_build_forward_order(gf, t);
            }
        }
    }
    for (ggml_tensor * t : outputs) {
        ggml_build_forward_expand(gf, t);
    }
    for (ggml_tensor * t : leafs) {
        ggml_build_forward_order(gf, t);
    }
    if (plan.head_rows > 0 || plan.argmax) {
        res.t_logits = nullptr; // read by pyssd_logits_ith and pyssd_argmax_ith instead
    }
    state.n_nodes = ggml_graph_n_nodes(gf);
    return true;
}
