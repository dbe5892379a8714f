#include "rows.h"

#include "pyssd-rows.h"

#include "ops.h"

#include <algorithm>

namespace pyssd {

namespace {

constexpr uint16_t minus_infinity = 0xfc00; // F16
constexpr int64_t padding = 256;            // of the cells that a pass looks at, as llama.cpp's KV cache pads them

// cells up to the last one that a row sees, padded
int64_t n_seen(const ggml_tensor * mask, int64_t row) {
    const auto * values = (const uint16_t *) ((const char *) mask->data + row * mask->nb[1]);
    int64_t n = mask->ne[0];
    while (n > 0 && values[n - 1] == minus_infinity) {
        n--;
    }
    return std::min(mask->ne[0], (n + padding - 1) / padding * padding);
}

// the cells that a pass of this row alone would look at: without those of the rows behind it, where they are the last ones
// (in the cache of a sliding window that has wrapped around they are not, and what is masked at its end is old)
int64_t n_cells(const ggml_tensor * mask, int64_t row) {
    return n_seen(mask, mask->ne[1] - 1) == mask->ne[0] ? n_seen(mask, row) : mask->ne[0];
}

} // namespace

bool attention_is_by_row(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * mask = op->src[3];
    return pyssd_rows_single(op) && q->ne[1] > 1 && q->ne[3] == 1 && mask && mask->type == GGML_TYPE_F16 &&
           mask->ne[2] == 1 && mask->ne[3] == 1;
}

// upstream splits the KV range of a single row over the threads, from 512 padded cells on: so do these, row after row
void attention_by_row(const ggml_compute_params * params, ggml_tensor * op) {
    const int64_t n_rows = op->src[0]->ne[1];
    for (int64_t row = 0; row < n_rows; row++) {
        ggml_tensor q = *op->src[0];
        ggml_tensor k = *op->src[1];
        ggml_tensor v = *op->src[2];
        ggml_tensor mask = *op->src[3];
        ggml_tensor result = *op;
        k.ne[1] = v.ne[1] = mask.ne[0] = n_cells(op->src[3], row);
        q.ne[1] = mask.ne[1] = result.ne[2] = 1;
        q.data = (char *) q.data + row * q.nb[1];
        mask.data = (char *) mask.data + row * mask.nb[1];
        result.data = (char *) result.data + row * result.nb[2];
        result.src[0] = &q;
        result.src[1] = &k;
        result.src[2] = &v;
        result.src[3] = &mask;
        ggml_compute_forward_flash_attn_ext(params, &result);
        ggml_barrier(params->threadpool); // the next row uses the same scratch
    }
}

} // namespace pyssd
