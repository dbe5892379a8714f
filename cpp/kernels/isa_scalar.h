#pragma once

// Portable C++: the oracle of the other instruction sets, and what machines without them use.

#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace pyssd {

struct isa_scalar {
    static constexpr const char * name = "portable";

    struct i32 {
        int32_t v[16];
    };
    struct f32 {
        float v[16];
    };
    struct bytes {
        uint8_t v[64];
    };

    static i32 zero() {
        return {};
    }
    // in a register from here on: else compilers read it from memory again for every use
    static void keep(f32 &) {}
    static f32 zerof() {
        return {};
    }
    static i32 set1(int32_t x) {
        i32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = x;
        }
        return r;
    }
    static f32 set1f(float x) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = x;
        }
        return r;
    }

    static bytes load(const void * p) {
        bytes r;
        memcpy(r.v, p, 64);
        return r;
    }
    static bytes low(bytes x) {
        for (auto & b : x.v) {
            b &= 15;
        }
        return x;
    }
    static bytes high(bytes x) {
        for (auto & b : x.v) {
            b >>= 4;
        }
        return x;
    }

    // x | (bits of h selected by mask after a shift: left for positive, right for negative)
    template <int shift, int mask>
    static bytes merge(bytes x, bytes h) {
        for (int i = 0; i < 64; ++i) {
            x.v[i] |= (shift >= 0 ? h.v[i] << (shift >= 0 ? shift : 0) : h.v[i] >> (shift < 0 ? -shift : 0)) & mask;
        }
        return x;
    }

    static bytes lookup(const int8_t * table, bytes index) {
        for (auto & b : index.v) {
            b = (uint8_t) table[b];
        }
        return index;
    }

    // acc + unsigned weights (at most 63) * 4 activations
    static i32 dot(i32 acc, bytes w, const int8_t * a) {
        for (int r = 0; r < 16; ++r) {
            for (int i = 0; i < 4; ++i) {
                acc.v[r] += w.v[4 * r + i] * a[i];
            }
        }
        return acc;
    }

    // the same for signed weights; the accumulator must start from start_signed
    static i32 dot_signed(i32 acc, bytes w, const int8_t * a) {
        for (int r = 0; r < 16; ++r) {
            for (int i = 0; i < 4; ++i) {
                acc.v[r] += (int8_t) w.v[4 * r + i] * a[i];
            }
        }
        return acc;
    }
    static i32 start_signed(int32_t) {
        return zero();
    }

    // acc + pairs of bytes * a pair of int16
    static i32 dot_pairs(i32 acc, const uint8_t * pairs, const int16_t * a) {
        for (int r = 0; r < 16; ++r) {
            acc.v[r] += pairs[2 * r] * a[0] + pairs[2 * r + 1] * a[1];
        }
        return acc;
    }

    static f32 to_float(i32 x) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = (float) x.v[i];
        }
        return r;
    }
    static f32 load_u8(const uint8_t * p) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = p[i];
        }
        return r;
    }
    static f32 load_i8(const int8_t * p) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = p[i];
        }
        return r;
    }
    static f32 load_f16(const uint16_t * p) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = ggml_fp16_to_fp32(p[i]);
        }
        return r;
    }
    static f32 load_bf16(const uint16_t * p) {
        f32 r;
        for (int i = 0; i < 16; ++i) {
            r.v[i] = ggml_bf16_to_fp32({p[i]});
        }
        return r;
    }
    static f32 load_f32(const float * p) {
        f32 r;
        memcpy(r.v, p, 64);
        return r;
    }
    static void store(float * p, f32 x) {
        memcpy(p, x.v, 64);
    }

    static f32 mul(f32 a, f32 b) {
        for (int i = 0; i < 16; ++i) {
            a.v[i] *= b.v[i];
        }
        return a;
    }
    static f32 add(f32 a, f32 b) {
        for (int i = 0; i < 16; ++i) {
            a.v[i] += b.v[i];
        }
        return a;
    }
    static f32 fma(f32 a, f32 b, f32 c) {
        for (int i = 0; i < 16; ++i) {
            c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
        }
        return c;
    }
    static f32 fnma(f32 a, f32 b, f32 c) {
        for (int i = 0; i < 16; ++i) {
            c.v[i] = std::fma(-a.v[i], b.v[i], c.v[i]);
        }
        return c;
    }
    static f32 max(f32 a, f32 b) {
        for (int i = 0; i < 16; ++i) {
            a.v[i] = a.v[i] < b.v[i] ? b.v[i] : a.v[i];
        }
        return a;
    }
    static f32 exp(f32 a) {
        for (int i = 0; i < 16; ++i) {
            a.v[i] = std::exp(a.v[i]);
        }
        return a;
    }

    // across the lanes, in a fixed order
    static float max_of(f32 a) {
        float m = a.v[0];
        for (float x : a.v) {
            m = m < x ? x : m;
        }
        return m;
    }
    static float sum_of(f32 a) {
        for (int n = 8; n > 0; n /= 2) {
            for (int i = 0; i < n; ++i) {
                a.v[i] += a.v[i + n];
            }
        }
        return a.v[0];
    }

    static void transpose(f32 (&r)[16]) {
        for (int i = 0; i < 16; ++i) {
            for (int j = 0; j < i; ++j) {
                std::swap(r[i].v[j], r[j].v[i]);
            }
        }
    }
};

// a sum of dot products with unsigned weights up to max; add<g> is the g-th of a sub-block. Instruction sets that multiply into
// narrower sums specialise it
template <class V, int max>
struct dot_sum {
    typename V::i32 sum;

    template <int g>
    void add(typename V::bytes w, const int8_t * a) {
        sum = V::dot(sum, w, a);
    }
};

} // namespace pyssd
