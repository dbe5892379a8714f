#pragma once

// One tile of 16 rows times up to 8 columns. The body is the same for every number of columns: an output is computed by the
// same operations in the same order whatever stands beside it.

#include "isa.h"
#include "pack.h"
#include "quant.h"

#include <type_traits>

namespace pyssd {

constexpr int max_cols = 8;

// The hardware follows one stream of addresses well, but not while the core is busy with many columns: ask for the lines
// that will be needed a few microseconds from now. Tiles lie one after the other, so this also starts the next one. One
// column takes so little time that the lines may come to L1; for more they wait in L2, where they are not in the way of the
// columns and can be asked for earlier (Zen 4, 1.5B Q4_K_M: V(4) 1.02-1.14 instead of 1.14-1.38, V(8) 1.3-1.7 instead of 1.5-2.0).
constexpr int64_t prefetch_ahead = 6 * 1024;

template <int M>
inline void prefetch(const void * p, int64_t at) {
    if constexpr (M == 1) {
        __builtin_prefetch((const char *) p + prefetch_ahead + at, 0, 3);
    } else {
        __builtin_prefetch((const char *) p + 2 * prefetch_ahead + at, 0, 2);
    }
}

// the two groups (of four weights each) that vector v of a sub-block holds
template <class V, class tile>
struct unpacker;

template <class V>
struct unpacker<V, tile_q4_K> {
    template <int v>
    static void groups(const tile_q4_K & t, int s, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[s][v]);
        a = V::low(x);
        b = V::high(x);
    }
};

template <class V>
struct unpacker<V, tile_q5_K> {
    template <int v>
    static void groups(const tile_q5_K & t, int s, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[s][v]);
        const auto h = V::load(t.high[s]);
        a = V::template merge<4 - 2 * v, 16>(V::low(x), h);
        b = V::template merge<3 - 2 * v, 16>(V::high(x), h);
    }
};

template <class V>
struct unpacker<V, tile_q6_K> {
    template <int v>
    static void groups(const tile_q6_K & t, int s, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[s][v]);
        const auto h = V::load(t.high[s]);
        a = V::template merge<4 - 4 * v, 48>(V::low(x), h);
        b = V::template merge<2 - 4 * v, 48>(V::high(x), h);
    }
};

template <class V>
struct unpacker<V, tile_q8_0> {
    template <int v>
    static void groups(const tile_q8_0 & t, int, typename V::bytes & a, typename V::bytes & b) {
        a = V::load(t.q[2 * v]);
        b = V::load(t.q[2 * v + 1]);
    }
};

template <class V, class tile>
struct unpacker_nibbles {
    template <int v>
    static void groups(const tile & t, int, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[v]);
        a = V::low(x);
        b = V::high(x);
    }
};

template <class V>
struct unpacker<V, tile_q4_0> : unpacker_nibbles<V, tile_q4_0> {};
template <class V>
struct unpacker<V, tile_q4_1> : unpacker_nibbles<V, tile_q4_1> {};

template <class V>
struct unpacker<V, tile_q5_0> {
    template <int v>
    static void groups(const tile_q5_0 & t, int, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[v]);
        const auto h = V::load(t.high);
        a = V::template merge<4 - 2 * v, 16>(V::low(x), h);
        b = V::template merge<3 - 2 * v, 16>(V::high(x), h);
    }
};

constexpr int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <class V>
struct unpacker<V, tile_iq4_nl> {
    template <int v>
    static void groups(const tile_iq4_nl & t, int, typename V::bytes & a, typename V::bytes & b) {
        const auto x = V::load(t.q[v]);
        a = V::lookup(iq4_nl_values, V::low(x));
        b = V::lookup(iq4_nl_values, V::high(x));
    }
};

// largest unsigned weight
template <class tile>
constexpr int max_weight = 15;
template <>
constexpr int max_weight<tile_q5_K> = 31;
template <>
constexpr int max_weight<tile_q5_0> = 31;
template <>
constexpr int max_weight<tile_q6_K> = 63;

template <class tile>
constexpr bool is_signed = std::is_same<tile, tile_q8_0>::value || std::is_same<tile, tile_iq4_nl>::value;

