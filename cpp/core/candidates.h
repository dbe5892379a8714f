#pragma once

// Candidate arrays for llama.cpp's samplers, built from a row of logits into a buffer that is made once.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace pyssd {

// largest logit and the sum of exp(logit - max) over the ids that are not negligible: the softmax of a row
struct row_stats {
    llama_token argmax = -1; // lowest id among the largest; -1 if no logit is above -inf
    float max = 0.0f;
    double sum = 0.0;
};

row_stats row_stats_of(const float * logits, int32_t n_vocab);

// the argmax of row_stats alone, several times as fast
llama_token row_argmax(const float * logits, int32_t n_vocab);

// softmax probability of an id
float row_probability(const row_stats & stats, const float * logits, llama_token id);

class candidates {
public:
    explicit candidates(int32_t n_vocab);

    // every id, in the order of ids, as llama_sampler_sample builds it; NaN becomes -inf
    llama_token_data_array all(const float * logits);

    // the ids near the maximum, in the order of ids: at most DRAFT_MAX, fewer on a tie at the border
    // a draft may leave out what is unlikely: it costs acceptance, never correctness
    llama_token_data_array near_max(const float * logits, const row_stats & stats);

    // the same choice among the ids of an array that came from all()
    void narrow(llama_token_data_array * cur);

    // min(n, n_vocab) equal candidates that count as sorted, to ask a filter how many it keeps
    llama_token_data_array flat(int32_t n);

    static constexpr int32_t DRAFT_MAX = 1024;

private:
    size_t keep_largest(size_t n, float max);

    std::vector<llama_token_data> data; // [n_vocab]
    std::vector<float> border;          // scratch of near_max
};

// drop the candidates that a grammar or a filter has set to -inf; keeps the order
void candidates_compact(llama_token_data_array * cur);

} // namespace pyssd
