// The vector instructions of this build against the portable ones, one by one.

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "isa.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_NEON)
#include "isa_i8mm.h"
#endif

using S = pyssd::isa_scalar;
using N = pyssd::isa_native;

namespace {

std::mt19937 rng(3);

template <typename T>
std::vector<T> random(int n, int lo, int hi) {
    std::uniform_int_distribution<int> dist(lo, hi);
    std::vector<T> out(n);
    for (T & x : out) {
        x = (T) dist(rng);
    }
    return out;
}

// lanes of a vector in memory, whatever its type
template <typename V>
std::vector<uint8_t> lanes(const V & x) {
    std::vector<uint8_t> out(sizeof(x));
    memcpy(out.data(), &x, sizeof(x));
    return out;
}

void test_integers() {
    for (int round = 0; round < 200; ++round) {
        const auto w = random<uint8_t>(64, 0, 255), h = random<uint8_t>(64, 0, 255);
        const auto x = S::load(w.data()), g = S::load(h.data());
        const auto y = N::load(w.data()), i = N::load(h.data());
        CHECK(lanes(x) == lanes(y));
        CHECK(lanes(S::low(x)) == lanes(N::low(y)));
        CHECK(lanes(S::high(x)) == lanes(N::high(y)));
        CHECK(lanes(S::merge<4, 16>(S::low(x), g)) == lanes(N::merge<4, 16>(N::low(y), i)));
        CHECK(lanes(S::merge<0, 48>(S::low(x), g)) == lanes(N::merge<0, 48>(N::low(y), i)));
        CHECK(lanes(S::merge<-3, 16>(S::low(x), g)) == lanes(N::merge<-3, 16>(N::low(y), i)));
        const auto table = random<int8_t>(16, -128, 127);
        CHECK(lanes(S::lookup(table.data(), S::low(x))) == lanes(N::lookup(table.data(), N::low(y))));

        const int start = random<int>(1, -100000, 100000)[0];
        const auto a = round == 0 ? std::vector<int8_t>(4, 127) : random<int8_t>(4, -127, 127);
        const auto small = round == 0 ? std::vector<uint8_t>(64, 63) : random<uint8_t>(64, 0, 63);
        CHECK(lanes(S::dot(S::set1(start), S::load(small.data()), a.data())) ==
              lanes(N::dot(N::set1(start), N::load(small.data()), a.data())));
        // signed weights down to -128, which a file may hold though no quantiser writes it
        const auto wide = round == 0 ? std::vector<uint8_t>(64, 0x80) : w;
        int sum = 0;
        for (const int8_t q : a) {
            sum += q;
        }
        CHECK(lanes(S::dot_signed(S::start_signed(sum), S::load(wide.data()), a.data())) ==
              lanes(N::dot_signed(N::start_signed(sum), N::load(wide.data()), a.data())));
        const auto pair = random<int16_t>(2, -4064, 4064);
        CHECK(lanes(S::dot_pairs(S::set1(start), w.data(), pair.data())) ==
              lanes(N::dot_pairs(N::set1(start), w.data(), pair.data())));
        CHECK(lanes(S::to_float(S::set1(start))) == lanes(N::to_float(N::set1(start))));
        CHECK(lanes(S::load_u8(w.data())) == lanes(N::load_u8(w.data())));
        CHECK(lanes(S::load_i8((const int8_t *) w.data())) == lanes(N::load_i8((const int8_t *) w.data())));
    }
}

void test_floats() {
    std::normal_distribution<float> normal;
    for (int round = 0; round < 200; ++round) {
        float a[16], b[16], c[16];
        uint16_t half[16], brain[16];
        for (int i = 0; i < 16; ++i) {
            a[i] = normal(rng);
            b[i] = normal(rng);
            c[i] = normal(rng);
            half[i] = ggml_fp32_to_fp16(i == 3 ? 5e-7f : a[i]); // a subnormal too
            brain[i] = ggml_fp32_to_bf16(b[i]).bits;
        }
        const auto x = S::load_f32(a), y = S::load_f32(b), z = S::load_f32(c);
        const auto p = N::load_f32(a), q = N::load_f32(b), r = N::load_f32(c);
        CHECK(lanes(S::load_f16(half)) == lanes(N::load_f16(half)));
        CHECK(lanes(S::load_bf16(brain)) == lanes(N::load_bf16(brain)));
        CHECK(lanes(S::set1f(a[0])) == lanes(N::set1f(a[0])));
        CHECK(lanes(S::mul(x, y)) == lanes(N::mul(p, q)));
        CHECK(lanes(S::add(x, y)) == lanes(N::add(p, q)));
        CHECK(lanes(S::fma(x, y, z)) == lanes(N::fma(p, q, r)));
        CHECK(lanes(S::fnma(x, y, z)) == lanes(N::fnma(p, q, r)));
        CHECK(lanes(S::max(x, y)) == lanes(N::max(p, q)));
        CHECK(S::max_of(x) == N::max_of(p));
        CHECK(S::sum_of(x) == N::sum_of(p)); // the same order of additions
        float out[16];
        N::store(out, p);
        CHECK(memcmp(out, a, sizeof(a)) == 0);
    }
    CHECK(lanes(S::zerof()) == lanes(N::zerof()));
    CHECK(lanes(S::zero()) == lanes(N::zero()));
}

void test_transpose() {
    float in[16][16];
    N::f32 rows[16];
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) {
            in[i][j] = (float) (100 * i + j);
        }
        rows[i] = N::load_f32(in[i]);
    }
    N::transpose(rows);
    for (int i = 0; i < 16; ++i) {
        float out[16];
        N::store(out, rows[i]);
        for (int j = 0; j < 16; ++j) {
            CHECK(out[j] == in[j][i]);
        }
    }
}

