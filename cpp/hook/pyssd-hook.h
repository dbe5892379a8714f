#pragma once

// pyssd's additions to libllama: contexts that share one KV memory, graph plans (skip, head trim, taps) and the
// discovery of attention / FFN blocks by structure. C API; no function here throws or aborts on bad input.

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYSSD_ABI_VERSION 1

enum pyssd_block_kind {
    PYSSD_BLOCK_KIND_ATTN  = 0, // reads or writes KV cells
    PYSSD_BLOCK_KIND_FFN   = 1, // everything else that is added to the residual stream
    PYSSD_BLOCK_KIND_MIXER = 2, // recurrent state: listed, never skippable
};

// clang-format off
struct pyssd_block {
    int32_t index;      // order along the residual stream
    int32_t layer;      // N of the block's weights "blk.N.", else the layer of the block before it
    int32_t kind;       // enum pyssd_block_kind
    int64_t nbytes;     // bytes of the weights that only this block reads
    char    device[64]; // device of the block's first weight
};

struct pyssd_plan {
    const uint8_t * skip;      // [n_blocks], 1 = skipped; NULL = none
    int32_t         n_blocks;  // must equal the number of blocks of the model when skip is given
    int32_t         head_rows; // apply the LM head to its first rows only; 0 = all
    int32_t         argmax;    // 1 = rows are reduced to their argmax on the device and no logits are read back
    const int32_t * taps;      // [n_taps] 0 <= tap <= n_blocks: residual stream before block `tap` (n_blocks: after the last)
    int32_t         n_taps;
};

LLAMA_API uint32_t pyssd_abi_version(void);

// sizeof a public struct as this library was compiled: "llama_model_params", "llama_context_params", "llama_batch",
// "llama_sampler_i", "llama_token_data", "llama_token_data_array"; 0 for an unknown name
LLAMA_API size_t pyssd_sizeof(const char * name);

// text of the last failure of a function below on this context, "" if none; valid until the next call on the context
LLAMA_API const char * pyssd_error(const struct llama_context * ctx);

// a context that decodes into the owner's KV memory with graphs and a scheduler of its own (two rows of compute buffer
// instead of n_ubatch). Needs n_batch >= n_outputs_max >= n_seq_max >= 1. Free it before the owner.
// NULL on failure; then pyssd_error(owner) says why
LLAMA_API struct llama_context * pyssd_borrower_init(
        struct llama_context * owner,
                    uint32_t   n_seq_max,
                    uint32_t   n_batch,
                    uint32_t   n_outputs_max);

// a context with plans like a borrower, but with a KV memory of its own of n_ctx cells (rounded up to 256), one sequence,
// batches of at most 64 tokens: for fresh passes over models whose memory cannot drop its last tokens. Free it before the owner
LLAMA_API struct llama_context * pyssd_private_init(struct llama_context * owner, uint32_t n_ctx);

// take over what may have changed at the owner: LoRA and control vectors, threads, abort callback, reference mode
// call at every hand-over, before decoding on the borrower
LLAMA_API void pyssd_borrower_sync(struct llama_context * borrower);

// the next decodes on ctx run this plan; NULL = the stock graph. 0 on success, -1: see pyssd_error
LLAMA_API int32_t pyssd_plan_set(struct llama_context * ctx, const struct pyssd_plan * plan);

// find the blocks; returns their number and fills at most cap of them, -1 if the structure is not understood
LLAMA_API int32_t pyssd_blocks_find(struct llama_context * ctx, struct pyssd_block * out, int32_t cap);

// a weight matrix that products read, and where it lies
struct pyssd_weight {
    char    name[64];
    char    type[16];   // as ggml names it
    char    buffer[64]; // buffer type: "CPU_PYSSD" = pyssd's kernels, "CPU_REPACK", "CPU", "CUDA0", ...
    int64_t nbytes;
};

// the weights of all matrix products of a graph; returns their number and fills at most cap of them, -1 on failure
LLAMA_API int32_t pyssd_weights_list(struct llama_context * ctx, struct pyssd_weight * out, int32_t cap);

// 1 if the KV memory can drop its last cells (dense or sliding-window attention), 0 with pyssd_error if not
LLAMA_API int32_t pyssd_memory_can_rewind(struct llama_context * ctx);

// sliding window: window size in cells (0 = none), 1 if the window is chunked, cells kept beyond the window (rewind reach;
// INT32_MAX if the cache holds every cell)
LLAMA_API void pyssd_memory_swa(const struct llama_context * ctx, int32_t * n_swa, int32_t * chunked, int32_t * reach);

// reference mode of ggml-cpu for this context (and, through pyssd_borrower_sync, its borrowers)
LLAMA_API void pyssd_reference_set(struct llama_context * ctx, bool value);

// attention of pyssd's CPU kernels for this context (and its borrowers): rows do not depend on the width of the batch
LLAMA_API void pyssd_invariant_set(struct llama_context * ctx, bool value);

// from the next pass on: upstream's CPU kernels compute each row of a pass as they compute a row alone, a few percent slower;
// for contexts without a plan
LLAMA_API void pyssd_single_rows_set(struct llama_context * ctx, bool value);

// keep the graphs of the few narrow widths that come up, so that going back and forth between them builds none; for
// contexts that are no borrowers. false frees them
LLAMA_API void pyssd_slots_set(struct llama_context * ctx, bool value);

// after llama_decode: logits of batch row i, [n_vocab], -inf for rows that the plan's head trim left out; NULL if none
LLAMA_API const float * pyssd_logits_ith(struct llama_context * ctx, int32_t i);

// after llama_decode with plan.argmax: token id of output row i (0-based among the outputs), -1 if none
LLAMA_API int32_t pyssd_argmax_ith(struct llama_context * ctx, int32_t i);

// after llama_decode with taps: copies tap k as float32 [n_tokens, n_embd]; returns floats written, -1 on failure
LLAMA_API int64_t pyssd_tap_get(struct llama_context * ctx, int32_t k, float * dst, int64_t capacity);

// graphs built by process_ubatch since the context was made
LLAMA_API uint64_t pyssd_graphs_built(const struct llama_context * ctx);

// nodes of the graph that ran last, 0 if none
LLAMA_API int32_t pyssd_graph_nodes(const struct llama_context * ctx);

// bytes of compute and output buffers of this context
LLAMA_API size_t pyssd_context_nbytes(const struct llama_context * ctx);

// rows of logits the context reserves at most, and whether flash attention is on (auto resolved)
LLAMA_API uint32_t pyssd_outputs_max(const struct llama_context * ctx);
LLAMA_API int32_t  pyssd_flash_attn(const struct llama_context * ctx);

#ifdef __cplusplus
}
#endif
