// The packed kernels on their own: packing loses nothing, results stay within the error that quantised activations explain,
// the vector code equals the portable code bit for bit, and a column's result does not depend on its neighbours.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "gemm.h"
#include "pack.h"
#include "quant.h"

using pyssd::tile_rows;

namespace {

// where a type's blocks keep their half-precision scales and their weights
struct layout {
    ggml_type type;
    std::vector<int> halves;
    int first, last; // bytes of the weights
};

const std::vector<layout> LAYOUTS = {
    {GGML_TYPE_Q4_K, {0, 2}, 16, 144}, {GGML_TYPE_Q5_K, {0, 2}, 16, 176}, {GGML_TYPE_Q6_K, {208}, 0, 192},
    {GGML_TYPE_Q8_0, {0}, 2, 34},      {GGML_TYPE_Q4_0, {0}, 2, 18},      {GGML_TYPE_Q4_1, {0, 2}, 4, 20},
    {GGML_TYPE_Q5_0, {0}, 2, 22},      {GGML_TYPE_IQ4_NL, {0}, 2, 18},    {GGML_TYPE_F32, {}, 0, 0},
    {GGML_TYPE_F16, {}, 0, 0},         {GGML_TYPE_BF16, {}, 0, 0},
};

using bytes = std::vector<uint8_t>;
using floats = std::vector<float>;

floats normal(int64_t n, int seed, float scale) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> dist(0.0f, scale);
    floats x(n);
    for (float & v : x) {
        v = dist(rng);
    }
    return x;
}

