#pragma once

// Tiles times 2 to 8 columns on NEON: gemm.h's operations in its order, with the loops cut for 32 registers of 16 bytes. Half a
// tile (8 rows) times 8 columns are 16 registers of sums; those of a whole tile would live in memory.

#include "gemm.h"
#include "isa_i8mm.h"

#include <arm_neon.h>

#include <type_traits>

namespace pyssd {

#if defined(__clang__)
#define PYSSD_UNROLL _Pragma("unroll")
#else
#define PYSSD_UNROLL _Pragma("GCC unroll 16")
#endif

// bits of a weight kept apart from its nibble
template <class tile>
constexpr int high_bits = 0;
template <>
constexpr int high_bits<tile_q5_K> = 1;
template <>
constexpr int high_bits<tile_q5_0> = 1;
template <>
constexpr int high_bits<tile_q6_K> = 2;

template <class tile>
inline const uint8_t * vector_of(const tile & t, int s, int v) {
    if constexpr (tile::n_weights == 256) {
        return t.q[s][v];
    } else {
        return (const uint8_t *) t.q[v];
    }
}

// vectors v and v + 1 of a sub-block, 16 weights of rows 8 * half to 8 * half + 7
template <class U, class tile, int v>
inline void unpack_half(const tile & t, int s, int half, int8x16_t (&w)[8]) {
    PYSSD_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int at = 32 * half + 16 * i;
        uint8x16_t nibbles[2][2];
        if constexpr (std::is_same<tile, tile_q8_0>::value) {
            for (int n = 0; n < 2; ++n) {
                nibbles[n][0] = vld1q_u8(vector_of(t, s, 2 * v + n) + at);
                nibbles[n][1] = vld1q_u8(vector_of(t, s, 2 * v + 2 + n) + at);
                U::interleave(nibbles[n][0], nibbles[n][1]);
            }
        } else {
            uint8x16_t x[2] = {vld1q_u8(vector_of(t, s, v) + at), vld1q_u8(vector_of(t, s, v + 1) + at)};
            U::interleave(x[0], x[1]);
            for (int j = 0; j < 2; ++j) {
                nibbles[0][j] = vandq_u8(x[j], vdupq_n_u8(15));
                nibbles[1][j] = vshrq_n_u8(x[j], 4);
            }
        }
        if constexpr (high_bits<tile> > 0) {
            constexpr int b = high_bits<tile>;
            const uint8_t * high = nullptr;
            if constexpr (tile::n_weights == 256) {
                high = t.high[s];
            } else {
                high = t.high;
            }
            uint8x16_t h[2] = {vld1q_u8(high + at), vld1q_u8(high + at)};
            U::interleave(h[0], h[1]);
            const uint8x16_t mask = vdupq_n_u8(b == 1 ? 16 : 48);
            for (int j = 0; j < 2; ++j) {
                const int8x16_t low = U::template shifts<4 - b * 2 * v, 4 - b * (2 * v + 2)>(j);
                const int8x16_t up = U::template shifts<4 - b * (2 * v + 1), 4 - b * (2 * v + 3)>(j);
                nibbles[0][j] = vbslq_u8(mask, vshlq_u8(h[j], low), nibbles[0][j]);
                nibbles[1][j] = vbslq_u8(mask, vshlq_u8(h[j], up), nibbles[1][j]);
            }
        }
        for (int n = 0; n < 2; ++n) {
            for (int j = 0; j < 2; ++j) {
                int8x16_t x = vreinterpretq_s8_u8(nibbles[n][j]);
                if constexpr (std::is_same<tile, tile_iq4_nl>::value) {
                    x = vqtbl1q_s8(vld1q_s8(iq4_nl_values), nibbles[n][j]);
                }
                w[U::index(j, n, i)] = x;
            }
        }
    }
}

template <class U, class tile, int v, int n, class act>
inline void dot_half(const tile & t, int s, int half, int32x4_t (&acc)[n][U::regs], const act * const * a, int k) {
    int8x16_t w[8];
    unpack_half<U, tile, v>(t, s, half, w);
    PYSSD_UNROLL
    for (int u = 0; u < n; ++u) {
        U::multiply(acc[u], w, a + u * U::cols, k + 8 * v);
        PYSSD_UNROLL
        for (int i = 0; i < U::regs; ++i) {
            asm volatile("" : "+w"(acc[u][i])); // one column after the other: gcc mixes them and runs out of registers
        }
    }
}

