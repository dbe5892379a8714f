#pragma once

// What a register of integer sums holds on NEON, and how weights and activations must lie for it: SDOT takes one column, SMMLA
// (i8mm) two columns, at twice the products an instruction. Integer sums are exact, so both give the same bits.

#include <arm_neon.h>

#include <cstdint>

namespace pyssd {

// SDOT: a register of sums is four rows of one column. Weights: a register is four rows of four weights
struct neon_dot {
    static constexpr int cols = 1; // that share registers
    static constexpr int regs = 2; // of 8 rows of them

    // where nibble n of vector x, quarter tile i, goes
    static constexpr int index(int x, int n, int i) {
        return 4 * x + 2 * n + i;
    }
    static void interleave(uint8x16_t &, uint8x16_t &) {}
    template <int first, int second>
    static int8x16_t shifts(int x) {
        return vdupq_n_s8(x == 0 ? first : second);
    }

    // 16 weights of 8 rows
    template <class act>
    static void multiply(int32x4_t * acc, const int8x16_t * w, const act * const * a, int k) {
        const int8x16_t x = vld1q_s8(a[0]->q + k);
        acc[0] = vdotq_laneq_s32(acc[0], w[0], x, 0);
        acc[1] = vdotq_laneq_s32(acc[1], w[1], x, 0);
        acc[0] = vdotq_laneq_s32(acc[0], w[2], x, 1);
        acc[1] = vdotq_laneq_s32(acc[1], w[3], x, 1);
        acc[0] = vdotq_laneq_s32(acc[0], w[4], x, 2);
        acc[1] = vdotq_laneq_s32(acc[1], w[5], x, 2);
        acc[0] = vdotq_laneq_s32(acc[0], w[6], x, 3);
        acc[1] = vdotq_laneq_s32(acc[1], w[7], x, 3);
    }

    static void spread(float32x4_t *) {}
    static void join(int32x4_t *) {}
    static int32x4_t set(const int32_t & x, const int32_t &) {
        return vdupq_n_s32(x);
    }
    static float32x4_t set(const float & x, const float &) {
        return vdupq_n_f32(x);
    }
    static void store(float * const * out, int at, const float32x4_t * x) {
        vst1q_f32(out[0] + at, x[0]);
        vst1q_f32(out[0] + at + 4, x[1]);
    }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

// SMMLA: a register of sums is two rows of two columns: row 0 of both, row 1 of both. Weights: two rows of eight weights, words
// of two vectors side by side; they are not neighbours in a row, so activations are taken in that order too
struct neon_mmla {
    static constexpr int cols = 2;
    static constexpr int regs = 4;

    static constexpr int index(int x, int n, int i) {
        return 4 * n + 2 * i + x;
    }
    static void interleave(uint8x16_t & x, uint8x16_t & y) {
        const uint32x4_t a = vreinterpretq_u32_u8(x), b = vreinterpretq_u32_u8(y);
        x = vreinterpretq_u8_u32(vzip1q_u32(a, b));
        y = vreinterpretq_u8_u32(vzip2q_u32(a, b));
    }
    template <int first, int second>
    static int8x16_t shifts(int) {
        constexpr uint64_t word = 0x01010101;
        return vreinterpretq_s8_u64(vdupq_n_u64((uint8_t) second * word << 32 | (uint8_t) first * word));
    }

    template <class act>
    static void multiply(int32x4_t * acc, const int8x16_t * w, const act * const * a, int k) {
        const int32x4_t x = vreinterpretq_s32_s8(vld1q_s8(a[0]->q + k));
        const int32x4_t y = vreinterpretq_s32_s8(vld1q_s8(a[1]->q + k));
        const int8x16_t even = vreinterpretq_s8_s32(vuzp1q_s32(x, y)), odd = vreinterpretq_s8_s32(vuzp2q_s32(x, y));
        acc[0] = vmmlaq_s32(acc[0], w[0], even);
        acc[1] = vmmlaq_s32(acc[1], w[1], even);
        acc[2] = vmmlaq_s32(acc[2], w[2], even);
        acc[3] = vmmlaq_s32(acc[3], w[3], even);
        acc[0] = vmmlaq_s32(acc[0], w[4], odd);
        acc[1] = vmmlaq_s32(acc[1], w[5], odd);
        acc[2] = vmmlaq_s32(acc[2], w[6], odd);
        acc[3] = vmmlaq_s32(acc[3], w[7], odd);
    }

    // 8 rows, each twice
    static void spread(float32x4_t * rows) {
        rows[3] = vzip2q_f32(rows[1], rows[1]);
        rows[2] = vzip1q_f32(rows[1], rows[1]);
        rows[1] = vzip2q_f32(rows[0], rows[0]);
        rows[0] = vzip1q_f32(rows[0], rows[0]);
    }
    // 8 rows of one column and of another to the order of the sums
    static void join(int32x4_t * x) {
        const int32x4_t a = x[0], b = x[1], c = x[2], d = x[3];
        x[0] = vzip1q_s32(a, c);
        x[1] = vzip2q_s32(a, c);
        x[2] = vzip1q_s32(b, d);
        x[3] = vzip2q_s32(b, d);
    }
    static int32x4_t set(const int32_t & x, const int32_t & y) {
        const int32x2_t two = vld1_lane_s32(&y, vld1_dup_s32(&x), 1);
        return vcombine_s32(two, two);
    }
    static float32x4_t set(const float & x, const float & y) {
        const float32x2_t two = vld1_lane_f32(&y, vld1_dup_f32(&x), 1);
        return vcombine_f32(two, two);
    }
    static void store(float * const * out, int at, const float32x4_t * x) {
        for (int i = 0; i < 2; ++i) {
            vst1q_f32(out[0] + at + 4 * i, vuzp1q_f32(x[2 * i], x[2 * i + 1]));
            vst1q_f32(out[1] + at + 4 * i, vuzp2q_f32(x[2 * i], x[2 * i + 1]));
        }
    }
};

#endif

} // namespace pyssd
