#pragma once

// The sampler that couples draft and target: it picks the largest of logit(id) + noise(seed, position, id). Adding
// standard Gumbel noise to log-probabilities and taking the maximum samples exactly from their softmax (the Gumbel-max
// trick); because the noise depends on nothing but (seed, position, id), a draft and a target that look at the same
// position with similar logits pick the same token far more often than two independent draws would.

#include <cstdint>

#include "llama.h"

namespace pyssd {

// a new sampler; a chain takes ownership of it
llama_sampler * gumbel_init(uint64_t seed);

bool gumbel_is(const llama_sampler * sampler);

// absolute position of the token that the next apply picks; for a chain: of each Gumbel sampler in it
// llama_sampler_i.apply gets no position, so this has to precede every apply
void gumbel_set_pos(llama_sampler * sampler, int64_t pos);

// uniform integer of 52 bits, a function of its three arguments alone
uint64_t gumbel_bits(uint64_t seed, int64_t pos, llama_token id);

// the noise of these bits: -log(-log(u)), u = (bits + 0.5) / 2^52
double gumbel_noise(uint64_t bits);

// the noise that a Gumbel sampler adds to an id at the position it was told
double gumbel_noise_at(const llama_sampler * sampler, llama_token id);

// the pick among data[0 .. size): index of the largest logit + noise, the lower id on a tie, -1 if every logit is -inf
int64_t gumbel_pick(const llama_token_data * data, size_t size, uint64_t seed, int64_t pos);

} // namespace pyssd