inline void rows_of(int16x8_t x, float32x4_t * out) {
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
    out[1] = vcvtq_f32_s32(vmovl_high_s16(x));
}

inline void rows_of(const uint16_t * half_floats, float32x4_t * out) {
    const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(half_floats));
    out[0] = vcvt_f32_f16(vget_low_f16(x));
    out[1] = vcvt_high_f32_f16(x);
}

// what has to be subtracted for the minima of 8 rows, and of one column or a pair
template <class U>
inline void minima(const int16x8_t (&mins)[8], const act_k * const * a, int32x4_t * out) {
    for (int c = 0; c < U::cols; ++c) {
        const int16x8_t sums = vld1q_s16(a[c]->sums32);
        int32x4_t low = vmull_laneq_s16(vget_low_s16(mins[0]), sums, 0), high = vmull_high_laneq_s16(mins[0], sums, 0);
#define PYSSD_ADD_MIN(s)                                                                                               \
    low = vmlal_laneq_s16(low, vget_low_s16(mins[s]), sums, s);                                                        \
    high = vmlal_high_laneq_s16(high, mins[s], sums, s);
        PYSSD_ADD_MIN(1)
        PYSSD_ADD_MIN(2)
        PYSSD_ADD_MIN(3)
        PYSSD_ADD_MIN(4)
        PYSSD_ADD_MIN(5)
        PYSSD_ADD_MIN(6)
        PYSSD_ADD_MIN(7)
#undef PYSSD_ADD_MIN
        out[2 * c] = low;
        out[2 * c + 1] = high;
    }
    U::join(out);
}

// one block, 8 rows: sum += its products
template <class U, class tile, int n>
inline __attribute__((always_inline)) void block_half(const tile & t, int half, const act_k * const * a,
                                                      float32x4_t (&sum)[n][U::regs]) {
    float32x4_t part[n][U::regs];
    for (int u = 0; u < n; ++u) {
        for (int i = 0; i < U::regs; ++i) {
            part[u][i] = vdupq_n_f32(0.0f);
        }
    }
    for (int s = 0; s < 256 / tile::sub_size; ++s) {
        constexpr int share = sizeof(tile) * tile::sub_size / 512;
        for (int at = 0; at < share; at += 64) {
            __builtin_prefetch((const char *) &t + prefetch_ahead + (2 * s + half) * share + at);
        }
        int32x4_t acc[n][U::regs];
        PYSSD_UNROLL
        for (int u = 0; u < n; ++u) {
            int32x4_t first = vdupq_n_s32(0);
            if constexpr (tile::bias > 0) {
                first = U::set(a[u * U::cols]->bias16[s], a[(u + 1) * U::cols - 1]->bias16[s]);
            }
            PYSSD_UNROLL
            for (int i = 0; i < U::regs; ++i) {
                acc[u][i] = first;
            }
        }
        dot_half<U, tile, 0, n>(t, s, half, acc, a, s * tile::sub_size);
        float32x4_t scale[4];
        if constexpr (tile::sub_size == 32) {
            dot_half<U, tile, 2, n>(t, s, half, acc, a, s * tile::sub_size);
            rows_of(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(t.scales[s] + 8 * half))), scale);
        } else {
            rows_of(vmovl_s8(vld1_s8(t.scales[s] + 8 * half)), scale);
        }
        U::spread(scale);
        PYSSD_UNROLL
        for (int u = 0; u < n; ++u) {
            PYSSD_UNROLL
            for (int i = 0; i < U::regs; ++i) {
                part[u][i] = vfmaq_f32(part[u][i], vcvtq_f32_s32(acc[u][i]), scale[i]);
            }
        }
    }
    float32x4_t d[4], dmin[4];
    int16x8_t mins[8];
    rows_of(t.d + 8 * half, d);
    U::spread(d);
    if constexpr (tile::has_mins) {
        rows_of(t.dmin + 8 * half, dmin);
        U::spread(dmin);
        for (int p = 0; p < 4; ++p) {
            const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(t.mins[p] + 16 * half));
            mins[2 * p] = vreinterpretq_s16_u16(vandq_u16(x, vdupq_n_u16(255)));
            mins[2 * p + 1] = vreinterpretq_s16_u16(vshrq_n_u16(x, 8));
        }
    }
    for (int u = 0; u < n; ++u) {
        int32x4_t min[4];
        if constexpr (tile::has_mins) {
            minima<U>(mins, a + u * U::cols, min);
        }
        const float32x4_t act = U::set(a[u * U::cols]->d, a[(u + 1) * U::cols - 1]->d);
        for (int i = 0; i < U::regs; ++i) {
            float32x4_t x = vmulq_f32(part[u][i], d[i]);
            if constexpr (tile::has_mins) {
                x = vfmsq_f32(x, vcvtq_f32_s32(min[i]), dmin[i]);
            }
            sum[u][i] = vfmaq_f32(sum[u][i], x, act);
        }
    }
}

