#pragma once

// AVX-512 with VNNI: a register holds 16 lanes.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pyssd {

struct isa_avx512 {
    static constexpr const char * name = "AVX-512 VNNI";

    using i32 = __m512i;
    using f32 = __m512;
    using bytes = __m512i;

    static i32 zero() {
        return _mm512_setzero_si512();
    }
    // in a register from here on: else compilers read it from memory again for every use
    static void keep(f32 & x) {
        asm("" : "+v"(x));
    }
    static f32 zerof() {
        return _mm512_setzero_ps();
    }
    static i32 set1(int32_t x) {
        return _mm512_set1_epi32(x);
    }
    static f32 set1f(float x) {
        return _mm512_set1_ps(x);
    }

    static bytes load(const void * p) {
        return _mm512_loadu_si512(p);
    }
    static bytes low(bytes x) {
        return _mm512_and_si512(x, _mm512_set1_epi8(15));
    }
    static bytes high(bytes x) {
        return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
    }

    template <int shift, int mask>
    static bytes merge(bytes x, bytes h) {
        const bytes s = shift > 0   ? _mm512_slli_epi16(h, shift > 0 ? shift : 0)
                        : shift < 0 ? _mm512_srli_epi16(h, shift < 0 ? -shift : 0)
                                    : h;
        return _mm512_ternarylogic_epi32(x, s, _mm512_set1_epi8(mask), 0xf8); // x | (s & mask)
    }

    static bytes lookup(const int8_t * table, bytes index) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), index);
    }

    static i32 four(const int8_t * a) {
        int32_t x;
        memcpy(&x, a, 4);
        return _mm512_set1_epi32(x);
    }
    static i32 dot(i32 acc, bytes w, const int8_t * a) {
        return _mm512_dpbusd_epi32(acc, w, four(a));
    }

    // the instruction wants unsigned weights: add 128, which start_signed takes back
    static i32 dot_signed(i32 acc, bytes w, const int8_t * a) {
        return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8((char) 0x80)), four(a));
    }
    static i32 start_signed(int32_t sum) {
        return _mm512_set1_epi32(-128 * sum);
    }

    static i32 dot_pairs(i32 acc, const uint8_t * pairs, const int16_t * a) {
        int32_t x;
        memcpy(&x, a, 4);
        return _mm512_dpwssd_epi32(acc, _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *) pairs)),
                                   _mm512_set1_epi32(x));
    }

    static f32 to_float(i32 x) {
        return _mm512_cvtepi32_ps(x);
    }
    static f32 load_u8(const uint8_t * p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)));
    }
    static f32 load_i8(const int8_t * p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)));
    }
    static f32 load_f16(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
    }
    static f32 load_bf16(const uint16_t * p) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
    }
    static f32 load_f32(const float * p) {
        return _mm512_loadu_ps(p);
    }
    static void store(float * p, f32 x) {
        _mm512_storeu_ps(p, x);
    }

    static f32 mul(f32 a, f32 b) {
        return _mm512_mul_ps(a, b);
    }
    static f32 add(f32 a, f32 b) {
        return _mm512_add_ps(a, b);
    }
    static f32 fma(f32 a, f32 b, f32 c) {
        return _mm512_fmadd_ps(a, b, c);
    }
    static f32 fnma(f32 a, f32 b, f32 c) {
        return _mm512_fnmadd_ps(a, b, c);
    }
    static f32 max(f32 a, f32 b) {
        return _mm512_max_ps(a, b);
    }

    // 2^n * e^r with |r| <= ln 2 / 2: relative error below 2e-7; 0 for what is far below, -inf included
    static f32 exp(f32 x) {
        x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
        const f32 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
        const f32 r =
            _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
        f32 y = _mm512_set1_ps(1.0f / 720);
        for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
            y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
        }
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_GT_OQ), _mm512_scalef_ps(y, n));
    }

    static float max_of(f32 a) {
        return _mm512_reduce_max_ps(a);
    }
    static float sum_of(f32 a) {
        return _mm512_reduce_add_ps(a);
    }

    static void transpose(f32 (&r)[16]) {
        f32 t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
            const __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
            r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
            r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        }
        for (int i = 0; i < 4; ++i) {
            r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
            r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
            r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
            r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
        }
    }
};

} // namespace pyssd
