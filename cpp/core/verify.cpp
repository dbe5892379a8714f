// Verification by sample-and-match: the target samples at every row, and a draft token counts as accepted when it is
// the very token that was sampled. What is emitted is always the target's own sample, so the output is exact for any
// draft.

#include <chrono>

#include "api.h"
#include "pyssd-fault.h"
#include "sampling.h"
#include "session.h"

namespace pyssd {

using clock = std::chrono::steady_clock;

static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

// one batch: the last token, which has no cell yet, and the draft; every row has logits
void session::decode_round(llama_token last_token, const llama_token * draft, int32_t n_draft) {
    close_round();
    check_tokens(&last_token, 1);
    check_tokens(draft, n_draft);
    check_room(n_draft + 1);
    check_memory();
    if (n_draft > 0) {
        find_refusal();
        if (!can_rewind) {
            throw error(error_kind::UNSUPPORTED_MODEL,
                        "speculation is not possible: " + refusal_text + "; decode plainly");
        }
        const int32_t limit = draft_limit(INT32_MAX);
        if (n_draft > limit) {
            throw error(error_kind::CONTEXT_OVERFLOW, "a draft of " + std::to_string(n_draft) + " tokens exceeds " +
                                                          std::to_string(limit) +
                                                          ", the longest possible here; ask max_draft first");
        }
    }
    target_batch.clear();
    target_batch.add(last_token, past, 0, true);
    for (int32_t i = 0; i < n_draft; i++) {
        target_batch.add(draft[i], past + 1 + i, 0, true);
    }
    try {
        decode(target, target_batch);
    } catch (...) {
        target_batch.clear();
        remove_from(0, past);
        throw;
    }
    round_size = n_draft + 1;
    count.verify_calls++;
}

// keep the cells of the last token and of all emitted tokens but the last
void session::end_round(int32_t n_emitted) {
    const int32_t n_rows = round_size;
    round_size = 0;
    past += n_emitted;
    if (n_emitted == n_rows) {
        return;
    }
    remove_from(0, past);
    if (!reaches(past)) {
        // draft_limit rules this out; wrong cells must not be read if it is ever wrong
        remove_from(0, 0);
        past = 0;
        throw error(error_kind::DECODE, "the sliding window was overrun by a draft; evaluate the prompt again");
    }
}

std::vector<llama_token> session::verify(llama_sampler * chain, llama_token last_token, const llama_token * draft,
                                         int32_t n_draft) {
    call guard(*this);
    const auto start = clock::now();
    decode_round(last_token, draft, n_draft);
    std::vector<llama_token> emitted;
    emitted.reserve(n_draft + 1);
    const auto sampling_start = [&] {
        api().llama_synchronize(target); // waiting for the device is no sampling time
        return clock::now();
    }();
    try {
        for (int32_t i = 0; i <= n_draft; i++) {
            llama_token id = chain_sample(chain, logits_row(i), vocab_size, (int64_t) past + 1 + i, cand);
            chain_copy.emitted(id);
            const bool is_match = i < n_draft && (id == draft[i] || pyssd_fault("accept-wrong"));
            if (is_match) {
                id = draft[i];
            }
            emitted.push_back(id);
            if (!is_match || api().llama_vocab_is_eog(vocab, id)) {
                break;
            }
        }
    } catch (...) {
        close_round();
        throw;
    }
    count.verify_sampling_seconds += seconds_since(sampling_start);
    end_round((int32_t) emitted.size());
    count.verify_seconds += seconds_since(start);
    return emitted;
}

void session::verify_begin(llama_token last_token, const llama_token * draft, int32_t n_draft) {
    call guard(*this);
    const auto start = clock::now();
    decode_round(last_token, draft, n_draft);
    count.verify_seconds += seconds_since(start);
}

void session::verify_end(int32_t n_emitted) {
    call guard(*this);
    if (n_emitted < 1 || n_emitted > round_size) {
        throw error(error_kind::ARGUMENT, "verify_end(" + std::to_string(n_emitted) + ") does not fit a round of " +
                                              std::to_string(round_size) + " rows; call verify_begin first");
    }
    const auto start = clock::now();
    end_round(n_emitted);
    count.verify_seconds += seconds_since(start);
}

} // namespace pyssd
