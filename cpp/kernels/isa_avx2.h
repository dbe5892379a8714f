#pragma once

// AVX2 with FMA and F16C, and the dot products of AVX-VNNI where the build has them: 16 lanes are two registers.

#include "isa_scalar.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pyssd {

struct isa_avx2 {
#if defined(__AVXVNNI__)
    static constexpr const char * name = "AVX2 VNNI";
#else
    static constexpr const char * name = "AVX2";
#endif

    struct i32 {
        __m256i lo, hi;
    };
    struct f32 {
        __m256 lo, hi;
    };
    using bytes = i32;

    static i32 zero() {
        return {_mm256_setzero_si256(), _mm256_setzero_si256()};
    }
    // in a register from here on: else compilers read it from memory again for every use
    static void keep(f32 &) {}
    static f32 zerof() {
        return {_mm256_setzero_ps(), _mm256_setzero_ps()};
    }
    static i32 set1(int32_t x) {
        return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
    }
    static f32 set1f(float x) {
        return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
    }

    static bytes load(const void * p) {
        return {_mm256_loadu_si256((const __m256i *) p), _mm256_loadu_si256((const __m256i *) p + 1)};
    }
    static bytes low(bytes x) {
        const __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
    }
    static bytes high(bytes x) {
        return low({_mm256_srli_epi16(x.lo, 4), _mm256_srli_epi16(x.hi, 4)});
    }

    template <int shift, int mask>
    static __m256i merge(__m256i x, __m256i h) {
        constexpr int left = shift > 0 ? shift : 0, right = shift < 0 ? -shift : 0;
        const __m256i s = shift > 0 ? _mm256_slli_epi16(h, left) : _mm256_srli_epi16(h, right);
        return _mm256_or_si256(x, _mm256_and_si256(s, _mm256_set1_epi8(mask)));
    }
    template <int shift, int mask>
    static bytes merge(bytes x, bytes h) {
        return {merge<shift, mask>(x.lo, h.lo), merge<shift, mask>(x.hi, h.hi)};
    }

    static bytes lookup(const int8_t * table, bytes index) {
        const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table));
        return {_mm256_shuffle_epi8(t, index.lo), _mm256_shuffle_epi8(t, index.hi)};
    }

    // gcc would otherwise collect the terms of a sum first, in memory, and add them up in the end
    static __m256i pinned(__m256i x) {
#if defined(__GNUC__)
        __asm__("" : "+x"(x));
#endif
        return x;
    }

    static __m256i widened(__m256i acc, __m256i pairs) {
        return pinned(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }

    static __m256i four(const void * a) {
        int32_t x;
        memcpy(&x, a, 4);
        return _mm256_set1_epi32(x);
    }

#if defined(__AVXVNNI__)
    static i32 dot(i32 acc, bytes w, const int8_t * a) {
        return {_mm256_dpbusd_avx_epi32(acc.lo, w.lo, four(a)), _mm256_dpbusd_avx_epi32(acc.hi, w.hi, four(a))};
    }

    // the instruction wants unsigned weights: add 128, which start_signed takes back
    static i32 dot_signed(i32 acc, bytes w, const int8_t * a) {
        const __m256i flip = _mm256_set1_epi8((char) 0x80);
        return dot(acc, {_mm256_xor_si256(w.lo, flip), _mm256_xor_si256(w.hi, flip)}, a);
    }
    static i32 start_signed(int32_t sum) {
        return set1(-128 * sum);
    }

    static __m256i dot_pairs(__m256i acc, const uint8_t * pairs, __m256i a) {
        return _mm256_dpwssd_avx_epi32(acc, _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *) pairs)), a);
    }
#else
    // sums of two products stay below 2^15: 2*63*127 for unsigned weights, 2*128*127 for signed ones, even for the -128 that no
    // quantiser writes (activations are never -128)
    static __m256i dot(__m256i acc, __m256i w, __m256i a) {
        return widened(acc, _mm256_maddubs_epi16(w, a));
    }
    static i32 dot(i32 acc, bytes w, const int8_t * a) {
        return {dot(acc.lo, w.lo, four(a)), dot(acc.hi, w.hi, four(a))};
    }

    // |w| times the activation with the sign of w
    static i32 dot_signed(i32 acc, bytes w, const int8_t * a) {
        return {dot(acc.lo, _mm256_abs_epi8(w.lo), _mm256_sign_epi8(four(a), w.lo)),
                dot(acc.hi, _mm256_abs_epi8(w.hi), _mm256_sign_epi8(four(a), w.hi))};
    }
    static i32 start_signed(int32_t) {
        return zero();
    }

    static __m256i dot_pairs(__m256i acc, const uint8_t * pairs, __m256i a) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *) pairs));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(wide, a));
    }
