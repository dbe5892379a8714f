#include "session.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "api.h"

namespace pyssd {

static bool abort_requested(void * data) {
    return static_cast<const std::atomic<bool> *>(data)->load(std::memory_order_relaxed);
}

static int32_t vocab_size_of(const llama_context * ctx) {
    return api().llama_vocab_n_tokens(api().llama_model_get_vocab(api().llama_get_model(ctx)));
}

session::session(llama_context * ctx, bool reference, bool invariant, bool rows_singly)
    : target(ctx), current(ctx), memory(api().llama_get_memory(ctx)),
      vocab(api().llama_model_get_vocab(api().llama_get_model(ctx))), vocab_size(vocab_size_of(ctx)),
      embd_size(api().llama_model_n_embd(api().llama_get_model(ctx))), target_batch((int32_t) api().llama_n_batch(ctx)),
      draft_batch(DRAFT_BATCH), cand(vocab_size_of(ctx)) {
    api().llama_set_abort_callback(target, abort_requested, &cancelled);
    if (invariant) {
        api().pyssd_invariant_set(target, true);
    }
    if (reference) {
        api().pyssd_reference_set(target, true);
    }
    single_rows = rows_singly;
    if (memory != nullptr) {
        api().pyssd_memory_swa(target, &swa_window, &swa_chunked, &swa_reach);
        past = api().llama_memory_seq_pos_max(memory, 0) + 1;
    }
    take_as_clean();
}

session::~session() {
    try {
        close();
    } catch (const std::exception &) {
        // busy: a destructor has nobody to tell
    }
}

session::call::call(session & s) : owner(s) {
    if (owner.busy.exchange(true)) {
        throw error(error_kind::BUSY, "the session is in use by another call; use one session per thread");
    }
    if (owner.closed) {
        owner.busy = false;
        throw error(error_kind::CLOSED, "the session is closed; make a new one");
    }
}

session::call::~call() {
    assert(owner.closed || owner.memory == nullptr || owner.round_size > 0 ||
           api().llama_memory_seq_pos_max(owner.memory, 0) + 1 == owner.past);
    owner.busy = false;
}

void session::close() {
    if (busy.exchange(true)) {
        throw error(error_kind::BUSY, "the session is in use; cancel the running call before closing");
    }
    if (!closed) {
        closed = true;
        api().llama_synchronize(current);
        if (round_size > 0) {
            api().llama_memory_seq_rm(memory, 0, past, -1);
            round_size = 0;
        }
        release_scout();
        if (draft_ctx != nullptr) {
            api().llama_free(draft_ctx);
            draft_ctx = nullptr;
        }
        chain_copy.release();
        api().pyssd_slots_set(target, false);
        api().llama_set_abort_callback(target, nullptr, nullptr);
    }
    busy = false;
}

void session::cancel() {
    cancelled = true;
}

void session::clear_cancel() {
    cancelled = false;
}

void session::set_n_past(int32_t n_past) {
    call guard(*this);
    round_size = 0;
    chain_copy.invalidate();
    target_batch.clear();
    const int32_t n_cells = memory == nullptr ? 0 : api().llama_memory_seq_pos_max(memory, 0) + 1;
    if (n_past != n_cells) {
        past = n_cells;
        throw error(error_kind::ARGUMENT, "n_past = " + std::to_string(n_past) +
                                              " does not match the KV memory, which ends at " +
                                              std::to_string(n_cells) + "; rewind instead");
    }
    past = n_past;
    take_as_clean();
}

// asked once: finding the blocks builds a graph
const std::string & session::find_refusal() {
    if (refusal_known) {
        return refusal_text;
    }
    const llama_model * model = api().llama_get_model(target);
    refusal_known = true;
    if (memory == nullptr) {
        refusal_text = "the model keeps no KV memory";
        return refusal_text;
    }
    if (api().llama_model_has_encoder(model)) {
        refusal_text = "encoder-decoder models are not supported";
    } else if (api().llama_model_is_diffusion(model)) {
        refusal_text = "diffusion models do not decode token by token";
    } else if (api().llama_pooling_type(target) > LLAMA_POOLING_TYPE_NONE || !api().llama_get_causal_attn(target)) {
        refusal_text = "the context computes embeddings";
    }
    if (!refusal_text.empty()) {
        return refusal_text;
    }
    can_rewind = api().pyssd_memory_can_rewind(target) == 1;
    if (!can_rewind) {
        refusal_text = api().pyssd_error(target);
    } else if (api().pyssd_outputs_max(target) < 2) {
        refusal_text = "the context reserves one row of logits only (n_outputs_max)";
    }
    // looked for even if speculation is refused: the blocks can still be listed and judged on a memory of their own
    const int32_t n = api().pyssd_blocks_find(target, nullptr, 0);
    if (n >= 0) {
        block_list.resize(n);
        api().pyssd_blocks_find(target, block_list.data(), n);
    } else if (refusal_text.empty()) {
        refusal_text = api().pyssd_error(target);
    }
    if (refusal_text.empty()) {
        api().pyssd_slots_set(target, true); // rounds go back and forth between a few widths
    }
    return refusal_text;
}

std::string session::refusal() {
    call guard(*this);
    return find_refusal();
}

std::vector<pyssd_block> session::blocks() {
    call guard(*this);
    find_refusal();
    return block_list;
}

void session::require_speculation() {
    if (!find_refusal().empty()) {
        throw error(error_kind::UNSUPPORTED_MODEL, "speculation is not possible: " + refusal_text + "; decode plainly");
    }
}

std::vector<pyssd_weight> session::weights() {
    call guard(*this);
    std::vector<pyssd_weight> list;
    const int32_t n = api().pyssd_weights_list(target, nullptr, 0);
    if (n > 0) {
        list.resize(n);
        api().pyssd_weights_list(target, list.data(), n);
    }
    return list;
}

void session::check_cancel() const {
    if (cancelled.load(std::memory_order_relaxed)) {
        throw error(error_kind::CANCELLED, "cancelled");
    }
}

void session::check_tokens(const llama_token * tokens, int32_t n) const {
    for (int32_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab_size) {
            throw error(error_kind::ARGUMENT, "token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                                  " is not in 0 .. " + std::to_string(vocab_size - 1));
        }
    }
}

void session::check_room(int32_t n) const {
    const int64_t n_ctx = api().llama_n_ctx_seq(target);
    if (past + (int64_t) n > n_ctx) {
        throw error(error_kind::CONTEXT_OVERFLOW, std::to_string(n) + " tokens after position " + std::to_string(past) +
                                                      " exceed the context of " + std::to_string(n_ctx) +
                                                      "; raise n_ctx or shorten the prompt");
    }
}

void session::check_memory() {
    const int32_t n_past = past;
    const int32_t n_cells = memory == nullptr ? n_past : api().llama_memory_seq_pos_max(memory, 0) + 1;
    if (n_cells != n_past) {
        past = n_cells; // what is there is all that can be said about it
        target_batch.clear();
        chain_copy.invalidate();
        throw error(error_kind::DECODE, "the KV memory ends at " + std::to_string(n_cells) +
                                            " but the session was at " + std::to_string(n_past) +
                                            "; set n_past after changing the memory");
    }
}

void session::make_current(llama_context * ctx) {
    if (current != ctx) {
        api().llama_synchronize(current); // its device work reads and writes the same cells
        current = ctx;
    }
}

void session::set_rows_singly(bool value) {
    call guard(*this);
    compute_rows_singly(false);
    single_rows = value;
}

// verify passes only: a prompt is evaluated as upstream does it
void session::compute_rows_singly(bool value) {
    if (single_rows) {
        api().pyssd_single_rows_set(target, value);
    }
}

void session::decode(llama_context * ctx, batch & b) {
    check_cancel();
    make_current(ctx);
    if (ctx == target) {
        settled_rows.clear();
    }
    int32_t rc = 0;
    try {
        rc = api().llama_decode(ctx, b.view());
    } catch (const std::exception & e) {
        throw error(error_kind::DECODE, std::string("llama_decode failed: ") + e.what(), -3);
    }
    switch (rc) {
    case 0:
        return;
    case 1:
        throw error(error_kind::CONTEXT_OVERFLOW, "no room in the KV memory for " + std::to_string(b.size()) +
                                                      " more cells; raise n_ctx or shorten the prompt");
    case 2:
        throw error(error_kind::CANCELLED, "cancelled");
    default:
        throw error(error_kind::DECODE, "llama_decode failed with " + std::to_string(rc), rc);
    }
}

void session::remove_from(llama_seq_id seq, int32_t pos) {
    if (memory == nullptr || api().llama_memory_seq_pos_max(memory, seq) < pos) {
        return;
    }
    if (!api().llama_memory_seq_rm(memory, seq, pos, -1)) {
        throw error(error_kind::DECODE, "the model's memory cannot drop cells from position " + std::to_string(pos));
    }
}

session::per_context session::graphs_built() {
    call guard(*this);
    const auto built = [](llama_context * ctx) { return ctx == nullptr ? 0 : (int64_t) api().pyssd_graphs_built(ctx); };
    return {built(target), built(draft_ctx), built(scout_ctx) + (int64_t) scout_graphs_before};
}

session::per_context session::graph_nodes() {
    call guard(*this);
    const auto nodes = [](llama_context * ctx) { return ctx == nullptr ? 0 : (int64_t) api().pyssd_graph_nodes(ctx); };
    return {nodes(target), nodes(draft_ctx), nodes(scout_ctx)};
}

session::per_context session::context_nbytes() {
    call guard(*this);
    const auto size = [](llama_context * ctx) {
        return ctx == nullptr ? 0 : (int64_t) api().pyssd_context_nbytes(ctx);
    };
    return {size(target), size(draft_ctx), size(scout_ctx)};
}

session_counters session::counters() {
    call guard(*this);
    count.chain_copies = chain_copy.n_copies;
    return count;
}

} // namespace pyssd
