#pragma once

// Activations as the kernels read them: int8 with one scale per 256 values (K-quants) or 32 (the others), and their sums.

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace pyssd {

struct act_k {
    int8_t q[256];
    int32_t bias16[16]; // -32 * sum of 16 values: what the unsigned form of Q6_K adds, taken back
    int16_t sums32[8];
    float d;
    float pad[3];
};

struct act_32 {
    int8_t q[32];
    int32_t sum;
    float d;
    float dsum; // d * sum
};

// bytes of one quantised column of n values for a weight type; 0 for float weights, which read float activations
size_t act_size(ggml_type type, int64_t n);

// quantise one column
void act_quantize(ggml_type type, const float * x, int64_t n, void * dst);

} // namespace pyssd
