#include "matmul.h"

#include "gemm.h"

#include <algorithm>
#include <cstring>

namespace pyssd {

namespace {

constexpr size_t l2_bytes = 256 * 1024; // weights or columns to keep near while the others stream

// the packed matrix behind src0, which may be a view of some of its rows
struct matrix {
    ggml_type type;
    int64_t n; // weights per row
    int64_t n_rows;
    size_t tile_bytes; // of 16 rows
    const char * tiles;

    explicit matrix(const ggml_tensor * t) {
        const ggml_tensor * root = t->view_src ? t->view_src : t;
        // supports_op saw to it where it could: a view may have had no buffer yet
        GGML_ASSERT(!t->view_src || t->view_offs % (root->nb[1] * tile_rows) == 0);
        type = t->type;
        n = t->ne[0];
        n_rows = t->ne[1];
        tile_bytes = packed_size(type, n, tile_rows);
        tiles = (const char *) root->data + (t->view_src ? t->view_offs / root->nb[1] / tile_rows * tile_bytes : 0);
    }

    int64_t n_tiles() const {
        return (n_rows + tile_rows - 1) / tile_rows;
    }
};

// n_cols columns times one tile, in groups of nearly equal width; scatter gives the address of a column's output
template <typename out_fn>
void multiply_tile(const matrix & w, const char * tile, int64_t row, const void * const * cols, int64_t n_cols,
                   out_fn out) {
    const int64_t n_groups = (n_cols + max_cols - 1) / max_cols;
    const int64_t n_valid = std::min<int64_t>(tile_rows, w.n_rows - row);
    float edge[max_cols][tile_rows];
    for (int64_t g = 0, c = 0; g < n_groups; ++g) {
        const int m = (int) ((n_cols - c + n_groups - g - 1) / (n_groups - g));
        float * dst[max_cols];
        for (int j = 0; j < m; ++j) {
            dst[j] = n_valid == tile_rows ? out(c + j) + row : edge[j];
        }
        gemm_for(w.type, m)(tile, w.n, cols + c, dst);
        for (int j = 0; n_valid < tile_rows && j < m; ++j) {
            memcpy(out(c + j) + row, edge[j], n_valid * sizeof(float));
        }
        c += m;
    }
}

const float * column(const ggml_tensor * t, int64_t i) {
    const int64_t i1 = i % t->ne[1];
    const int64_t i2 = i / t->ne[1] % t->ne[2];
    const int64_t i3 = i / t->ne[1] / t->ne[2];
    return (const float *) ((const char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

// quantise all columns of src1, blocks dealt out evenly: a single column is shared by the threads too
void quantize_columns(const ggml_compute_params * params, const matrix & w, const ggml_tensor * src1, char * acts) {
    const size_t bytes = act_size(w.type, w.n);
    const int64_t weights = tile_block_weights(w.type);
    const int64_t n_blocks = w.n / weights;
    const int64_t total = n_blocks * ggml_nrows(src1);
    int64_t i = total * params->ith / params->nth;
    const int64_t end = total * (params->ith + 1) / params->nth;
    while (i < end) {
        const int64_t c = i / n_blocks;
        const int64_t b = i % n_blocks;
        const int64_t k = std::min(n_blocks - b, end - i);
        act_quantize(w.type, column(src1, c) + b * weights, k * weights, acts + c * bytes + b * (bytes / n_blocks));
        i += k;
    }
}

size_t aligned(size_t size) {
    return (size + 63) / 64 * 64;
}

} // namespace

size_t mul_mat_work_size(const ggml_tensor * op) {
    const ggml_tensor * src1 = op->src[1];
    return aligned(act_size(op->src[0]->type, op->src[0]->ne[0]) * ggml_nrows(src1)) +
           aligned(ggml_nrows(src1) * sizeof(void *));
}

void mul_mat(const ggml_compute_params * params, ggml_tensor * op) {
    const matrix w(op->src[0]);
    const int64_t n_cols = ggml_nrows(op->src[1]);
    const size_t bytes = act_size(w.type, w.n);

    char * acts = (char *) params->wdata;
    const void ** cols = (const void **) (acts + aligned(bytes * n_cols));

    if (params->ith == 0) {
        for (int64_t c = 0; c < n_cols; ++c) {
            cols[c] = bytes ? acts + c * bytes : (const char *) column(op->src[1], c);
        }
        ggml_threadpool_chunk_set(params->threadpool, 0);
    }
    if (bytes) {
        quantize_columns(params, w, op->src[1], acts);
    }
    ggml_barrier(params->threadpool);

    // a chunk of tiles stays in L2 while blocks of columns pass by; a chunk is also what threads take next
    const int64_t n_tiles = w.n_tiles();
    const int64_t by_cache = std::max<int64_t>(1, l2_bytes / w.tile_bytes);
    const int64_t by_thread = std::max<int64_t>(1, n_tiles / (8 * params->nth));
    const int64_t per_chunk = std::min(by_cache, by_thread);
    const int64_t n_chunks = (n_tiles + per_chunk - 1) / per_chunk;
    const size_t col_bytes = bytes ? bytes : w.n * sizeof(float);
    const int64_t per_block = std::max<int64_t>(max_cols, l2_bytes / col_bytes / max_cols * max_cols);

    for (int64_t chunk = ggml_threadpool_chunk_add(params->threadpool, 1); chunk < n_chunks;
         chunk = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t last = std::min(n_tiles, (chunk + 1) * per_chunk);
        for (int64_t c = 0; c < n_cols; c += per_block) {
            const int64_t m = std::min(per_block, n_cols - c);
            for (int64_t t = chunk * per_chunk; t < last; ++t) {
                multiply_tile(w, w.tiles + t * w.tile_bytes, t * tile_rows, cols + c, m,
                              [&](int64_t j) { return (float *) ((char *) op->data + (c + j) * op->nb[1]); });
            }
        }
    }
}

// mixture of experts: op->src[2] names the experts of every token

namespace {

struct routed {
    int32_t slot, token;
};

struct id_work {
    char * acts;
    const void ** cols; // [n_ids] sorted by expert
    routed * rows;      // [n_ids] where the outputs go
    int64_t * starts;   // [n_expert + 1]
};

id_work id_layout(const ggml_tensor * op, void * wdata, size_t & size) {
    const int64_t n_ids = op->src[2]->ne[0] * op->src[2]->ne[1];
    const int64_t n_expert = op->src[0]->ne[2];
    char * p = (char *) wdata;
    id_work out;
    const auto take = [&](size_t bytes) {
        char * at = p;
        p += aligned(bytes);
        return at;
    };
    out.acts = take(act_size(op->src[0]->type, op->src[0]->ne[0]) * ggml_nrows(op->src[1]));
    out.cols = (const void **) take(n_ids * sizeof(void *));
    out.rows = (routed *) take(n_ids * sizeof(routed));
    out.starts = (int64_t *) take((n_expert + 1) * sizeof(int64_t));
    size = p - (char *) wdata;
    return out;
}

void sort_by_expert(const ggml_tensor * op, size_t bytes, const id_work & work) {
    const ggml_tensor * ids = op->src[2];
    const ggml_tensor * src1 = op->src[1];
    const int64_t n_expert = op->src[0]->ne[2];
    const auto expert_of = [&](int64_t s, int64_t t) {
        return *(const int32_t *) ((const char *) ids->data + s * ids->nb[0] + t * ids->nb[1]);
    };
    std::fill(work.starts, work.starts + n_expert + 1, 0);
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        for (int64_t s = 0; s < ids->ne[0]; ++s) {
            work.starts[expert_of(s, t) + 1]++;
        }
    }
    for (int64_t e = 0; e < n_expert; ++e) {
        work.starts[e + 1] += work.starts[e];
    }
    // fill backwards from the ends of the ranges, which leaves the starts in place
    for (int64_t t = ids->ne[1] - 1; t >= 0; --t) {
        for (int64_t s = ids->ne[0] - 1; s >= 0; --s) {
            const int64_t at = --work.starts[expert_of(s, t) + 1];
            const int64_t col = t * src1->ne[1] + s % src1->ne[1];
            work.rows[at] = {(int32_t) s, (int32_t) t};
            work.cols[at] = bytes ? work.acts + col * bytes : (const char *) column(src1, col);
        }
    }
    // starts[e + 1] now holds the start of expert e
    for (int64_t e = 0; e < n_expert; ++e) {
        work.starts[e] = work.starts[e + 1];
    }
    work.starts[n_expert] = ids->ne[0] * ids->ne[1];
}

} // namespace

size_t mul_mat_id_work_size(const ggml_tensor * op) {
    size_t size = 0;
    id_layout(op, nullptr, size);
    return size;
}

void mul_mat_id(const ggml_compute_params * params, ggml_tensor * op) {
    const matrix w(op->src[0]);
    const int64_t n_expert = op->src[0]->ne[2];
    const size_t bytes = act_size(w.type, w.n);
    size_t size = 0;
    const id_work work = id_layout(op, params->wdata, size);

    if (bytes) {
        quantize_columns(params, w, op->src[1], work.acts);
    }
    if (params->ith == 0) {
        sort_by_expert(op, bytes, work);
        ggml_threadpool_chunk_set(params->threadpool, 0);
    }
    ggml_barrier(params->threadpool);

    const int64_t per_chunk =
        std::max<int64_t>(1, std::min<int64_t>(l2_bytes / w.tile_bytes, w.n_tiles() / (2 * params->nth)));
    const int64_t n_chunks = (w.n_tiles() + per_chunk - 1) / per_chunk;

    int64_t next = ggml_threadpool_chunk_add(params->threadpool, 1);
    int64_t seen = 0; // chunks of the experts before this one that some token uses
    for (int64_t e = 0; e < n_expert; ++e) {
        const int64_t first = work.starts[e];
        const int64_t n_cols = work.starts[e + 1] - first;
        if (n_cols == 0) {
            continue;
        }
        const char * tiles = w.tiles + e * w.n_tiles() * w.tile_bytes;
        for (; next < seen + n_chunks; next = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t chunk = next - seen;
            for (int64_t t = chunk * per_chunk; t < std::min(w.n_tiles(), (chunk + 1) * per_chunk); ++t) {
                multiply_tile(w, tiles + t * w.tile_bytes, t * tile_rows, work.cols + first, n_cols, [&](int64_t j) {
                    const routed at = work.rows[first + j];
                    return (float *) ((char *) op->data + at.slot * op->nb[1] + at.token * op->nb[2]);
                });
            }
        }
        seen += n_chunks;
    }
}

void get_rows(const ggml_compute_params * params, ggml_tensor * op) {
    const matrix w(op->src[0]);
    const ggml_tensor * ids = op->src[1];
    const int64_t n = ggml_nelements(ids);
    for (int64_t i = n * params->ith / params->nth; i < n * (params->ith + 1) / params->nth; ++i) {
        const int64_t i0 = i % ids->ne[0];
        const int64_t i1 = i / ids->ne[0] % ids->ne[1];
        const int64_t i2 = i / ids->ne[0] / ids->ne[1];
        const int32_t row =
            *(const int32_t *) ((const char *) ids->data + i0 * ids->nb[0] + i1 * ids->nb[1] + i2 * ids->nb[2]);
        GGML_ASSERT(row >= 0 && row < w.n_rows);
        unpack_row(w.type, w.tiles, w.n, row,
                   (float *) ((char *) op->data + i0 * op->nb[1] + i1 * op->nb[2] + i2 * op->nb[3]));
    }
}

} // namespace pyssd
