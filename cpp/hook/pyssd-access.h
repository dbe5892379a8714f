#pragma once

// The one friend of llama_context: everything the hook touches inside it passes through here.

#include "llama-context.h"

#include <array>
#include <memory>
#include <utility>

struct pyssd_access {
    static pyssd_state &       state(llama_context & ctx) { return ctx.pyssd; }
    static const pyssd_state & state(const llama_context & ctx) { return ctx.pyssd; }

    static llama_cparams &       cparams(llama_context & ctx) { return ctx.cparams; }
    static const llama_cparams & cparams(const llama_context & ctx) { return ctx.cparams; }

    static std::shared_ptr<llama_memory_i> &       memory(llama_context & ctx) { return ctx.memory; }
    static const std::shared_ptr<llama_memory_i> & memory(const llama_context & ctx) { return ctx.memory; }

    static const llama_model &                 model(const llama_context & ctx) { return ctx.model; }
    static ggml_backend_t                      backend_cpu(const llama_context & ctx) { return ctx.backend_cpu; }
    static ggml_backend_buffer_t               output_buffer(const llama_context & ctx) { return ctx.buf_output.get(); }
    static const std::vector<ggml_backend_t> & backends(const llama_context & ctx) { return ctx.backend_ptrs; }
    static uint32_t                            n_outputs(const llama_context & ctx) { return ctx.n_outputs; }
    static int64_t output_row(const llama_context & ctx, int32_t i) { return ctx.output_resolve_row(i); }
    static bool    has_adapters(const llama_context & ctx) {
        return !(ctx.pyssd.owner ? ctx.pyssd.owner : &ctx)->loras->empty();
    }

    // the scheduler and the graphs that the next pass uses, for others of the same context
    static void exchange_graphs(llama_context & ctx, ggml_backend_sched_ptr & sched,
                                std::array<llm_graph_result_ptr, 2> & results, llm_graph_result *& active) {
        std::swap(ctx.sched, sched);
        std::swap(ctx.gf_res_prev, results);
        std::swap(ctx.gf_res_prev_active, active);
    }
    static ggml_backend_sched_ptr new_sched(const llama_context & ctx) {
        return ggml_backend_sched_ptr(ggml_backend_sched_new(
            const_cast<ggml_backend_t *>(ctx.backend_ptrs.data()),
            const_cast<ggml_backend_buffer_type_t *>(ctx.backend_buft.data()), (int) ctx.backend_ptrs.size(),
            (size_t) ctx.gf_res_reserve->get_max_nodes(), false, ctx.cparams.op_offload));
    }

    static void reserve_again(llama_context & ctx) { ctx.sched_need_reserve = true; }
    static void follow(llama_context & ctx, const llama_context & owner) {
        ctx.set_n_threads(owner.cparams.n_threads, owner.cparams.n_threads_batch);
        ctx.threadpool       = owner.threadpool;
        ctx.threadpool_batch = owner.threadpool_batch;
        ctx.set_abort_callback(owner.abort_callback, owner.abort_callback_data);
    }
};
