// Drafting: the same model with blocks left out proposes the next tokens, one at a time.

#include <algorithm>
#include <chrono>

#include "api.h"
#include "pyssd-fault.h"
#include "session.h"

namespace pyssd {

using clock = std::chrono::steady_clock;

static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

// A verify holds the last token and the draft: n + 1 cells from n_past on, n + 1 rows of logits, one batch.
int32_t session::draft_limit(int32_t n_ctx) {
    if (!find_refusal().empty()) {
        return 0;
    }
    int64_t limit = std::min<int64_t>(n_ctx, api().llama_n_ctx_seq(target)) - past - 1;
    limit = std::min<int64_t>(limit, (int64_t) api().pyssd_outputs_max(target) - 1);
    limit = std::min<int64_t>(limit, (int64_t) api().llama_n_ubatch(target) - 1);
    limit = std::min<int64_t>(limit, target_batch.capacity() - 1);
    if (swa_window > 0) {
        // rejected cells push older ones out of the window's cache
        limit = std::min<int64_t>(limit, (int64_t) swa_reach - 1);
        if (swa_chunked) {
            limit = std::min<int64_t>(limit, swa_window - 1 - past % swa_window);
        }
    }
    return (int32_t) std::max<int64_t>(limit, 0);
}

int32_t session::max_draft(int32_t n_ctx) {
    call guard(*this);
    return draft_limit(n_ctx);
}

static float chance_of(const draft_rule & rule, float confidence) {
    int32_t bin = 0;
    while (bin < rule.n_bins - 1 && confidence >= rule.edges[bin]) {
        bin++;
    }
    return rule.chances[bin];
}

// the last token and a draft by others, read in batches of the draft context; leaves the logits of the last one
void session::read_ahead(llama_token last_token, const llama_token * prefix, int32_t n_prefix) {
    const int32_t n = n_prefix + 1;
    const int32_t chunk = draft_batch.capacity();
    for (int32_t first = 0; first < n; first += chunk) {
        draft_batch.clear();
        for (int32_t i = first; i < std::min(n, first + chunk); i++) {
            draft_batch.add(i == 0 ? last_token : prefix[i - 1], past + i, 0, i == n - 1);
        }
        decode(draft_ctx, draft_batch);
    }
    count.draft_steps++;
}

draft_result session::draft(llama_sampler * chain, llama_token last_token, int32_t max_len, const draft_rule & rule,
                            const llama_token * prefix, int32_t n_prefix) {
    call guard(*this);
    require_speculation();
    close_round();
    check_tokens(&last_token, 1);
    check_tokens(prefix, n_prefix);
    check_memory();
    max_len = std::min(max_len, draft_limit(INT32_MAX) - n_prefix);
    if (rule.n_bins > 0) {
        max_len = std::min(max_len, rule.n_steps);
    }
    draft_result drafted;
    if (max_len <= 0) {
        return drafted;
    }
    drafted.tokens.reserve(max_len);
    drafted.confidences.reserve(max_len);

    const auto start = clock::now();
    double sampling_seconds = 0.0;
    try {
        ensure_draft();
        make_current(draft_ctx);
        api().pyssd_borrower_sync(draft_ctx);
        read_ahead(last_token, prefix, n_prefix);
        float reach = 1.0f;
        for (int32_t i = 0; i < max_len; i++) {
            const float * logits = api().pyssd_logits_ith(draft_ctx, draft_batch.size() - 1);
            if (logits == nullptr) {
                throw error(error_kind::DECODE, "the draft context returned no logits");
            }
            const auto sampling_start = clock::now();
            // the last token of a draft is accepted by the copy only when the target has emitted it: if it is the one
            // that is rejected, the copy need not be taken anew
            bool goes_on = true;
            if (i == 0) {
                chain_copy.sync(chain);
                for (int32_t k = 0; k < n_prefix && goes_on; k++) {
                    goes_on = chain_copy.accept(prefix[k]);
                }
            } else {
                goes_on = chain_copy.accept(drafted.tokens.back());
            }
            const int64_t pos = (int64_t) past + 1 + n_prefix + i;
            const draft_pick pick = goes_on ? chain_copy.pick(logits, vocab_size, pos, cand) : draft_pick{};
            sampling_seconds += seconds_since(sampling_start);
            if (pick.id < 0 || pick.confidence < rule.min_confidence) {
                break;
            }
            if (rule.n_bins > 0) {
                reach *= chance_of(rule, pick.confidence);
                if (reach < rule.keep_reach[i]) {
                    break;
                }
            }
            drafted.tokens.push_back(pick.id);
            drafted.confidences.push_back(pick.confidence);
            const bool is_worth = rule.n_bins == 0 || (i + 1 < max_len && reach >= rule.draft_reach[i + 1]);
            if (i + 1 == max_len || !is_worth || api().llama_vocab_is_eog(vocab, pick.id)) {
                break;
            }
            draft_batch.clear();
            draft_batch.add(pick.id, past + n_prefix + 1 + i, 0, true);
            decode(draft_ctx, draft_batch);
            count.draft_steps++;
        }
    } catch (...) {
        chain_copy.invalidate();
        remove_from(0, past);
        throw;
    }
    if (!pyssd_fault("draft-cells")) {
        remove_from(0, past);
    }
    count.draft_sampling_seconds += sampling_seconds;
    count.draft_seconds += seconds_since(start);
    return drafted;
}

} // namespace pyssd
