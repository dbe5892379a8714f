// The scout: fresh passes on a scratch sequence of the shared memory, for judging skip sets. The user's cells stay as
// they are; the scratch cells are gone when a call returns. Where the memory cannot be rolled back, the scout has one of
// its own.

#include <algorithm>
#include <cstring>

#include "api.h"
#include "session.h"

namespace pyssd {

static constexpr int32_t SCOUT_SEQS = 4;
static constexpr int32_t SCOUT_BATCH = 64; // rows of logits that its compute buffer holds
static constexpr llama_seq_id SCRATCH = 1; // in the shared memory, where the target's is 0

void session::release_scout() {
    if (scout_ctx == nullptr) {
        return;
    }
    api().llama_synchronize(scout_ctx);
    scout_graphs_before += api().pyssd_graphs_built(scout_ctx);
    if (current == scout_ctx) {
        current = target;
    }
    api().llama_free(scout_ctx);
    scout_ctx = nullptr;
    scout_batch.reset();
}

void session::free_scout() {
    call guard(*this);
    release_scout();
}

void session::ensure_scout(int32_t n) {
    if (can_rewind) {
        check_room(n); // scratch cells come from the shared memory
    } else if (scout_ctx != nullptr && (int64_t) n > api().llama_n_ctx_seq(scout_ctx)) {
        release_scout();
    }
    if (scout_ctx != nullptr) {
        return;
    }
    scout_ctx = can_rewind ? api().pyssd_borrower_init(target, SCOUT_SEQS, SCOUT_BATCH, SCOUT_BATCH)
                           : api().pyssd_private_init(target, n);
    if (scout_ctx == nullptr) {
        throw error(error_kind::UNSUPPORTED_MODEL, std::string("no scout context: ") + api().pyssd_error(target));
    }
    scout_batch = std::make_unique<batch>(SCOUT_BATCH);
}

void session::scout_pass(const llama_token * tokens, int32_t n, const pyssd_plan & plan,
                         const std::function<void(int32_t, int32_t)> & read) {
    close_round();
    check_tokens(tokens, n);
    ensure_scout(n);
    make_current(scout_ctx);
    api().pyssd_borrower_sync(scout_ctx);
    const bool is_stock = plan.skip == nullptr && plan.head_rows == 0 && plan.argmax == 0 && plan.n_taps == 0;
    if (api().pyssd_plan_set(scout_ctx, is_stock ? nullptr : &plan) != 0) {
        throw error(error_kind::SKIP_SET, api().pyssd_error(scout_ctx));
    }
    // a memory that cannot drop its last cells can be emptied: then it is the scout's own
    const llama_memory_t scratch_memory = api().llama_get_memory(scout_ctx);
    const llama_seq_id seq = can_rewind ? SCRATCH : 0;
    try {
        for (int32_t first = 0; first < n; first += SCOUT_BATCH) {
            const int32_t end = std::min(n, first + SCOUT_BATCH);
            scout_batch->clear();
            for (int32_t i = first; i < end; i++) {
                scout_batch->add(tokens[i], i, seq, true);
            }
            decode(scout_ctx, *scout_batch);
            read(first, end - first);
        }
    } catch (...) {
        api().llama_memory_seq_rm(scratch_memory, seq, -1, -1);
        throw;
    }
    api().llama_synchronize(scout_ctx);
    api().llama_memory_seq_rm(scratch_memory, seq, -1, -1);
}

void session::skip_logits(const llama_token * tokens, int32_t n, const uint8_t * skip, int32_t n_blocks,
                          int32_t head_rows, float * out) {
    call guard(*this);
    const pyssd_plan plan = plan_of(skip, n_blocks, head_rows);
    scout_pass(tokens, n, plan, [&](int32_t first, int32_t n_rows) {
        for (int32_t i = 0; i < n_rows; i++) {
            const float * row = api().pyssd_logits_ith(scout_ctx, i);
            if (row == nullptr) {
                throw error(error_kind::DECODE, "the scout context returned no logits");
            }
            std::memcpy(out + (size_t) (first + i) * vocab_size, row, sizeof(float) * vocab_size);
        }
    });
}

void session::skip_argmax(const llama_token * tokens, int32_t n, const uint8_t * skip, int32_t n_blocks,
                          int32_t * out) {
    call guard(*this);
    pyssd_plan plan = plan_of(skip, n_blocks, 0);
    plan.argmax = 1;
    scout_pass(tokens, n, plan, [&](int32_t first, int32_t n_rows) {
        for (int32_t i = 0; i < n_rows; i++) {
            out[first + i] = api().pyssd_argmax_ith(scout_ctx, i);
        }
    });
}

// taps [n_taps], out [n_taps, n, n_embd]
void session::hidden(const llama_token * tokens, int32_t n, const int32_t * taps, int32_t n_taps, float * out) {
    call guard(*this);
    pyssd_plan plan = plan_of(nullptr, 0, 0);
    for (int32_t k = 0; k < n_taps; k++) {
        if (taps[k] < 0 || taps[k] > (int32_t) block_list.size()) {
            throw error(error_kind::ARGUMENT, "tap " + std::to_string(taps[k]) + " is not in 0 .. " +
                                                  std::to_string(block_list.size()) + " (the number of blocks)");
        }
    }
    plan.taps = taps;
    plan.n_taps = n_taps;
    scout_pass(tokens, n, plan, [&](int32_t first, int32_t n_rows) {
        const int64_t size = (int64_t) n_rows * embd_size;
        for (int32_t k = 0; k < n_taps; k++) {
            float * dst = out + ((size_t) k * n + first) * embd_size;
            if (api().pyssd_tap_get(scout_ctx, k, dst, size) != size) {
                throw error(error_kind::DECODE, std::string("no hidden state: ") + api().pyssd_error(scout_ctx));
            }
        }
    });
}

} // namespace pyssd
