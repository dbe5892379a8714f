#include "attention.h"

#include "attention_problem.h"
#include "pyssd-mark.h"

#include "ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pyssd {

namespace {

template <class V>
void load_keys(const problem & a, const char * k, scratch & s, int64_t n) {
    for (int64_t d = 0; d < a.d_k; d += 16) {
        for (int c = 0; c < chunk; c += 16) {
            typename V::f32 r[16];
            for (int i = 0; i < 16; ++i) {
                r[i] = c + i < n ? V::load_f16((const uint16_t *) (k + (c + i) * a.k->nb[1]) + d) : V::zerof();
            }
            V::transpose(r);
            for (int i = 0; i < 16; ++i) {
                V::store(s.keys + (d + i) * chunk + c, r[i]);
            }
        }
    }
}

template <class V>
void load_values(const problem & a, const char * v, scratch & s, int64_t n) {
    for (int c = 0; c < chunk; ++c) {
        for (int64_t d = 0; d < a.d_v; d += 16) {
            V::store(s.values + c * a.d_v + d,
                     c < n ? V::load_f16((const uint16_t *) (v + c * a.v->nb[1]) + d) : V::zerof());
        }
    }
}

// scores of M queries against the chunk; a score is one chain of multiply-adds over d
template <class V, int M>
void score(const problem & a, const scratch & s, int first) {
    typename V::f32 acc[M][width];
    for (int j = 0; j < M; ++j) {
        for (int i = 0; i < width; ++i) {
            acc[j][i] = V::zerof();
        }
    }
    for (int64_t d = 0; d < a.d_k; ++d) {
        typename V::f32 key[width];
        for (int i = 0; i < width; ++i) {
            key[i] = V::load_f32(s.keys + d * chunk + 16 * i);
            V::keep(key[i]);
        }
        for (int j = 0; j < M; ++j) {
            const auto x = V::set1f(s.q[(first + j) * a.d_k + d]);
            for (int i = 0; i < width; ++i) {
                acc[j][i] = V::fma(x, key[i], acc[j][i]);
            }
        }
    }
    for (int j = 0; j < M; ++j) {
        for (int i = 0; i < width; ++i) {
            V::store(s.p + (first + j) * chunk + 16 * i, acc[j][i]);
        }
    }
}

// acc of M queries += weights * values, cell after cell, for n vectors of the output from d on
template <class V, int M, int n>
void gather(const problem & a, const scratch & s, int first, int64_t d) {
    typename V::f32 acc[M][n];
    for (int j = 0; j < M; ++j) {
        for (int i = 0; i < n; ++i) {
            acc[j][i] = V::load_f32(s.acc + (first + j) * a.d_v + d + 16 * i);
        }
    }
    for (int c = 0; c < chunk; ++c) {
        typename V::f32 value[n];
        for (int i = 0; i < n; ++i) {
            value[i] = V::load_f32(s.values + c * a.d_v + d + 16 * i);
            V::keep(value[i]);
        }
        for (int j = 0; j < M; ++j) {
            const auto x = V::set1f(s.p[(first + j) * chunk + c]);
            for (int i = 0; i < n; ++i) {
                acc[j][i] = V::fma(x, value[i], acc[j][i]);
            }
        }
    }
    for (int j = 0; j < M; ++j) {
        for (int i = 0; i < n; ++i) {
            V::store(s.acc + (first + j) * a.d_v + d + 16 * i, acc[j][i]);
        }
    }
}

template <class V, int M>
void gather_all(const problem & a, const scratch & s, int first) {
    int64_t d = 0;
    for (; d + 16 * width <= a.d_v; d += 16 * width) {
        gather<V, M, width>(a, s, first, d);
    }
    for (; d < a.d_v; d += 16) {
        gather<V, M, 1>(a, s, first, d);
    }
}

template <class V>
void in_fours(int n, const problem & a, const scratch & s, bool scores) {
    for (int j = 0; j < n; j += width) {
        switch (std::min(width, n - j)) {
        case 1:
            scores ? score<V, 1>(a, s, j) : gather_all<V, 1>(a, s, j);
            break;
        case 2:
            scores ? score<V, 2>(a, s, j) : gather_all<V, 2>(a, s, j);
            break;
        case 3:
            scores ? score<V, 3>(a, s, j) : gather_all<V, 3>(a, s, j);
            break;
        default:
            scores ? score<V, 4>(a, s, j) : gather_all<V, 4>(a, s, j);
        }
    }
}

// turn the scores of query j into weights relative to the running maximum; rescales what was gathered before
template <class V>
void softmax_step(const problem & a, scratch & s, int j, int64_t cell, int64_t n) {
    float * p = s.p + j * chunk;
    if (a.softcap != 0.0f) {
        for (int c = 0; c < chunk; ++c) {
            p[c] = a.softcap * std::tanh(p[c]);
        }
    }
    const uint16_t * mask = s.masks[j] ? s.masks[j] + cell : nullptr;
    alignas(64) uint16_t edge[chunk];
    if (n < chunk) { // beyond the last cell there is nothing to see
        for (int c = 0; c < chunk; ++c) {
            edge[c] = c >= n ? minus_infinity : mask ? mask[c] : 0;
        }
        mask = edge;
    }
    typename V::f32 x[width];
    auto top = V::set1f(-INFINITY);
    for (int i = 0; i < width; ++i) {
        x[i] = V::load_f32(p + 16 * i);
        if (mask) {
            x[i] = V::fma(V::load_f16(mask + 16 * i), V::set1f(s.slope[j]), x[i]);
        }
        top = V::max(top, x[i]);
    }
    const float max = std::max(s.max[j], V::max_of(top));
    if (max == -INFINITY) { // this row sees no cell yet
        std::fill(p, p + chunk, 0.0f);
        return;
    }
    if (max > s.max[j]) {
        const float shrink = s.max[j] == -INFINITY ? 0.0f : std::exp(s.max[j] - max);
        const auto f = V::set1f(shrink);
        for (int64_t d = 0; d < a.d_v; d += 16) {
            V::store(s.acc + j * a.d_v + d, V::mul(V::load_f32(s.acc + j * a.d_v + d), f));
        }
        s.sum[j] *= shrink;
        s.max[j] = max;
    }
    auto sum = V::zerof();
    for (int i = 0; i < width; ++i) {
        x[i] = V::exp(V::add(x[i], V::set1f(-max)));
        sum = V::add(sum, x[i]);
        V::store(p + 16 * i, x[i]);
    }
    s.sum[j] += V::sum_of(sum);
}

bool any_visible(const scratch & s, int n_queries, int64_t cell, int64_t n) {
    for (int j = 0; j < n_queries; ++j) {
        if (!s.masks[j]) {
            return true;
        }
        for (int64_t c = 0; c < n; ++c) {
            if (s.masks[j][cell + c] != minus_infinity) {
                return true;
            }
        }
    }
    return false;
}

// queries [first, first + n) of a KV head: query i is row i/per_kv, head kv*per_kv + i%per_kv
template <class V>
void attend(const problem & a, scratch & s, int64_t stream, int64_t kv, int64_t first, int n) {
    for (int j = 0; j < n; ++j) {
        const int64_t row = (first + j) / a.per_kv;
        const int64_t head = kv * a.per_kv + (first + j) % a.per_kv;
        const float * q =
            (const float *) ((const char *) a.q->data + row * a.q->nb[1] + head * a.q->nb[2] + stream * a.q->nb[3]);
        for (int64_t d = 0; d < a.d_k; ++d) {
            s.q[j * a.d_k + d] = q[d] * a.scale;
        }
        std::fill(s.acc + j * a.d_v, s.acc + (j + 1) * a.d_v, 0.0f);
        s.max[j] = -INFINITY;
        s.sum[j] = 0.0f;
        s.slope[j] = a.slope(head);
        s.masks[j] = a.mask_row(row, stream);
    }
    const char * k = (const char *) a.k->data + kv * a.k->nb[2] + stream * a.k->nb[3];
    const char * v = (const char *) a.v->data + kv * a.v->nb[2] + stream * a.v->nb[3];
    for (int64_t cell = 0; cell < a.n_kv; cell += chunk) {
        const int64_t n_cells = std::min<int64_t>(chunk, a.n_kv - cell);
        if (!any_visible(s, n, cell, n_cells)) {
            continue; // adds exactly nothing
        }
        load_keys<V>(a, k + cell * a.k->nb[1], s, n_cells);
        in_fours<V>(n, a, s, true);
        for (int j = 0; j < n; ++j) {
            softmax_step<V>(a, s, j, cell, n_cells);
        }
        load_values<V>(a, v + cell * a.v->nb[1], s, n_cells);
        in_fours<V>(n, a, s, false);
    }
    for (int j = 0; j < n; ++j) {
        const int64_t row = (first + j) / a.per_kv;
        const int64_t head = kv * a.per_kv + (first + j) % a.per_kv;
        float sum = s.sum[j];
        float scale = 1.0f;
        if (a.sinks) {
            const float sink = ((const float *) a.sinks->data)[head];
            const float max = std::max(sink, s.max[j]);
            scale = s.max[j] == -INFINITY ? 0.0f : std::exp(s.max[j] - max);
            sum = sum * scale + std::exp(sink - max);
        }
        const float factor = sum > 0.0f ? scale / sum : 0.0f;
        float * out =
            (float *) ((char *) a.dst->data + head * a.dst->nb[1] + row * a.dst->nb[2] + stream * a.dst->nb[3]);
        for (int64_t d = 0; d < a.d_v; ++d) {
            out[d] = s.acc[j * a.d_v + d] * factor;
        }
    }
}

} // namespace

