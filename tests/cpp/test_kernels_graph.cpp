// The kernels as ggml runs them: matrices packed through the buffer type, graphs on several threads, results compared with
// float64, with upstream's own kernels, with other widths and other numbers of threads.

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "pyssd-kernels.h"

namespace {

using floats = std::vector<float>;
using bytes = std::vector<uint8_t>;

const ggml_type TYPES[] = {GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0,
                           GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_IQ4_NL,
                           GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16};

floats normal(int64_t n, int seed, float scale) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> dist(0.0f, scale);
    floats x(n);
    for (float & v : x) {
        v = dist(rng);
    }
    return x;
}

// a weight in the packed buffer type or in plain memory, and what it stands for
struct weight {
    ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    ggml_tensor * tensor;
    floats values;

    weight(ggml_type type, int64_t n_cols, int64_t n_rows, int64_t n_matrices, bool packed) {
        const floats x = normal(n_cols * n_rows * n_matrices, 5, 0.05f);
        bytes rows(ggml_row_size(type, n_cols) * n_rows * n_matrices);
        values = x;
        if (type == GGML_TYPE_F32) {
            memcpy(rows.data(), x.data(), rows.size());
        } else {
            ggml_quantize_chunk(type, x.data(), rows.data(), 0, n_rows * n_matrices, n_cols, nullptr);
            ggml_get_type_traits(type)->to_float(rows.data(), values.data(), values.size());
        }
        ctx = ggml_init({ggml_tensor_overhead(), nullptr, true});
        tensor = ggml_new_tensor_3d(ctx, type, n_cols, n_rows, n_matrices);
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, packed ? pyssd_kernels_buffer_type()
                                                                      : ggml_backend_cpu_buffer_type());
        ggml_backend_tensor_set(tensor, rows.data(), 0, rows.size());
    }
    weight(const weight &) = delete;
    ~weight() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

struct input {
    ggml_tensor * tensor;
    const void * data;
};

// builds a graph, computes it with n threads, and gives the floats of its result
struct runner {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_context * ctx = nullptr;
    std::vector<input> inputs;

    ~runner() {
        ggml_backend_free(backend);
    }
    ggml_tensor * add(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void * data) {
        inputs.push_back({ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2), data});
        return inputs.back().tensor;
    }
    floats run(int n_threads, const std::function<ggml_tensor *()> & build) {
        ctx = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
        inputs.clear();
        ggml_tensor * result = build();
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, result);
        CHECK(ggml_backend_supports_op(backend, result));
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        for (const input & in : inputs) {
            ggml_backend_tensor_set(in.tensor, in.data, 0, ggml_nbytes(in.tensor));
        }
        ggml_backend_cpu_set_n_threads(backend, n_threads);
        CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
        floats out(ggml_nelements(result));
        ggml_backend_tensor_get(result, out.data(), 0, out.size() * sizeof(float));
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
        return out;
    }
    floats multiply(const weight & w, const floats & x, int64_t n_cols, int n_threads) {
        return run(n_threads, [&] {
            return ggml_mul_mat(ctx, w.tensor, add(GGML_TYPE_F32, w.tensor->ne[0], n_cols, 1, x.data()));
        });
    }
};

double rms_error(const floats & got, const weight & w, const floats & x, int64_t n_cols) {
    const int64_t n = w.tensor->ne[0], n_rows = w.tensor->ne[1];
    double sum = 0.0;
    for (int64_t c = 0; c < n_cols; ++c) {
        for (int64_t r = 0; r < n_rows; ++r) {
            double exact = 0.0;
            for (int64_t k = 0; k < n; ++k) {
                exact += (double) w.values[r * n + k] * x[c * n + k];
            }
            sum += (got[c * n_rows + r] - exact) * (got[c * n_rows + r] - exact);
        }
    }
    return std::sqrt(sum / (n_cols * n_rows));
}

bool same(const float * a, const float * b, int64_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}

void test_widths_and_threads(ggml_type type) {
    const int64_t n = 512, n_rows = 117, max_cols = 40;
    const weight w(type, n, n_rows, 1, true);
    const floats x = normal(n * max_cols, 9, 1.0f);
    runner r;
    const floats all = r.multiply(w, x, max_cols, 1);
    for (int64_t n_cols = 1; n_cols <= max_cols; ++n_cols) {
        for (const int n_threads : {1, 2, 3}) {
            CHECK(same(r.multiply(w, x, n_cols, n_threads).data(), all.data(), n_cols * n_rows));
        }
    }
}

// upstream rounds the activations as we do: the same error but for luck, hence two percent
void test_error(ggml_type type) {
    const int64_t n = 1536, n_rows = 304, n_cols = 40;
    const weight ours(type, n, n_rows, 1, true), theirs(type, n, n_rows, 1, false);
    runner r;
    for (const float scale : {1.0f, 100.0f}) {
        floats x = normal(n * n_cols, 10, scale);
        for (int64_t i = 0; i < n * n_cols; i += 311) {
            x[i] *= 20.0f; // activations have outliers
        }
        const double our_error = rms_error(r.multiply(ours, x, n_cols, 2), ours, x, n_cols);
        const double their_error = rms_error(r.multiply(theirs, x, n_cols, 2), theirs, x, n_cols);
        if (!(our_error <= 1.02 * their_error)) {
            std::fprintf(stderr, "%s: error %g, upstream's %g\n", ggml_type_name(type), our_error, their_error);
            CHECK(our_error <= 1.02 * their_error);
        }
    }
}

