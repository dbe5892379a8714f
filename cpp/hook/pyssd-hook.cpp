#include "pyssd-hook.h"

#include "pyssd-access.h"
#include "pyssd-blocks.h"
#include "pyssd-plan.h"

#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <unordered_set>

namespace {

// never reused within the process: a graph must not run under another plan that happens to have its id
std::atomic<uint64_t> plan_counter = { 0 };

} // namespace

int32_t pyssd_fail(const llama_context & ctx, const std::string & text) {
    pyssd_access::state(ctx).error = text;
    return -1;
}

uint32_t pyssd_abi_version(void) {
    return PYSSD_ABI_VERSION;
}

size_t pyssd_sizeof(const char * name) {
    const std::pair<const char *, size_t> sizes[] = {
        { "llama_model_params",     sizeof(llama_model_params)     },
        { "llama_context_params",   sizeof(llama_context_params)   },
        { "llama_batch",            sizeof(llama_batch)            },
        { "llama_sampler_i",        sizeof(llama_sampler_i)        },
        { "llama_token_data",       sizeof(llama_token_data)       },
        { "llama_token_data_array", sizeof(llama_token_data_array) },
    };
    for (const auto & [known, size] : sizes) {
        if (name && strcmp(name, known) == 0) {
            return size;
        }
    }
    return 0;
}

const char * pyssd_error(const llama_context * ctx) {
    return pyssd_access::state(*ctx).error.c_str();
}

int32_t pyssd_plan_set(llama_context * ctx, const pyssd_plan * plan) {
    pyssd_state & state = pyssd_access::state(*ctx);
    state.error.clear();
    if (!plan) {
        state.plan                             = {};
        pyssd_access::cparams(*ctx).pyssd_plan = 0;
        return 0;
    }
    if (!state.owner) {
        return pyssd_fail(*ctx, "plans run on borrowers only; the owner keeps the stock graph");
    }
    const ggml_tensor * output = pyssd_access::model(*ctx).output;
    pyssd_graph_plan    next;
    if (plan->skip && plan->n_blocks > 0) {
        next.skip.assign(plan->skip, plan->skip + plan->n_blocks);
        if (std::none_of(next.skip.begin(), next.skip.end(), [](uint8_t bit) { return bit != 0; })) {
            next.skip.clear();
        }
    }
    if (plan->head_rows < 0 || (plan->head_rows > 0 && (!output || plan->head_rows > output->ne[1]))) {
        return pyssd_fail(*ctx, "head_rows is outside of the LM head");
    }
    if (plan->head_rows > 0 && output && plan->head_rows < output->ne[1]) {
        // packed layouts interleave up to 32 rows; a view that cuts through a group would read garbage
        if (plan->head_rows % 256 != 0) {
            return pyssd_fail(*ctx, "head_rows must be a multiple of 256");
        }
        if (!pyssd_has_prefix_rows(output)) {
            return pyssd_fail(*ctx, "the first rows of the LM head are not a prefix of its buffer");
        }
        if (pyssd_access::has_adapters(*ctx)) {
            return pyssd_fail(*ctx, "the LM head cannot be trimmed while a LoRA is loaded");
        }
        next.head_rows = plan->head_rows;
    }
    next.argmax = plan->argmax != 0;
    if (plan->n_taps > 0) {
        next.taps.assign(plan->taps, plan->taps + plan->n_taps);
        if (std::any_of(next.taps.begin(), next.taps.end(), [](int32_t tap) { return tap < 0; })) {
            return pyssd_fail(*ctx, "a tap is negative");
        }
    }
    if (next.skip.empty() && next.head_rows == 0 && !next.argmax && next.taps.empty()) {
        state.plan = {};
    } else if (state.plan.id == 0 || next.skip != state.plan.skip || next.head_rows != state.plan.head_rows ||
               next.argmax != state.plan.argmax || next.taps != state.plan.taps) {
        next.id    = ++plan_counter;
        state.plan = next;
    }
    pyssd_access::cparams(*ctx).pyssd_plan = state.plan.id;
    return 0;
}

static thread_local bool tl_walked = false;

bool pyssd_graph_is_walked(void) {
    return tl_walked;
}

// a graph as it is built, neither split nor run; NULL on failure
static ggml_cgraph * build_only(llama_context * ctx, uint32_t n_tokens, uint32_t n_outputs) {
    auto mctx = pyssd_access::memory(*ctx)->init_full();
    if (!mctx) {
        return nullptr;
    }
    tl_walked        = true;
    ggml_cgraph * gf = ctx->graph_reserve(n_tokens, 1, n_outputs, mctx.get(), true);
    tl_walked        = false;
    return gf;
}