void test_exp() {
    const auto exp_of = [](float x) {
        float out[16];
        N::store(out, N::exp(N::set1f(x)));
        return out[7];
    };
    CHECK(exp_of(-INFINITY) == 0.0f);
    CHECK(exp_of(-1e30f) == 0.0f);
    CHECK(exp_of(0.0f) == 1.0f);
    for (float x = -103.0f; x <= 88.0f; x += 0.0371f) {
        const double exact = std::exp((double) x);
        CHECK(std::fabs(exp_of(x) - exact) <= 3e-7 * exact + std::numeric_limits<float>::denorm_min());
    }
}

#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_NEON)

// sums of half a tile by one of NEON's two products, columns in pairs or not, against plain ones
template <class U>
void test_half_tile() {
    struct act {
        int8_t q[16];
    };
    for (int round = 0; round < 200; ++round) {
        const int lowest = -128, highest = round == 0 ? -128 : 127;
        const auto w = random<int8_t>(8 * 16, lowest, highest);
        act columns[2];
        const act * a[2] = {&columns[0], &columns[1]};
        for (act & column : columns) {
            memcpy(column.q, random<int8_t>(16, lowest, highest).data(), 16);
        }
        int8x16_t unpacked[8];
        // words 0 and 1 of a row are the nibbles of one vector, 2 and 3 of the next
        for (int i = 0; i < 2; ++i) {
            uint8x16_t word[4];
            for (int g = 0; g < 4; ++g) {
                for (int r = 0; r < 4; ++r) {
                    memcpy((uint8_t *) &word[g] + 4 * r, &w[16 * (4 * i + r) + 4 * g], 4);
                }
            }
            for (int n = 0; n < 2; ++n) {
                U::interleave(word[n], word[2 + n]);
                unpacked[U::index(0, n, i)] = vreinterpretq_s8_u8(word[n]);
                unpacked[U::index(1, n, i)] = vreinterpretq_s8_u8(word[2 + n]);
            }
        }
        int32x4_t acc[4] = {vdupq_n_s32(7), vdupq_n_s32(7), vdupq_n_s32(7), vdupq_n_s32(7)};
        U::multiply(acc, unpacked, a, 0);
        float got[2][8];
        float * out[2] = {got[0], got[1]};
        float32x4_t sums[4];
        for (int i = 0; i < 4; ++i) {
            sums[i] = vcvtq_f32_s32(acc[i]);
        }
        U::store(out, 0, sums);
        for (int j = 0; j < U::cols; ++j) {
            for (int r = 0; r < 8; ++r) {
                int sum = 7;
                for (int k = 0; k < 16; ++k) {
                    sum += w[16 * r + k] * columns[j].q[k];
                }
                CHECK(got[j][r] == (float) sum);
            }
        }
    }
}

#endif

} // namespace

int main() {
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_NEON)
    test_half_tile<pyssd::neon_dot>();
#if defined(__ARM_FEATURE_MATMUL_INT8)
    test_half_tile<pyssd::neon_mmla>();
#endif
#endif
    test_integers();
    test_floats();
    test_transpose();
    test_exp();
    return failures();
}