// acc[j] += vector v of a sub-block, times eight activations of column j
template <class V, class tile, int v, int M, class act>
inline void dot_vector(const tile & t, int s, int k, dot_sum<V, max_weight<tile>> (&acc)[M],
                       const act * const (&a)[M]) {
    typename V::bytes x, y;
    unpacker<V, tile>::template groups<v>(t, s, x, y);
    for (int j = 0; j < M; ++j) {
        if constexpr (is_signed<tile>) {
            acc[j].sum = V::dot_signed(acc[j].sum, x, a[j]->q + k + 8 * v);
            acc[j].sum = V::dot_signed(acc[j].sum, y, a[j]->q + k + 8 * v + 4);
        } else {
            acc[j].template add<2 * v>(x, a[j]->q + k + 8 * v);
            acc[j].template add<2 * v + 1>(y, a[j]->q + k + 8 * v + 4);
        }
    }
}

template <class V, class tile, int M>
void gemm_k(const tile * w, int64_t n_blocks, const void * const * cols, float * const * out) {
    typename V::f32 sum[M];
    const act_k * a[M];
    for (int j = 0; j < M; ++j) {
        sum[j] = V::zerof();
        a[j] = (const act_k *) cols[j];
    }
    for (int64_t i = 0; i < n_blocks; ++i, ++w) {
        typename V::f32 part[M];
        for (int j = 0; j < M; ++j) {
            part[j] = V::zerof();
        }
        for (int s = 0; s < 256 / tile::sub_size; ++s) {
            dot_sum<V, max_weight<tile>> acc[M];
            for (int j = 0; j < M; ++j) {
                acc[j].sum = tile::bias ? V::set1(a[j]->bias16[s]) : V::zero();
            }
            const int k = s * tile::sub_size;
            constexpr int share = sizeof(tile) * tile::sub_size / 256;
            for (int at = 0; at < share; at += 64) {
                prefetch<M>(w, s * share + at);
            }
            dot_vector<V, tile, 0, M>(*w, s, k, acc, a);
            dot_vector<V, tile, 1, M>(*w, s, k, acc, a);
            typename V::f32 scale;
            if constexpr (tile::sub_size == 32) {
                dot_vector<V, tile, 2, M>(*w, s, k, acc, a);
                dot_vector<V, tile, 3, M>(*w, s, k, acc, a);
                scale = V::load_u8(w->scales[s]);
            } else {
                scale = V::load_i8(w->scales[s]);
            }
            for (int j = 0; j < M; ++j) {
                part[j] = V::fma(V::to_float(acc[j].sum), scale, part[j]);
            }
        }
        const auto d = V::load_f16(w->d);
        for (int j = 0; j < M; ++j) {
            part[j] = V::mul(part[j], d);
        }
        if constexpr (tile::has_mins) {
            const auto dmin = V::load_f16(w->dmin);
            for (int j = 0; j < M; ++j) {
                auto min = V::zero();
                for (int p = 0; p < 4; ++p) {
                    min = V::dot_pairs(min, w->mins[p], a[j]->sums32 + 2 * p);
                }
                part[j] = V::fnma(V::to_float(min), dmin, part[j]);
            }
        }
        for (int j = 0; j < M; ++j) {
            sum[j] = V::fma(part[j], V::set1f(a[j]->d), sum[j]);
            a[j]++;
        }
    }
    for (int j = 0; j < M; ++j) {
        V::store(out[j], sum[j]);
    }
}

