#pragma once

// Near-ties: rows whose pick could be another one if the logits were computed by a pass of another width.

#include "candidates.h"
#include "llama.h"

namespace pyssd {

// whether a change of the difference of any two logits by up to margin could change what the chain picks for absolute
// position pos; the chain is applied, not asked to accept. What counts is the decision: raw logits for a greedy pick,
// logit + noise for a Gumbel pick, and who stands at the border of a filter (top-k, top-p, ...).
// false for chains whose pick draws on hidden state (dist, mirostat, XTC, Python's): no gap says what they would pick
bool is_near_tie(llama_sampler * chain, const float * logits, int32_t n_vocab, int64_t pos, float margin,
                 candidates & cand);

} // namespace pyssd
