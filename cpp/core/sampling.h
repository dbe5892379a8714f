#pragma once

// Questions about llama.cpp's sampler chains, and the target's step: apply, take the selected id, accept.

#include <string>

#include "candidates.h"
#include "llama.h"

namespace pyssd {

// name without the mark (+ or -) of samplers that a backend took over; "" where a sampler has none (llama_cpp's
// CustomSampler: llama_sampler_name would call a null pointer)
std::string sampler_name(const llama_sampler * sampler);

// members of a chain; a sampler that is no chain counts as a chain of itself
int32_t chain_size(const llama_sampler * chain);
llama_sampler * chain_member(llama_sampler * chain, int32_t i);

bool chain_has(llama_sampler * chain, const std::string & name);

// nothing in the chain but a greedy pick: the argmax needs no candidate array
bool chain_is_greedy(llama_sampler * chain);

// the pick is no draw: the token that such a chain leaves is the one it ranks highest
bool chain_ends_greedy(llama_sampler * chain);

// as llama_sampler_sample over logits [n_vocab], for the token at absolute position pos; null chain = greedy
// throws DECODE when the chain leaves no token, where llama.cpp would abort or emit a forbidden one
llama_token chain_sample(llama_sampler * chain, const float * logits, int32_t n_vocab, int64_t pos, candidates & cand);

} // namespace pyssd