bool attention_is_marked(const ggml_tensor * op) {
    return op->op_params[attention_mark_slot] == attention_mark;
}

size_t attention_work_size(int n_threads, const ggml_tensor * op) {
    const problem a(const_cast<ggml_tensor *>(op));
    // upstream's reference needs a row of K and two of V per thread; padded as it pads
    const size_t reference = sizeof(float) * (a.d_k + 2 * a.d_v + 64);
    return n_threads * (std::max(sizeof(float) * scratch::n_floats(a), reference) + 64);
}

void attention(const ggml_compute_params * params, ggml_tensor * op) {
    const problem a(op);
    if (!a.is_plain()) {
        ggml_compute_params reference = *params;
        reference.use_ref = true;
        ggml_compute_forward_flash_attn_ext(&reference, op);
        return;
    }
    const int64_t n_streams = a.q->ne[3];
    const int64_t n_queries = a.n_rows * a.per_kv;
    // enough parts for all threads; how the queries are dealt out changes no result
    const int64_t n_parts =
        std::max<int64_t>((n_queries + max_group - 1) / max_group,
                          std::min<int64_t>(n_queries, (params->nth + a.k->ne[2] - 1) / a.k->ne[2]));
    const int64_t n_units = n_streams * a.k->ne[2] * n_parts;

    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, 0);
    }
    ggml_barrier(params->threadpool);

    float * mine =
        (float *) ((char *) params->wdata + params->ith * (sizeof(float) * scratch::n_floats(a) / 64 * 64 + 64));
    scratch s(a, mine);
    for (int64_t u = ggml_threadpool_chunk_add(params->threadpool, 1); u < n_units;
         u = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t part = u % n_parts;
        const int64_t kv = u / n_parts % a.k->ne[2];
        const int64_t first = n_queries * part / n_parts;
        attend<isa_native>(a, s, u / n_parts / a.k->ne[2], kv, first, (int) (n_queries * (part + 1) / n_parts - first));
    }
}

} // namespace pyssd