template <class V, class tile, int M>
void gemm_32(const tile * w, int64_t n_blocks, const void * const * cols, float * const * out) {
    typename V::f32 sum[M];
    const act_32 * a[M];
    for (int j = 0; j < M; ++j) {
        sum[j] = V::zerof();
        a[j] = (const act_32 *) cols[j];
    }
    for (int64_t i = 0; i < n_blocks; ++i, ++w) {
        for (size_t at = 0; at < sizeof(tile); at += 64) {
            prefetch<M>(w, at);
        }
        dot_sum<V, max_weight<tile>> acc[M];
        for (int j = 0; j < M; ++j) {
            acc[j].sum = is_signed<tile> ? V::start_signed(a[j]->sum)
                         : tile::bias    ? V::set1(-tile::bias * a[j]->sum)
                                         : V::zero();
        }
        dot_vector<V, tile, 0, M>(*w, 0, 0, acc, a);
        dot_vector<V, tile, 1, M>(*w, 0, 0, acc, a);
        dot_vector<V, tile, 2, M>(*w, 0, 0, acc, a);
        dot_vector<V, tile, 3, M>(*w, 0, 0, acc, a);
        const auto d = V::load_f16(w->d);
        for (int j = 0; j < M; ++j) {
            sum[j] = V::fma(V::to_float(acc[j].sum), V::mul(d, V::set1f(a[j]->d)), sum[j]);
        }
        if constexpr (tile::has_mins) {
            const auto m = V::load_f16(w->m);
            for (int j = 0; j < M; ++j) {
                sum[j] = V::fma(m, V::set1f(a[j]->dsum), sum[j]);
            }
        }
        for (int j = 0; j < M; ++j) {
            a[j]++;
        }
    }
    for (int j = 0; j < M; ++j) {
        V::store(out[j], sum[j]);
    }
}

// sum[i][j] += the weights of column k times the activation of column j
template <class V, ggml_type type, int M, int i>
inline void float_step(const void * w, int64_t k, const void * const * cols, typename V::f32 (&sum)[4][M]) {
    typename V::f32 x;
    if constexpr (type == GGML_TYPE_F32) {
        x = V::load_f32((const float *) w + 16 * k);
        V::keep(x);
    } else if constexpr (type == GGML_TYPE_F16) {
        x = V::load_f16((const uint16_t *) w + 16 * k);
    } else {
        x = V::load_bf16((const uint16_t *) w + 16 * k);
    }
    for (int j = 0; j < M; ++j) {
        sum[i][j] = V::fma(x, V::set1f(((const float *) cols[j])[k]), sum[i][j]);
    }
}

// float weights: short chains of additions (four a chunk, chunks into two totals), so that rounding does not build up
template <class V, ggml_type type, int M>
void gemm_float(const void * w, int64_t n, const void * const * cols, float * const * out) {
    if constexpr (M > 4) { // more chains than registers: two halves, the tile is near after the first
        gemm_float<V, type, 4>(w, n, cols, out);
        gemm_float<V, type, M - 4>(w, n, cols + 4, out + 4);
        return;
    } else {
        constexpr int64_t chunk = 64;
        typename V::f32 total[2][M];
        for (int j = 0; j < M; ++j) {
            total[0][j] = V::zerof();
            total[1][j] = V::zerof();
        }
        for (int64_t k0 = 0; k0 < n; k0 += 2 * chunk) {
            for (int half = 0; half < 2; ++half) {
                const int64_t first = k0 + half * chunk;
                const int64_t last = first + chunk < n ? first + chunk : n;
                typename V::f32 sum[4][M];
                for (int i = 0; i < 4; ++i) {
                    for (int j = 0; j < M; ++j) {
                        sum[i][j] = V::zerof();
                    }
                }
                int64_t k = first;
                for (; k + 4 <= last; k += 4) {
                    float_step<V, type, M, 0>(w, k, cols, sum);
                    float_step<V, type, M, 1>(w, k + 1, cols, sum);
                    float_step<V, type, M, 2>(w, k + 2, cols, sum);
                    float_step<V, type, M, 3>(w, k + 3, cols, sum);
                }
                for (; k < last; ++k) {
                    float_step<V, type, M, 0>(w, k, cols, sum);
                }
                for (int j = 0; j < M; ++j) {
                    const auto part = V::add(V::add(sum[0][j], sum[1][j]), V::add(sum[2][j], sum[3][j]));
                    total[half][j] = V::add(total[half][j], part);
                }
            }
        }
        for (int j = 0; j < M; ++j) {
            V::store(out[j], V::add(total[0][j], total[1][j]));
        }
    }
}

// w: one packed tile of n weights a row; cols[j]: quantised (float for float weights) column; out[j]: 16 floats
using gemm_fn = void (*)(const void * w, int64_t n, const void * const * cols, float * const * out);

// the kernel of this build for a type and 1..max_cols columns, NULL if the type has none
gemm_fn gemm_for(ggml_type type, int n_cols);
gemm_fn gemm_reference(ggml_type type, int n_cols); // the portable one

} // namespace pyssd
