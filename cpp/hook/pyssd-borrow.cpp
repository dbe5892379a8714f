#include "pyssd-hook.h"

#include "pyssd-access.h"
#include "pyssd-plan.h"

#include "llama-model.h"

#include "ggml-cpu.h"

#include <algorithm>

// Contexts that follow an owner: a borrower shares its KV memory, a private one has a small memory of its own.

namespace {

// what the constructor of a borrower, which llama_init_from_model calls, must know
struct borrow_request {
    llama_context * owner;
    uint32_t        n_seq_max;
    uint32_t        n_batch;
    uint32_t        n_outputs_max;
    uint32_t        n_ctx; // 0 = the owner's memory, else cells of a memory of its own
};

thread_local const borrow_request * tl_borrow = nullptr;

void reference_apply(const llama_context & ctx, bool value) {
    ggml_backend_t cpu = pyssd_access::backend_cpu(ctx);
    if (!cpu) {
        return;
    }
    auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    auto * set = (decltype(ggml_backend_cpu_set_use_ref) *) ggml_backend_reg_get_proc_address(
        reg, "ggml_backend_cpu_set_use_ref");
    if (set) {
        set(cpu, value);
    }
}

} // namespace

bool pyssd_memory_borrow(llama_context & ctx) {
    if (!tl_borrow) {
        return false;
    }
    llama_context & owner = *tl_borrow->owner;
    llama_cparams & own   = pyssd_access::cparams(ctx);

    // resolved parameters (RoPE, flash attention, fused operations), not what the user once asked for
    own                       = pyssd_access::cparams(owner);
    own.n_seq_max             = tl_borrow->n_seq_max;
    own.n_batch               = tl_borrow->n_batch;
    own.n_ubatch              = tl_borrow->n_batch;
    own.n_outputs_max         = tl_borrow->n_outputs_max;
    own.n_outputs_max_per_seq = tl_borrow->n_outputs_max;
    own.kv_unified            = true; // the owner's memory has one stream, which holds the cells of every sequence
    own.n_ctx                 = tl_borrow->n_ctx ? tl_borrow->n_ctx : own.n_ctx;
    own.n_ctx_seq             = own.n_ctx;
    own.pipeline_parallel     = false;
    own.cb_eval               = nullptr;
    own.cb_eval_user_data     = nullptr;

    pyssd_access::state(ctx).owner = &owner;
    if (tl_borrow->n_ctx) {
        return false;
    }
    pyssd_access::memory(ctx) = pyssd_access::memory(owner);
    return true;
}

static llama_context * borrow(llama_context * owner, const borrow_request & request) {
    const llama_cparams & cparams = pyssd_access::cparams(*owner);
    llama_context_params  params  = llama_context_default_params();
    params.n_ctx                  = request.n_ctx ? request.n_ctx : cparams.n_ctx;
    params.n_batch                = request.n_batch;
    params.n_ubatch               = request.n_batch;
    params.n_seq_max              = request.n_seq_max;
    params.n_outputs_max          = request.n_outputs_max;
    params.n_threads              = cparams.n_threads;
    params.n_threads_batch        = cparams.n_threads_batch;
    params.flash_attn_type        = cparams.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified             = true;
    params.op_offload             = cparams.op_offload;
    params.no_perf                = true;

    tl_borrow           = &request;
    llama_context * ctx = llama_init_from_model(const_cast<llama_model *>(&pyssd_access::model(*owner)), params);
    tl_borrow           = nullptr;
    if (!ctx) {
        pyssd_fail(*owner, "llama.cpp could not make the context; its log says why");
        return nullptr;
    }
    pyssd_access::state(*ctx).adapters_seen = pyssd_access::state(*owner).adapters;
    pyssd_borrower_sync(ctx);
    return ctx;
}

llama_context * pyssd_borrower_init(llama_context * owner, uint32_t n_seq_max, uint32_t n_batch,
                                    uint32_t n_outputs_max) {
    const llama_cparams & cparams = pyssd_access::cparams(*owner);
    if (pyssd_access::state(*owner).owner) {
        pyssd_fail(*owner, "a borrower cannot lend its memory");
        return nullptr;
    }
    if (!pyssd_access::memory(*owner) || cparams.embeddings) {
        pyssd_fail(*owner, "this context has no KV memory to share or computes embeddings");
        return nullptr;
    }
    // llama.cpp aborts the process on the first and the second of these
    if (n_seq_max < 1 || n_outputs_max < n_seq_max || n_batch < n_outputs_max || n_batch > cparams.n_ctx) {
        pyssd_fail(*owner, "a borrower needs n_ctx >= n_batch >= n_outputs_max >= n_seq_max >= 1");
        return nullptr;
    }
    if (!cparams.kv_unified && cparams.n_seq_max > 1) {
        pyssd_fail(*owner, "the owner's memory is split by sequence; create it with kv_unified");
        return nullptr;
    }
    return borrow(owner, { owner, n_seq_max, n_batch, n_outputs_max, 0 });
}

llama_context * pyssd_private_init(llama_context * owner, uint32_t n_ctx) {
    if (pyssd_access::state(*owner).owner || !pyssd_access::memory(*owner) ||
        pyssd_access::cparams(*owner).embeddings) {
        pyssd_fail(*owner, "this context has no KV memory or computes embeddings");
        return nullptr;
    }
    n_ctx = std::max(GGML_PAD(n_ctx, 256u), 256u);
    return borrow(owner, { owner, 1, std::min(n_ctx, 64u), std::min(n_ctx, 64u), n_ctx });
}

void pyssd_borrower_sync(llama_context * borrower) {
    pyssd_state & state = pyssd_access::state(*borrower);
    if (!state.owner) {
        return;
    }
    const pyssd_state & owner = pyssd_access::state(*state.owner);
    pyssd_access::follow(*borrower, *state.owner);
    if (state.reference != owner.reference) {
        state.reference = owner.reference;
        reference_apply(*borrower, state.reference);
    }
    if (state.invariant != owner.invariant) {
        pyssd_invariant_set(borrower, owner.invariant);
    }
    if (state.adapters_seen != owner.adapters) {
        state.adapters_seen = owner.adapters;
        pyssd_access::reserve_again(*borrower); // also drops the graphs that name the former adapters
    }
}

void pyssd_reference_set(llama_context * ctx, bool value) {
    pyssd_access::state(*ctx).reference = value;
    reference_apply(*ctx, value);
}

void pyssd_single_rows_set(llama_context * ctx, bool value) {
    pyssd_state & state = pyssd_access::state(*ctx);
    state.single_rows   = value;
    if (state.plan.id == 0) {
        // takes part in reuse: a marked graph is no stock graph
        pyssd_access::cparams(*ctx).pyssd_plan = value ? UINT64_MAX : 0;
    }
}

void pyssd_invariant_set(llama_context * ctx, bool value) {
    pyssd_access::state(*ctx).invariant = value;
    pyssd_access::reserve_again(*ctx); // the graphs at hand carry the former choice
}
