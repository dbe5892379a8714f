#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace pyssd {

// exp(-16) = 1e-7: a vocabulary of 100k ids this far below the maximum changes a probability by 1% at most
static constexpr float NEGLIGIBLE = 16.0f;

// independent lanes, so that the compiler can keep the maximum in one vector register
static float max_of(const float * logits, int32_t n) {
    constexpr int32_t LANES = 16;
    float lane[LANES];
    std::fill(lane, lane + LANES, -INFINITY);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int32_t k = 0; k < LANES; k++) {
            lane[k] = logits[i + k] > lane[k] ? logits[i + k] : lane[k];
        }
    }
    for (; i < n; i++) {
        lane[0] = logits[i] > lane[0] ? logits[i] : lane[0];
    }
    return *std::max_element(lane, lane + LANES);
}

row_stats row_stats_of(const float * logits, int32_t n_vocab) {
    row_stats stats;
    stats.max = max_of(logits, n_vocab);
    if (!(stats.max > -INFINITY)) {
        return stats;
    }
    const float negligible = stats.max - NEGLIGIBLE;
    for (int32_t id = 0; id < n_vocab; id++) {
        if (logits[id] >= negligible) {
            stats.sum += std::exp(logits[id] - stats.max);
            if (stats.argmax < 0 && logits[id] == stats.max) {
                stats.argmax = id;
            }
        }
    }
    return stats;
}

// blocks that stay in the first cache, so that the row is read once: the maximum is looked for in the best block only
llama_token row_argmax(const float * logits, int32_t n_vocab) {
    constexpr int32_t BLOCK = 4096;
    float max = -INFINITY;
    int32_t best = -1; // where the block with the maximum begins
    for (int32_t first = 0; first < n_vocab; first += BLOCK) {
        const float block_max = max_of(logits + first, std::min(BLOCK, n_vocab - first));
        if (block_max > max) {
            max = block_max;
            best = first;
        }
    }
    if (best < 0) {
        return -1;
    }
    return (llama_token) (std::find(logits + best, logits + n_vocab, max) - logits);
}

float row_probability(const row_stats & stats, const float * logits, llama_token id) {
    return stats.sum > 0.0 ? (float) (std::exp(logits[id] - stats.max) / stats.sum) : 0.0f;
}

candidates::candidates(int32_t n_vocab) : data(n_vocab) {
    border.reserve(n_vocab);
}

llama_token_data_array candidates::all(const float * logits) {
    const int32_t n = (int32_t) data.size();
    for (int32_t id = 0; id < n; id++) {
        const float logit = logits[id];
        data[id] = {id, logit == logit ? logit : -INFINITY, 0.0f};
    }
    return {data.data(), data.size(), -1, false};
}

llama_token_data_array candidates::near_max(const float * logits, const row_stats & stats) {
    const int32_t n_vocab = (int32_t) data.size();
    size_t n = 0;
    if (stats.argmax >= 0) {
        const float negligible = stats.max - NEGLIGIBLE;
        for (int32_t id = 0; id < n_vocab; id++) {
            if (logits[id] >= negligible) {
                data[n++] = {id, logits[id], 0.0f};
            }
        }
    }
    return {data.data(), keep_largest(n, stats.max), -1, false};
}

void candidates::narrow(llama_token_data_array * cur) {
    float max = -INFINITY;
    for (size_t i = 0; i < cur->size; i++) {
        max = std::max(max, cur->data[i].logit);
    }
    size_t n = 0;
    for (size_t i = 0; i < cur->size && max > -INFINITY; i++) {
        if (cur->data[i].logit >= max - NEGLIGIBLE) {
            data[n++] = cur->data[i];
        }
    }
    *cur = {data.data(), keep_largest(n, max), -1, false};
}

llama_token_data_array candidates::flat(int32_t n) {
    n = std::min(n, (int32_t) data.size());
    for (int32_t id = 0; id < n; id++) {
        data[id] = {id, 0.0f, 0.0f};
    }
    return {data.data(), (size_t) n, -1, true};
}

// cut data[0 .. n) to DRAFT_MAX, in order; every id kept has a larger logit than every id left out
size_t candidates::keep_largest(size_t n, float max) {
    if (n <= (size_t) DRAFT_MAX) {
        return n;
    }
    border.clear();
    for (size_t i = 0; i < n; i++) {
        border.push_back(data[i].logit);
    }
    std::nth_element(border.begin(), border.begin() + DRAFT_MAX, border.end(), std::greater<float>());
    const float bound = border[DRAFT_MAX]; // the largest of those left out
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        // when everything ties with the maximum, the first ids stay
        if (data[i].logit > bound || (data[i].logit == max && kept < (size_t) DRAFT_MAX)) {
            data[kept++] = data[i];
        }
    }
    return kept;
}

void candidates_compact(llama_token_data_array * cur) {
    size_t kept = 0;
    for (size_t i = 0; i < cur->size; i++) {
        if (cur->data[i].logit > -INFINITY) {
            cur->data[kept++] = cur->data[i];
        }
    }
    cur->size = kept;
}

} // namespace pyssd
