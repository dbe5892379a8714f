#pragma once

// Arm NEON with dot products (Armv8.2 and later): 16 lanes are four registers.

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace pyssd {

struct isa_neon {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr const char * name = "NEON i8mm";
#else
    static constexpr const char * name = "NEON dotprod";
#endif

    struct i32 {
        int32x4_t v[4];
    };
    struct f32 {
        float32x4_t v[4];
    };
    struct bytes {
        uint8x16_t v[4];
    };

    static i32 zero() {
        return set1(0);
    }
    // in a register from here on: else compilers read it from memory again for every use
    static void keep(f32 &) {}
    static f32 zerof() {
        return set1f(0.0f);
    }
    static i32 set1(int32_t x) {
        const int32x4_t r = vdupq_n_s32(x);
        return {{r, r, r, r}};
    }
    static f32 set1f(float x) {
        const float32x4_t r = vdupq_n_f32(x);
        return {{r, r, r, r}};
    }

    static bytes load(const void * p) {
        const uint8_t * b = (const uint8_t *) p;
        return {{vld1q_u8(b), vld1q_u8(b + 16), vld1q_u8(b + 32), vld1q_u8(b + 48)}};
    }
    static bytes low(bytes x) {
        for (auto & r : x.v) {
            r = vandq_u8(r, vdupq_n_u8(15));
        }
        return x;
    }
    static bytes high(bytes x) {
        for (auto & r : x.v) {
            r = vshrq_n_u8(r, 4);
        }
        return x;
    }

    template <int shift, int mask>
    static bytes merge(bytes x, bytes h) {
        const int8x16_t by = vdupq_n_s8(shift); // negative: to the right
        for (int i = 0; i < 4; ++i) {
            x.v[i] = vorrq_u8(x.v[i], vandq_u8(vshlq_u8(h.v[i], by), vdupq_n_u8(mask)));
        }
        return x;
    }

    static bytes lookup(const int8_t * table, bytes index) {
        const int8x16_t t = vld1q_s8(table);
        for (auto & r : index.v) {
            r = vreinterpretq_u8_s8(vqtbl1q_s8(t, r));
        }
        return index;
    }

    // weights up to 63 are the same number signed and unsigned
    static i32 dot(i32 acc, bytes w, const int8_t * a) {
        int32_t x;
        memcpy(&x, a, 4);
        const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
        for (int i = 0; i < 4; ++i) {
            acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), four);
        }
        return acc;
    }
    static i32 dot_signed(i32 acc, bytes w, const int8_t * a) {
        return dot(acc, w, a);
    }
    static i32 start_signed(int32_t) {
        return zero();
    }

    static i32 dot_pairs(i32 acc, const uint8_t * pairs, const int16_t * a) {
        int32_t x;
        memcpy(&x, a, 4);
        const int16x8_t two = vreinterpretq_s16_s32(vdupq_n_s32(x));
        for (int i = 0; i < 4; ++i) {
            const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(pairs + 8 * i)));
            const int32x4_t lo = vmull_s16(vget_low_s16(wide), vget_low_s16(two));
            acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(lo, vmull_high_s16(wide, two)));
        }
        return acc;
    }

    static f32 to_float(i32 x) {
        f32 r;
        for (int i = 0; i < 4; ++i) {
            r.v[i] = vcvtq_f32_s32(x.v[i]);
        }
        return r;
    }
    static f32 load_u8(const uint8_t * p) {
        const uint8x16_t b = vld1q_u8(p);
        const uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_high_u8(b);
        return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
                 vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))}};
    }
    static f32 load_i8(const int8_t * p) {
        const int8x16_t b = vld1q_s8(p);
        const int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_high_s8(b);
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))}};
    }
    static f32 load_f16(const uint16_t * p) {
        f32 r;
        for (int i = 0; i < 4; ++i) {
            r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
        }
        return r;
    }
    static f32 load_bf16(const uint16_t * p) {
        f32 r;
        for (int i = 0; i < 4; ++i) {
            r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
        }
        return r;
    }
    static f32 load_f32(const float * p) {
        return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
    }
    static void store(float * p, f32 x) {
        for (int i = 0; i < 4; ++i) {
            vst1q_f32(p + 4 * i, x.v[i]);
        }
    }

    static f32 mul(f32 a, f32 b) {
        for (int i = 0; i < 4; ++i) {
            a.v[i] = vmulq_f32(a.v[i], b.v[i]);
        }
        return a;
    }
    static f32 add(f32 a, f32 b) {
        for (int i = 0; i < 4; ++i) {
            a.v[i] = vaddq_f32(a.v[i], b.v[i]);
        }
        return a;
    }
    static f32 fma(f32 a, f32 b, f32 c) {
        for (int i = 0; i < 4; ++i) {
            c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
        }
        return c;
    }
    static f32 fnma(f32 a, f32 b, f32 c) {
        for (int i = 0; i < 4; ++i) {
            c.v[i] = vfmsq_f32(c.v[i], a.v[i], b.v[i]);
        }
        return c;
    }
    static f32 max(f32 a, f32 b) {
        for (int i = 0; i < 4; ++i) {
            a.v[i] = vmaxq_f32(a.v[i], b.v[i]);
        }
        return a;
    }

    // 2^n * e^r with |r| <= ln 2 / 2, the power of two in two steps: it may lie below the smallest normal number
    static float32x4_t exp(float32x4_t x) {
        const float32x4_t lowest = vdupq_n_f32(-104.0f);
        x = vmaxq_f32(x, lowest);
        const float32x4_t n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(1.44269504f)));
        const float32x4_t r = vfmsq_f32(vfmsq_f32(x, n, vdupq_n_f32(0.693359375f)), n, vdupq_n_f32(-2.12194440e-4f));
        float32x4_t y = vdupq_n_f32(1.0f / 720);
        for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
            y = vfmaq_f32(vdupq_n_f32(c), y, r);
        }
        const int32x4_t whole = vcvtq_s32_f32(n);
        const int32x4_t half = vshrq_n_s32(whole, 1);
        y = vmulq_f32(vmulq_f32(y, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), vcgtq_f32(x, lowest)));
    }
    static float32x4_t power_of_two(int32x4_t n) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
    }
    static f32 exp(f32 x) {
        for (auto & r : x.v) {
            r = exp(r);
        }
        return x;
    }

    static float max_of(f32 a) {
        return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
    }
    static float sum_of(f32 a) {
        const float32x4_t x = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
        const float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
    }

    // squares of 4 x 4
    static void transpose(f32 (&r)[16]) {
        f32 t[16];
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                const float32x4x2_t a = vtrnq_f32(r[4 * i].v[j], r[4 * i + 1].v[j]);
                const float32x4x2_t b = vtrnq_f32(r[4 * i + 2].v[j], r[4 * i + 3].v[j]);
                t[4 * j].v[i] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
                t[4 * j + 1].v[i] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
                t[4 * j + 2].v[i] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
                t[4 * j + 3].v[i] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
            }
        }
        for (int i = 0; i < 16; ++i) {
            r[i] = t[i];
        }
    }
};

} // namespace pyssd
