#pragma once

// What one attention is asked for, and the working memory of a thread.

#include "isa.h"

#include <cmath>
#include <cstdint>

namespace pyssd {

constexpr int chunk = 64;                   // cells
constexpr int max_group = 64;               // queries a thread carries along the KV range
constexpr uint16_t minus_infinity = 0xfc00; // F16
constexpr int width = 4;                    // queries, and vectors of 16, that the inner loops hold in registers

// one attention: q [d_k, n_rows, n_head], k [d_k, n_kv, n_head_kv], v [d_v, n_kv, n_head_kv], mask [n_kv, n_rows]
struct problem {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    ggml_tensor * dst;
    int64_t d_k, d_v, n_kv, n_rows, n_head, per_kv; // per_kv = query heads that share a KV head
    float scale, max_bias, softcap;

    explicit problem(ggml_tensor * op)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), dst(op) {
        d_k = k->ne[0];
        d_v = v->ne[0];
        n_kv = k->ne[1];
        n_rows = q->ne[1];
        n_head = q->ne[2];
        per_kv = n_head / k->ne[2];
        scale = ggml_get_op_params_f32(op, 0);
        max_bias = ggml_get_op_params_f32(op, 1);
        softcap = ggml_get_op_params_f32(op, 2);
        if (softcap != 0.0f) {
            scale /= softcap;
        }
    }

    // what the fast path takes; the rest goes through upstream's row-by-row reference, which is invariant too
    bool is_plain() const {
        return k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && d_k % 16 == 0 && d_v % 16 == 0 &&
               k->nb[0] == 2 && v->nb[0] == 2 && q->nb[0] == 4 && v->ne[2] == k->ne[2] && q->ne[3] == k->ne[3] &&
               (!mask || mask->ne[2] == 1) && n_head % k->ne[2] == 0;
    }

    float slope(int64_t head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const uint32_t n_pow2 = 1u << (uint32_t) std::floor(std::log2((float) n_head));
        const float m0 = std::pow(2.0f, -max_bias / n_pow2);
        const float m1 = std::pow(2.0f, -max_bias / 2.0f / n_pow2);
        return head < n_pow2 ? std::pow(m0, (float) (head + 1)) : std::pow(m1, (float) (2 * (head - n_pow2) + 1));
    }

    const uint16_t * mask_row(int64_t row, int64_t stream) const {
        return !mask ? nullptr
                     : (const uint16_t *) ((const char *) mask->data + row * mask->nb[1] +
                                           stream % mask->ne[3] * mask->nb[3]);
    }
};

struct scratch {
    float * keys;   // [d_k][chunk], transposed
    float * values; // [chunk][d_v]
    float * q;      // [max_group][d_k], scaled
    float * p;      // [max_group][chunk]: scores, then weights
    float * acc;    // [max_group][d_v]
    float max[max_group], sum[max_group], slope[max_group];
    const uint16_t * masks[max_group];

    static size_t n_floats(const problem & a) {
        return a.d_k * chunk + chunk * a.d_v + max_group * (a.d_k + chunk + a.d_v);
    }

    scratch(const problem & a, float * p0) {
        keys = p0;
        values = keys + a.d_k * chunk;
        q = values + chunk * a.d_v;
        p = q + max_group * a.d_k;
        acc = p + max_group * chunk;
    }
};

} // namespace pyssd