int32_t pyssd_weights_list(llama_context * ctx, pyssd_weight * out, int32_t cap) {
    pyssd_access::state(*ctx).error.clear();
    if (!pyssd_access::memory(*ctx)) {
        return pyssd_fail(*ctx, "this context has no KV memory");
    }
    ctx->sched_reserve();
    ggml_cgraph * gf = build_only(ctx, 1, 1);
    if (!gf) {
        return pyssd_fail(*ctx, "this model's graph cannot be built");
    }
    std::unordered_set<const ggml_tensor *> seen;
    int32_t                                 n = 0;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * t = ggml_graph_node(gf, i);
        if (t->op != GGML_OP_MUL_MAT && t->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        const ggml_tensor * w = pyssd_root(t->src[0]);
        if (!w->buffer || ggml_backend_buffer_get_usage(w->buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS ||
            !seen.insert(w).second) {
            continue;
        }
        if (n < cap) {
            snprintf(out[n].name, sizeof(out[n].name), "%s", w->name);
            snprintf(out[n].type, sizeof(out[n].type), "%s", ggml_type_name(w->type));
            snprintf(out[n].buffer, sizeof(out[n].buffer), "%s",
                     ggml_backend_buft_name(ggml_backend_buffer_get_type(w->buffer)));
            out[n].nbytes = (int64_t) ggml_nbytes(w);
        }
        n++;
    }
    return n;
}

static bool walk_reserved(llama_context * ctx, uint32_t n_tokens, uint32_t n_outputs, pyssd_blocks & out) {
    ggml_cgraph *            gf  = build_only(ctx, n_tokens, n_outputs);
    const llm_graph_result * res = ctx->get_gf_res_reserve();
    if (!gf || !res->t_logits) {
        return false;
    }
    const ggml_tensor * input = res->t_inp_embd ? res->t_inp_embd : res->t_inp_tokens;
    pyssd_graph         g(gf, input, pyssd_recurrent_state(*ctx));
    out = pyssd_blocks_walk(g, res->t_logits, input);
    return true;
}

int32_t pyssd_blocks_find(llama_context * ctx, pyssd_block * out, int32_t cap) {
    pyssd_access::state(*ctx).error.clear();
    if (!pyssd_access::memory(*ctx) || pyssd_access::cparams(*ctx).embeddings) {
        return pyssd_fail(*ctx, "this context has no KV memory or computes embeddings");
    }
    ctx->sched_reserve();

    // the same blocks must show whether or not the last layer gathers rows, else indices would shift between contexts
    pyssd_blocks one;
    pyssd_blocks all;
    if (!walk_reserved(ctx, 2, 1, one) || !walk_reserved(ctx, 2, 2, all)) {
        return pyssd_fail(*ctx, "this model's graph computes no logits");
    }
    for (const pyssd_blocks * b : { &one, &all }) {
        if (!b->refusal.empty()) {
            return pyssd_fail(*ctx, b->refusal);
        }
    }
    const auto same = [](const pyssd_found & a, const pyssd_found & b) {
        return a.kind == b.kind && a.layer == b.layer;
    };
    if (!std::equal(one.blocks.begin(), one.blocks.end(), all.blocks.begin(), all.blocks.end(), same)) {
        return pyssd_fail(*ctx, "the blocks depend on how many rows have outputs");
    }
    for (int32_t i = 0; i < cap && i < (int32_t) all.blocks.size(); ++i) {
        const pyssd_found & b = all.blocks[i];
        out[i].index          = i;
        out[i].layer          = b.layer;
        out[i].kind           = b.kind;
        out[i].nbytes         = b.nbytes;
        snprintf(out[i].device, sizeof(out[i].device), "%s", b.device.c_str());
    }
    return (int32_t) all.blocks.size();
}

int32_t pyssd_memory_can_rewind(llama_context * ctx) {
    pyssd_access::state(*ctx).error.clear();
    const llama_memory_i * memory = pyssd_access::memory(*ctx).get();
    if (!memory) {
        pyssd_fail(*ctx, "the model keeps no KV memory");
        return 0;
    }
    const bool known =
        dynamic_cast<const llama_kv_cache *>(memory) || dynamic_cast<const llama_kv_cache_iswa *>(memory) ||
        dynamic_cast<const llama_kv_cache_dsa *>(memory) || dynamic_cast<const llama_kv_cache_dsa_iswa *>(memory) ||
        dynamic_cast<const llama_kv_cache_msa *>(memory);
    if (!known) {
        pyssd_fail(*ctx, "its memory (recurrent, hybrid or compressed) cannot drop the last tokens");
        return 0;
    }
    return 1;
}

void pyssd_memory_swa(const llama_context * ctx, int32_t * n_swa, int32_t * chunked, int32_t * reach) {
    const llama_hparams & hparams = pyssd_access::model(*ctx).hparams;
    *n_swa                        = (int32_t) hparams.n_swa;
    *chunked                      = hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED;
    *reach                        = INT_MAX;

    const auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(pyssd_access::memory(*ctx).get());
    if (iswa && iswa->get_swa()->get_size() < iswa->get_base()->get_size()) {
        *reach = std::max(0, (int32_t) iswa->get_swa()->get_size() - *n_swa);
    }
}

const float * pyssd_logits_ith(llama_context * ctx, int32_t i) {
    pyssd_state & state = pyssd_access::state(*ctx);
    if (state.plan.head_rows == 0) {
        return llama_get_logits_ith(ctx, i);
    }
    ggml_tensor * t = state.outputs[1].logits;
    if (!t) {
        return nullptr;
    }
    ctx->synchronize();
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(ctx->get_sched(), t);
    if (!backend) {
        return nullptr;
    }
    int64_t row = -1;
    try {
        row = pyssd_access::output_row(*ctx, i);
    } catch (const std::exception & err) {
        state.error = err.what();
        return nullptr;
    }
    const size_t n_vocab = (size_t) pyssd_access::model(*ctx).vocab.n_tokens();
    if (row < 0 || row >= t->ne[1] || (size_t) t->ne[0] > n_vocab) {
        return nullptr;
    }
    if (state.logits.size() != n_vocab) {
        state.logits.assign(n_vocab, -std::numeric_limits<float>::infinity());
    }
    std::fill(state.logits.begin() + t->ne[0], state.logits.end(), -std::numeric_limits<float>::infinity());
    ggml_backend_tensor_get(t, state.logits.data(), row * t->nb[1], t->ne[0] * sizeof(float));
    return state.logits.data();
}

int32_t pyssd_argmax_ith(llama_context * ctx, int32_t i) {
    ggml_tensor * t = pyssd_access::state(*ctx).outputs[1].argmax;
    if (!t || i < 0 || i >= t->ne[0]) {
        return -1;
    }
    ctx->synchronize();
    int32_t id = -1;
    ggml_backend_tensor_get(t, &id, i * sizeof(int32_t), sizeof(int32_t));
    return id;
}

int64_t pyssd_tap_get(llama_context * ctx, int32_t k, float * dst, int64_t capacity) {
    const auto & taps = pyssd_access::state(*ctx).outputs[1].taps;
    if (k < 0 || k >= (int32_t) taps.size() || taps[k]->type != GGML_TYPE_F32 || ggml_nelements(taps[k]) > capacity) {
        return -1;
    }
    ctx->synchronize();
    ggml_backend_tensor_get(taps[k], dst, 0, ggml_nbytes(taps[k]));
    return ggml_nelements(taps[k]);
}

uint64_t pyssd_graphs_built(const llama_context * ctx) {
    return pyssd_access::state(*ctx).n_built;
}

int32_t pyssd_graph_nodes(const llama_context * ctx) {
    return pyssd_access::state(*ctx).n_nodes;
}

size_t pyssd_context_nbytes(const llama_context * ctx) {
    size_t sum = 0;
    for (ggml_backend_t backend : pyssd_access::backends(*ctx)) {
        sum += ggml_backend_sched_get_buffer_size(ctx->get_sched(), backend);
        sum += pyssd_slots_nbytes(*ctx, backend);
    }
    ggml_backend_buffer_t output = pyssd_access::output_buffer(*ctx);
    return sum + (output ? ggml_backend_buffer_get_size(output) : 0);
}

uint32_t pyssd_outputs_max(const llama_context * ctx) {
    return pyssd_access::cparams(*ctx).n_outputs_max;
}

int32_t pyssd_flash_attn(const llama_context * ctx) {
    return pyssd_access::cparams(*ctx).flash_attn;
}