template <class U, class tile, int n>
inline __attribute__((always_inline)) void block_half(const tile & t, int half, const act_32 * const * a,
                                                      float32x4_t (&sum)[n][U::regs]) {
    int32x4_t acc[n][U::regs];
    PYSSD_UNROLL
    for (int u = 0; u < n; ++u) {
        int32x4_t first = vdupq_n_s32(0);
        if constexpr (tile::bias > 0) {
            first = vmulq_n_s32(U::set(a[u * U::cols]->sum, a[(u + 1) * U::cols - 1]->sum), -tile::bias);
        }
        PYSSD_UNROLL
        for (int i = 0; i < U::regs; ++i) {
            acc[u][i] = first;
        }
    }
    constexpr int share = sizeof(tile) / 2;
    for (int at = 0; at < share; at += 64) {
        __builtin_prefetch((const char *) &t + prefetch_ahead + half * share + at);
    }
    dot_half<U, tile, 0, n>(t, 0, half, acc, a, 0);
    dot_half<U, tile, 2, n>(t, 0, half, acc, a, 0);
    float32x4_t d[4], m[4];
    rows_of(t.d + 8 * half, d);
    U::spread(d);
    if constexpr (tile::has_mins) {
        rows_of(t.m + 8 * half, m);
        U::spread(m);
    }
    PYSSD_UNROLL
    for (int u = 0; u < n; ++u) {
        const act_32 &x = *a[u * U::cols], &y = *a[(u + 1) * U::cols - 1];
        const float32x4_t scales = U::set(x.d, y.d), sums = U::set(x.dsum, y.dsum);
        PYSSD_UNROLL
        for (int i = 0; i < U::regs; ++i) {
            sum[u][i] = vfmaq_f32(sum[u][i], vcvtq_f32_s32(acc[u][i]), vmulq_f32(d[i], scales));
            if constexpr (tile::has_mins) {
                sum[u][i] = vfmaq_f32(sum[u][i], m[i], sums);
            }
        }
    }
}

template <class U, class tile, class act, int M>
void gemm_halves(const tile * w, int64_t n_blocks, const void * const * cols, float * const * out) {
    constexpr int n = (M + U::cols - 1) / U::cols; // an odd column at the end is paired with itself
    const act * a[n * U::cols];
    float * to[n * U::cols];
    for (int j = 0; j < n * U::cols; ++j) {
        a[j] = (const act *) cols[j < M ? j : M - 1];
        to[j] = out[j < M ? j : M - 1];
    }
    float32x4_t sum[2][n][U::regs];
    for (auto & half : sum) {
        for (auto & columns : half) {
            for (auto & x : columns) {
                x = vdupq_n_f32(0.0f);
            }
        }
    }
    for (int64_t i = 0; i < n_blocks; ++i, ++w) {
        for (int half = 0; half < 2; ++half) {
            block_half<U>(*w, half, a, sum[half]);
        }
        for (auto & column : a) {
            column++;
        }
    }
    for (int half = 0; half < 2; ++half) {
        for (int u = 0; u < n; ++u) {
            U::store(to + u * U::cols, 8 * half, sum[half][u]);
        }
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// SMMLA saves half of the products, but weights and activations must be brought into its order: it pays from some width on, the
// later the more there is to reorder, and never in Q6_K, whose sub-blocks of 16 weights spend most instructions on the rest
template <class tile, int M>
constexpr bool mmla_pays = high_bits<tile> == 0 ? M == 4 || M > 5 : high_bits<tile> == 1 && (M == 6 || M == 8);
#endif

template <class tile, int M>
void gemm_neon(const tile * w, int64_t n_blocks, const void * const * cols, float * const * out) {
    using act = typename std::conditional<tile::n_weights == 256, act_k, act_32>::type;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (mmla_pays<tile, M>) {
        return gemm_halves<neon_mmla, tile, act, M>(w, n_blocks, cols, out);
    }
#endif
    gemm_halves<neon_dot, tile, act, M>(w, n_blocks, cols, out);
}

} // namespace pyssd