void test_row_ranges(ggml_type type) {
    const int64_t n = 256, n_rows = 100;
    const weight w(type, n, n_rows, 1, true);
    const floats x = normal(3 * n, 12, 1.0f);
    runner r;
    const floats all = r.multiply(w, x, 3, 1);
    for (const auto & range : std::vector<std::pair<int, int>>{{0, 40}, {16, 100}, {64, 71}}) {
        const int64_t first = range.first, count = range.second - range.first;
        const floats part = r.run(2, [&] {
            ggml_tensor * v = ggml_view_2d(r.ctx, w.tensor, n, count, w.tensor->nb[1], first * w.tensor->nb[1]);
            return ggml_mul_mat(r.ctx, v, r.add(GGML_TYPE_F32, n, 3, 1, x.data()));
        });
        for (int64_t c = 0; c < 3; ++c) {
            CHECK(same(&part[c * count], &all[c * n_rows + first], count));
        }
    }
}

void test_get_rows(ggml_type type) {
    const int64_t n = 256, n_rows = 53;
    const weight w(type, n, n_rows, 1, true);
    const int32_t ids[] = {0, 52, 17, 17, 15, 16};
    runner r;
    const floats rows =
        r.run(2, [&] { return ggml_get_rows(r.ctx, w.tensor, r.add(GGML_TYPE_I32, std::size(ids), 1, 1, ids)); });
    for (size_t i = 0; i < std::size(ids); ++i) {
        bool equal = true;
        for (int64_t k = 0; k < n; ++k) {
            equal = equal && rows[i * n + k] == w.values[ids[i] * n + k];
        }
        CHECK(equal);
    }
}

// each token's expert outputs must be those of the expert's matrix alone, whatever else the batch holds
void test_experts(ggml_type type) {
    const int64_t n = 256, n_rows = 40, n_experts = 5, n_used = 2, n_tokens = 19;
    const weight w(type, n, n_rows, n_experts, true);
    std::vector<int32_t> ids(n_used * n_tokens);
    for (int64_t t = 0; t < n_tokens; ++t) {
        ids[n_used * t] = (int32_t) (t * t % n_experts);
        ids[n_used * t + 1] = (int32_t) ((t * t + 1 + t % 3) % n_experts); // expert 4 is rare
    }
    for (const int64_t per_token : {(int64_t) 1, n_used}) { // up projections share a column, down projections do not
        const floats x = normal(n * per_token * n_tokens, 13, 1.0f);
        runner r;
        const auto run = [&](int64_t first, int64_t count, int n_threads) {
            return r.run(n_threads, [&] {
                ggml_tensor * in = r.add(GGML_TYPE_F32, n, per_token, count, &x[n * per_token * first]);
                ggml_tensor * which = r.add(GGML_TYPE_I32, n_used, count, 1, &ids[n_used * first]);
                return ggml_mul_mat_id(r.ctx, w.tensor, in, which);
            });
        };
        const floats all = run(0, n_tokens, 1);
        CHECK(run(0, n_tokens, 3) == all);
        for (int64_t t = 0; t < n_tokens; ++t) {
            const floats alone = run(t, 1, 2);
            CHECK(same(alone.data(), &all[t * n_used * n_rows], n_used * n_rows));
            for (int64_t s = 0; s < n_used; ++s) {
                const float * column = &x[(t * per_token + s % per_token) * n];
                for (int64_t i = 0; i < n_rows; ++i) {
                    const float * row = &w.values[(ids[n_used * t + s] * n_rows + i) * n];
                    double exact = 0.0;
                    for (int64_t k = 0; k < n; ++k) {
                        exact += (double) row[k] * column[k];
                    }
                    CHECK(std::fabs(alone[s * n_rows + i] - exact) <
                          0.06); // one expert's row differs from another's by 0.8
                }
            }
        }
    }
}

// what the packed layout cannot do is refused, not computed wrongly
void test_refusals() {
    const weight w(GGML_TYPE_Q4_0, 256, 64, 1, true);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_context * ctx = ggml_init({32 * ggml_tensor_overhead(), nullptr, true});
    const size_t row = w.tensor->nb[1];
    ggml_tensor * aligned = ggml_view_2d(ctx, w.tensor, 256, 16, row, 16 * row);
    ggml_tensor * between = ggml_view_2d(ctx, w.tensor, 256, 16, row, 8 * row);
    ggml_tensor * half = ggml_view_2d(ctx, w.tensor, 128, 64, row, 0);
    ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, 2);
    ggml_tensor * narrow = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 128, 2);
    ggml_tensor * x16 = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 256, 2);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_context * ops = ggml_init({32 * ggml_tensor_overhead(), nullptr, true});
    const auto takes = [&](ggml_tensor * a, ggml_tensor * b) {
        return ggml_backend_supports_op(backend, ggml_mul_mat(ops, a, b));
    };
    CHECK(takes(w.tensor, x));
    CHECK(takes(aligned, x));
    CHECK(!takes(between, x));
    CHECK(!takes(half, narrow));
    CHECK(!takes(w.tensor, x16));
    ggml_free(ops);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
}

} // namespace

int main() {
    CHECK(std::string(pyssd_kernels_isa()).size() > 3);
    for (const ggml_type type : TYPES) {
        test_widths_and_threads(type);
        test_error(type);
        test_row_ranges(type);
        test_get_rows(type);
        test_experts(type);
    }
    test_refusals();
    return failures();
}