floats dequantize(ggml_type type, const bytes & rows, int64_t n) {
    floats x(n);
    if (type == GGML_TYPE_F32) {
        memcpy(x.data(), rows.data(), n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(rows.data(), x.data(), n);
    }
    return x;
}

// rows of a type from floats
bytes quantized(ggml_type type, const floats & x, int64_t n_cols) {
    bytes out(ggml_row_size(type, n_cols) * (x.size() / n_cols));
    if (type == GGML_TYPE_F32) {
        memcpy(out.data(), x.data(), out.size());
    } else {
        ggml_quantize_chunk(type, x.data(), out.data(), 0, x.size() / n_cols, n_cols, nullptr);
    }
    return out;
}

// rows whose bytes, scales of sub-blocks included, come from `byte`; the half-precision scales come from `scales`
bytes crafted(const layout & l, int64_t n, const std::function<uint8_t()> & byte, const floats & scales) {
    bytes out(ggml_row_size(l.type, n));
    for (uint8_t & b : out) {
        b = byte();
    }
    size_t i = 0;
    for (size_t at = 0; at < out.size() && !l.halves.empty(); at += ggml_type_size(l.type)) {
        for (const int h : l.halves) {
            const ggml_fp16_t d = ggml_fp32_to_fp16(scales[i++ % scales.size()]);
            memcpy(&out[at + h], &d, sizeof(d));
        }
    }
    return out;
}

struct named_weights {
    std::string name;
    bytes rows;
};

std::vector<named_weights> weights_of(const layout & l, int64_t n_cols, int64_t n_rows) {
    const int64_t n = n_cols * n_rows;
    std::vector<named_weights> out = {
        {"normal", quantized(l.type, normal(n, 1, 0.05f), n_cols)},
        {"all equal", quantized(l.type, floats(n, 0.75f), n_cols)},
        {"all zero", quantized(l.type, floats(n, 0.0f), n_cols)},
        {"all negative", quantized(l.type, floats(n, -3.0f), n_cols)},
    };
    floats spikes(n, 0.0f);
    for (int64_t i = 0; i < n; i += 97) {
        spikes[i] = i % 2 ? 1000.0f : -1000.0f;
    }
    out.push_back({"spikes", quantized(l.type, spikes, n_cols)});
    if (l.halves.empty()) {
        return out;
    }
    std::mt19937 rng(7);
    const auto random_byte = [&] { return (uint8_t) rng(); };
    out.push_back({"random bytes", crafted(l, n, random_byte, {0.01f, -0.02f, 0.005f})});
    out.push_back({"zero scales", crafted(l, n, random_byte, {0.0f, -0.0f, 1.0f})});
    out.push_back({"maximal scales", crafted(l, n, random_byte, {65504.0f, -65504.0f, 65504.0f})});
    out.push_back({"smallest scales", crafted(l, n, random_byte, {6e-8f, -6e-8f, 6.1e-5f})});
    for (const int value : {0x00, 0x0f, 0x7f, 0x80, 0x81, 0xf0, 0xff}) {
        const auto byte = [&] { return (uint8_t) value; };
        out.push_back({"bytes " + std::to_string(value), crafted(l, n, byte, {1.0f, -2.0f, 0.5f})});
    }
    return out;
}

std::vector<floats> columns_of(int64_t n) {
    std::vector<floats> out = {
        normal(n, 11, 1.0f), floats(n, 1.0f),     floats(n, 0.0f),
        floats(n, -5.0f),    normal(n, 12, 1e4f), normal(n, 13, 1e-6f),
    };
    floats alternating(n), spike = normal(n, 14, 1e-3f);
    for (int64_t k = 0; k < n; ++k) {
        alternating[k] = k % 2 ? 127.0f : -127.0f;
    }
    spike[n / 2] = 1e6f;
    out.push_back(alternating);
    out.push_back(spike);
    return out;
}

// what an exact kernel may differ by from the exact product: activations rounded to a step, float sums rounded per block
double tolerance(const layout & l, const float * w, const float * origin, const floats & x) {
    const int64_t n = x.size();
    const int64_t block = pyssd::tile_block_weights(l.type);
    constexpr double unit = 1.0 / (1 << 24);
    double steps = 0.0, sums = 0.0;
    for (int64_t k = 0; k < n; k += block) {
        float max = 0.0f;
        for (int64_t i = k; i < k + block; ++i) {
            max = std::max(max, std::fabs(x[i]));
        }
        const double step = block == 1 ? 0.0 : max / 127.0;
        for (int64_t i = k; i < k + block; ++i) {
            steps += 0.501 * step * std::fabs(w[i]);
            sums += ((double) std::fabs(w[i] - origin[i]) + std::fabs(origin[i])) * (std::fabs(x[i]) + step);
        }
    }
    return steps + unit * (n / block + 16) * sums + std::numeric_limits<float>::min();
}

struct packed {
    const layout & l;
    int64_t n_cols, n_rows;
    bytes tiles;

    packed(const layout & l, const bytes & rows, int64_t n_cols, int64_t n_rows)
        : l(l), n_cols(n_cols), n_rows(n_rows), tiles(pyssd::packed_size(l.type, n_cols, n_rows), 0xee) {
        // in two parts, as threads do
        const int64_t half = n_rows / 2 / tile_rows * tile_rows;
        pyssd::pack_rows(l.type, tiles.data(), rows.data(), n_cols, n_rows, half, n_rows - half);
        pyssd::pack_rows(l.type, tiles.data(), rows.data(), n_cols, n_rows, 0, half);
    }

    int64_t n_tiles() const {
        return (n_rows + tile_rows - 1) / tile_rows;
    }
};

void test_round_trip(const packed & p, const floats & w) {
    floats row(p.n_cols);
    for (int64_t r = 0; r < p.n_rows; ++r) {
        pyssd::unpack_row(p.l.type, p.tiles.data(), p.n_cols, r, row.data());
        bool equal = true;
        for (int64_t k = 0; k < p.n_cols; ++k) {
            equal = equal && row[k] == w[r * p.n_cols + k]; // not bits: a zero may change its sign
        }
        CHECK(equal);
    }
}

// every width on every tile: against float64, the portable code and the one-column kernel
void test_products(const packed & p, const floats & w, const floats & origin, const std::string & name) {
    const auto x = columns_of(p.n_cols);
    const size_t act_bytes = pyssd::act_size(p.l.type, p.n_cols);
    std::vector<bytes> acts;
    std::vector<const void *> cols;
    for (const floats & column : x) {
        acts.emplace_back(act_bytes);
        if (act_bytes) {
            pyssd::act_quantize(p.l.type, column.data(), p.n_cols, acts.back().data());
        }
        cols.push_back(act_bytes ? (const void *) acts.back().data() : column.data());
    }
    const size_t tile_bytes = pyssd::packed_size(p.l.type, p.n_cols, tile_rows);
    const int n_failed = failures();
    for (int64_t t = 0; t < p.n_tiles(); ++t) {
        const uint8_t * tile = p.tiles.data() + t * tile_bytes;
        float alone[pyssd::max_cols][tile_rows];
        for (int j = 0; j < pyssd::max_cols; ++j) {
            float * out = alone[j];
            pyssd::gemm_for(p.l.type, 1)(tile, p.n_cols, &cols[j], &out);
            for (int64_t r = 0; r < tile_rows; ++r) {
                if (t * tile_rows + r >= p.n_rows) {
                    CHECK(out[r] == 0.0f);
                    continue;
                }
                const float * row = &w[(t * tile_rows + r) * p.n_cols];
                double exact = 0.0;
                for (int64_t k = 0; k < p.n_cols; ++k) {
                    exact += (double) row[k] * x[j][k];
                }
                const double allowed = tolerance(p.l, row, &origin[(t * tile_rows + r) * p.n_cols], x[j]);
                CHECK(std::fabs(out[r] - exact) <= allowed);
            }
        }
        for (int m = 1; m <= pyssd::max_cols; ++m) {
            float native[pyssd::max_cols][tile_rows], portable[pyssd::max_cols][tile_rows];
            float *a[pyssd::max_cols], *b[pyssd::max_cols];
            for (int first = 0; first + m <= pyssd::max_cols; ++first) {
                for (int j = 0; j < m; ++j) {
                    a[j] = native[j];
                    b[j] = portable[j];
                }
                pyssd::gemm_for(p.l.type, m)(tile, p.n_cols, &cols[first], a);
                CHECK(memcmp(native, alone[first], m * sizeof(native[0])) == 0);
                if (first == 0) {
                    pyssd::gemm_reference(p.l.type, m)(tile, p.n_cols, &cols[first], b);
                    CHECK(memcmp(native, portable, m * sizeof(native[0])) == 0);
                }
            }
        }
    }
    if (failures() > n_failed) {
        std::fprintf(stderr, "  for %s, weights: %s, %d x %d\n", ggml_type_name(p.l.type), name.c_str(), (int) p.n_rows,
                     (int) p.n_cols);
    }
}

void test_type(const layout & l) {
    const int64_t block = ggml_blck_size(l.type);
    for (const int64_t n_rows : {1, 15, 37}) {
        for (const int64_t n_cols : {block, 3 * block, std::max<int64_t>(block == 1 ? 101 : 0, 5 * block)}) {
            for (const named_weights & weights : weights_of(l, n_cols, n_rows)) {
                const int64_t n = n_cols * n_rows;
                // with the weights' bytes cleared, what is left are the minima or the offset of unsigned weights
                bytes cleared = weights.rows;
                for (size_t at = 0; at < cleared.size(); at += ggml_type_size(l.type)) {
                    std::fill(cleared.begin() + at + l.first, cleared.begin() + at + l.last, 0);
                }
                const floats w = dequantize(l.type, weights.rows, n);
                const packed p(l, weights.rows, n_cols, n_rows);
                test_round_trip(p, w);
                test_products(p, w, l.halves.empty() ? floats(n, 0.0f) : dequantize(l.type, cleared, n), weights.name);
            }
        }
    }
}

// the quantiser: nearest step, exact sums, nothing but zeros from zeros
void test_activations() {
    const int64_t n = 512;
    for (const floats & x : columns_of(n)) {
        std::vector<pyssd::act_k> k(n / 256);
        pyssd::act_quantize(GGML_TYPE_Q4_K, x.data(), n, k.data());
        for (int64_t i = 0; i < n; ++i) {
            const pyssd::act_k & a = k[i / 256];
            CHECK(std::fabs(a.q[i % 256] * (double) a.d - x[i]) <= 0.501 * a.d);
            CHECK(a.q[i % 256] >= -127);
        }
        for (int s = 0; s < 16; ++s) {
            int sum = 0;
            for (int i = 0; i < 16; ++i) {
                sum += k[0].q[16 * s + i];
            }
            CHECK(k[0].bias16[s] == -32 * sum);
        }
        std::vector<pyssd::act_32> b(n / 32);
        pyssd::act_quantize(GGML_TYPE_Q8_0, x.data(), n, b.data());
        for (int64_t i = 0; i < n; ++i) {
            CHECK(std::fabs(b[i / 32].q[i % 32] * (double) b[i / 32].d - x[i]) <= 0.501 * b[i / 32].d);
        }
        for (const pyssd::act_32 & a : b) {
            int sum = 0;
            for (const int8_t q : a.q) {
                sum += q;
            }
            CHECK(a.sum == sum && a.dsum == a.d * (float) sum);
        }
    }
}

} // namespace

int main() {
    for (const layout & l : LAYOUTS) {
        test_type(l);
    }
    test_activations();
    CHECK(pyssd::tile_block_size(GGML_TYPE_Q2_K) == 0);
    CHECK(pyssd::gemm_for(GGML_TYPE_Q2_K, 1) == nullptr);
    CHECK(pyssd::gemm_for(GGML_TYPE_Q4_K, pyssd::max_cols + 1) == nullptr);
    return failures();
}