#endif

    static i32 dot_pairs(i32 acc, const uint8_t * pairs, const int16_t * a) {
        return {dot_pairs(acc.lo, pairs, four(a)), dot_pairs(acc.hi, pairs + 16, four(a))};
    }

    static f32 to_float(i32 x) {
        return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)};
    }
    static f32 load_u8(const uint8_t * p) {
        return to_float({_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)),
                         _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8)))});
    }
    static f32 load_i8(const int8_t * p) {
        return to_float({_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)),
                         _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8)))});
    }
    static f32 load_f16(const uint16_t * p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p + 8)))};
    }
    static __m256 load_bf16_8(const uint16_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static f32 load_bf16(const uint16_t * p) {
        return {load_bf16_8(p), load_bf16_8(p + 8)};
    }
    static f32 load_f32(const float * p) {
        return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    }
    static void store(float * p, f32 x) {
        _mm256_storeu_ps(p, x.lo);
        _mm256_storeu_ps(p + 8, x.hi);
    }

    static f32 mul(f32 a, f32 b) {
        return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
    }
    static f32 add(f32 a, f32 b) {
        return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
    }
    static f32 fma(f32 a, f32 b, f32 c) {
        return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
    }
    static f32 fnma(f32 a, f32 b, f32 c) {
        return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
    }
    static f32 max(f32 a, f32 b) {
        return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
    }

    // 2^n * e^r with |r| <= ln 2 / 2, the power of two in two steps: it may lie below the smallest normal number
    static __m256 exp(__m256 x) {
        const __m256 lowest = _mm256_set1_ps(-104.0f);
        x = _mm256_max_ps(x, lowest);
        const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256 r =
            _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x));
        __m256 y = _mm256_set1_ps(1.0f / 720);
        for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
            y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
        }
        const __m256i whole = _mm256_cvtps_epi32(n);
        const __m256i half = _mm256_srai_epi32(whole, 1);
        y = _mm256_mul_ps(_mm256_mul_ps(y, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
        return _mm256_and_ps(y, _mm256_cmp_ps(x, lowest, _CMP_GT_OQ));
    }
    static __m256 power_of_two(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static f32 exp(f32 x) {
        return {exp(x.lo), exp(x.hi)};
    }

    static float max_of(f32 a) {
        const __m256 x = _mm256_max_ps(a.lo, a.hi);
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    static float sum_of(f32 a) {
        const __m256 x = _mm256_add_ps(a.lo, a.hi);
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }

    // a square of 8 x 8
    static void transpose(__m256 (&r)[8]) {
        __m256 t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
            t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
        }
        for (int i = 0; i < 8; ++i) {
            r[i] = t[i];
        }
    }
    static void transpose(f32 (&r)[16]) {
        __m256 a[8], b[8], c[8], d[8]; // squares: upper left, upper right, lower left, lower right
        for (int i = 0; i < 8; ++i) {
            a[i] = r[i].lo;
            b[i] = r[i].hi;
            c[i] = r[i + 8].lo;
            d[i] = r[i + 8].hi;
        }
        transpose(a);
        transpose(b);
        transpose(c);
        transpose(d);
        for (int i = 0; i < 8; ++i) {
            r[i] = {a[i], c[i]};
            r[i + 8] = {b[i], d[i]};
        }
    }
};

#if !defined(__AVXVNNI__)
// as many pairs of products as 16 bits hold are added up before they are widened
template <int max>
struct dot_sum<isa_avx2, max> {
    static constexpr int n = max <= 15 ? 8 : max <= 31 ? 4 : 2;
    static_assert(n * 2 * max * 127 < 32768, "sums of products must fit in 16 bits");
    isa_avx2::i32 sum, narrow;

    template <int g>
    void add(isa_avx2::bytes w, const int8_t * a) {
        const __m256i x = isa_avx2::four(a);
        const __m256i lo = _mm256_maddubs_epi16(w.lo, x), hi = _mm256_maddubs_epi16(w.hi, x);
        narrow = g % n == 0 ? isa_avx2::i32{lo, hi}
                            : isa_avx2::i32{isa_avx2::pinned(_mm256_add_epi16(narrow.lo, lo)),
                                            isa_avx2::pinned(_mm256_add_epi16(narrow.hi, hi))};
        if (g % n == n - 1) {
            sum = {isa_avx2::widened(sum.lo, narrow.lo), isa_avx2::widened(sum.hi, narrow.hi)};
        }
    }
};
#endif

} // namespace pyssd
