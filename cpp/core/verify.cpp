// Verification by sample-and-match: the target samples at every row, and a draft token counts as accepted when it is
// the very token that was sampled. What is emitted is always the target's own sample, so the output is exact for any
// draft.

#include <chrono>

#include "api.h"
#include "guard.h"
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
    compute_rows_singly(true);
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
    round_is_clean = n_draft == 0;
    round_tokens.assign(1, last_token);
    round_tokens.insert(round_tokens.end(), draft, draft + n_draft);
    count.verify_calls++;
}

// keep the cells of the last token and of all emitted tokens but the last
void session::end_round(int32_t n_emitted) {
    const int32_t n_rows = round_size;
    round_size = 0;
    if (clean_cells() == past && round_is_clean) {
        clean += n_emitted;
    } else {
        dirty.insert(dirty.end(), round_tokens.begin(), round_tokens.begin() + n_emitted);
    }
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

// rows of rejected tokens count too: they say what the target would have gone on with
void session::find_tops(llama_sampler * chain, const std::vector<llama_token> & emitted, int32_t n_drafted,
                        std::vector<llama_token> & tops) {
    const auto start = clock::now();
    const auto n_emitted = (int32_t) emitted.size();
    const bool is_known = chain_ends_greedy(chain);
    tops.clear();
    for (int32_t i = 0; i < round_size && (i < n_emitted || i <= n_drafted); i++) {
        if (i > 0 && api().llama_vocab_is_eog(vocab, round_tokens[i])) {
            break; // nothing is ever drafted behind the end of a text
        }
        tops.push_back(is_known && i < n_emitted ? emitted[i] : row_argmax(logits_row(i), vocab_size));
    }
    count.tops_seconds += seconds_since(start);
}

std::vector<llama_token> session::tops(int32_t n) {
    call guard(*this);
    std::vector<llama_token> ids;
    const auto start = clock::now();
    for (int32_t i = 0; i < n; i++) {
        const float * row = logits_row(i - n);
        if (i == 0) {
            api().llama_synchronize(target);
        }
        ids.push_back(row_argmax(row, vocab_size));
    }
    count.tops_seconds += seconds_since(start);
    return ids;
}

std::vector<llama_token> session::verify(llama_sampler * chain, llama_token last_token, const llama_token * draft,
                                         int32_t n_draft, std::vector<llama_token> * tops, int32_t n_drafted,
                                         float margin, bool rewrite) {
    call guard(*this);
    const auto start = clock::now();
    decode_round(last_token, draft, n_draft);
    std::vector<llama_token> emitted;
    emitted.reserve(n_draft + 1);
    // one row behind clean cells is plain decoding itself
    const bool is_guarded = margin > 0.0f && (n_draft > 0 || (rewrite && clean_cells() < past));
    const double guard_before = count.guard_seconds;
    const auto sampling_start = [&] {
        api().llama_synchronize(target); // waiting for the device is no sampling time
        return clock::now();
    }();
    try {
        for (int32_t i = 0; i <= n_draft; i++) {
            const int64_t pos = (int64_t) past + 1 + i;
            // before the chain accepts: it sees each token once
            const bool is_last = is_guarded && is_near_tie(chain, logits_row(i), vocab_size, pos, margin, cand);
            if (is_last) {
                settle(i, rewrite);
            }
            llama_token id = chain_sample(chain, logits_row(i), vocab_size, pos, cand);
            chain_copy.emitted(id);
            const bool is_match = i < n_draft && (id == draft[i] || pyssd_fault("accept-wrong"));
            if (is_match) {
                id = draft[i];
            }
            emitted.push_back(id);
            if (is_last || !is_match || api().llama_vocab_is_eog(vocab, id)) {
                break;
            }
        }
        count.verify_sampling_seconds += seconds_since(sampling_start) - (count.guard_seconds - guard_before);
        if (tops != nullptr) {
            find_tops(chain, emitted, n_drafted, *tops);
        }
    } catch (...) {
        close_round();
        throw;
    }
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
