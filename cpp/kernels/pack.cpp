#include "pack.h"

#include "pack_blocks.h"

#include <algorithm>

namespace pyssd {

namespace {

const uint8_t * weights(const row_block & b) {
    return (const uint8_t *) b.w;
}

// what one row of a tile block stands for, with the arithmetic of ggml's dequantisation: embeddings keep their bits

template <typename tile>
void to_float_k(const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    const float m = ggml_fp16_to_fp32(b.m);
    for (int s = 0; s < 8; ++s) {
        const float scale = d * b.scales[s];
        const float min = m * b.mins[s];
        for (int k = 32 * s; k < 32 * s + 32; ++k) {
            y[k] = scale * weights(b)[k] - min;
        }
    }
}

void to_float(const tile_q4_K *, const row_block & b, float * y) {
    to_float_k<tile_q4_K>(b, y);
}

void to_float(const tile_q5_K *, const row_block & b, float * y) {
    to_float_k<tile_q5_K>(b, y);
}

void to_float(const tile_q6_K *, const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    for (int s = 0; s < 16; ++s) {
        const float scale = d * (int8_t) b.scales[s];
        for (int k = 16 * s; k < 16 * s + 16; ++k) {
            y[k] = scale * (weights(b)[k] - tile_q6_K::bias);
        }
    }
}

void to_float(const tile_q8_0 *, const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    for (int k = 0; k < 32; ++k) {
        y[k] = ((const int8_t *) b.w)[k] * d;
    }
}

void to_float(const tile_q4_1 *, const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    const float m = ggml_fp16_to_fp32(b.m);
    for (int k = 0; k < 32; ++k) {
        y[k] = weights(b)[k] * d + m;
    }
}

void to_float(const tile_iq4_nl *, const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    for (int k = 0; k < 32; ++k) {
        y[k] = d * kvalues_iq4nl[weights(b)[k]];
    }
}

template <typename tile> // Q4_0, Q5_0
void to_float(const tile *, const row_block & b, float * y) {
    const float d = ggml_fp16_to_fp32(b.d);
    for (int k = 0; k < 32; ++k) {
        y[k] = (weights(b)[k] - tile::bias) * d;
    }
}

template <typename tile, typename block>
void pack_tiles(void * dst, const void * src, int64_t n_cols, int64_t n_rows, int64_t first, int64_t n) {
    const int64_t n_blocks = n_cols / tile::n_weights;
    tile * out = (tile *) dst + first / tile_rows * n_blocks;
    for (int64_t row = first; row < first + n; row += tile_rows) {
        const block * in = (const block *) src + row * n_blocks;
        const int n_valid = (int) std::min<int64_t>(tile_rows, n_rows - row);
        for (int64_t i = 0; i < n_blocks; ++i, ++in, ++out) {
            if (n_valid < tile_rows) {
                memset((void *) out, 0, sizeof(tile));
            }
            for (int r = 0; r < n_valid; ++r) {
                row_block b;
                read(in[r * n_blocks], b);
                put(*out, r, b);
            }
        }
    }
}

template <typename tile>
void unpack_tiles(const void * packed, int64_t n_cols, int64_t row, float * dst) {
    const int64_t n_blocks = n_cols / tile::n_weights;
    const tile * t = (const tile *) packed + row / tile_rows * n_blocks;
    for (int64_t i = 0; i < n_blocks; ++i) {
        row_block b;
        get(t[i], (int) (row % tile_rows), b);
        to_float(t, b, dst + i * tile::n_weights);
    }
}

// floats keep their bits: a plain transpose of 16 rows
template <typename T>
void pack_plain(void * packed, const void * plain, int64_t n_cols, int64_t n_rows, int64_t first, int64_t n) {
    for (int64_t row = first; row < first + n; row += tile_rows) {
        T * dst = (T *) packed + row * n_cols;
        const T * src = (const T *) plain + row * n_cols;
        if (n_rows - row < tile_rows) {
            for (int64_t i = 0; i < n_cols * tile_rows; ++i) {
                const int64_t r = i % tile_rows;
                dst[i] = row + r < n_rows ? src[r * n_cols + i / tile_rows] : T(0);
            }
            continue;
        }
        for (int64_t k = 0; k < n_cols; ++k) {
            for (int64_t r = 0; r < tile_rows; ++r) {
                dst[k * tile_rows + r] = src[r * n_cols + k];
            }
        }
    }
}

} // namespace

size_t tile_block_size(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q4_K:
        return sizeof(tile_q4_K);
    case GGML_TYPE_Q5_K:
        return sizeof(tile_q5_K);
    case GGML_TYPE_Q6_K:
        return sizeof(tile_q6_K);
    case GGML_TYPE_Q8_0:
        return sizeof(tile_q8_0);
    case GGML_TYPE_Q4_0:
        return sizeof(tile_q4_0);
    case GGML_TYPE_Q4_1:
        return sizeof(tile_q4_1);
    case GGML_TYPE_Q5_0:
        return sizeof(tile_q5_0);
    case GGML_TYPE_IQ4_NL:
        return sizeof(tile_iq4_nl);
    case GGML_TYPE_F32:
        return sizeof(tile_f32);
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
        return sizeof(tile_16bit);
    default:
        return 0;
    }
}

int tile_block_weights(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
        return 1;
    default:
        return tile_block_size(type) ? (int) ggml_blck_size(type) : 0;
    }
}

size_t packed_size(ggml_type type, int64_t n_cols, int64_t n_rows) {
    const int64_t n_tiles = (n_rows + tile_rows - 1) / tile_rows;
    return n_tiles * (n_cols / tile_block_weights(type)) * tile_block_size(type);
}

void pack_rows(ggml_type type, void * dst, const void * src, int64_t n_cols, int64_t n_rows, int64_t first, int64_t n) {
    switch (type) {
    case GGML_TYPE_Q4_K:
        return pack_tiles<tile_q4_K, block_q4_K>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q5_K:
        return pack_tiles<tile_q5_K, block_q5_K>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q6_K:
        return pack_tiles<tile_q6_K, block_q6_K>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q8_0:
        return pack_tiles<tile_q8_0, block_q8_0>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q4_0:
        return pack_tiles<tile_q4_0, block_q4_0>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q4_1:
        return pack_tiles<tile_q4_1, block_q4_1>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_Q5_0:
        return pack_tiles<tile_q5_0, block_q5_0>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_IQ4_NL:
        return pack_tiles<tile_iq4_nl, block_iq4_nl>(dst, src, n_cols, n_rows, first, n);
    case GGML_TYPE_F32:
        return pack_plain<uint32_t>(dst, src, n_cols, n_rows, first, n);
    default:
        return pack_plain<uint16_t>(dst, src, n_cols, n_rows, first, n);
    }
}

void unpack_row(ggml_type type, const void * packed, int64_t n_cols, int64_t row, float * dst) {
    const int64_t at = row / tile_rows * tile_rows * n_cols + row % tile_rows;
    const float * f32 = (const float *) packed + at;
    const uint16_t * u16 = (const uint16_t *) packed + at;
    switch (type) {
    case GGML_TYPE_Q4_K:
        return unpack_tiles<tile_q4_K>(packed, n_cols, row, dst);
    case GGML_TYPE_Q5_K:
        return unpack_tiles<tile_q5_K>(packed, n_cols, row, dst);
    case GGML_TYPE_Q6_K:
        return unpack_tiles<tile_q6_K>(packed, n_cols, row, dst);
    case GGML_TYPE_Q8_0:
        return unpack_tiles<tile_q8_0>(packed, n_cols, row, dst);
    case GGML_TYPE_Q4_0:
        return unpack_tiles<tile_q4_0>(packed, n_cols, row, dst);
    case GGML_TYPE_Q4_1:
        return unpack_tiles<tile_q4_1>(packed, n_cols, row, dst);
    case GGML_TYPE_Q5_0:
        return unpack_tiles<tile_q5_0>(packed, n_cols, row, dst);
    case GGML_TYPE_IQ4_NL:
        return unpack_tiles<tile_iq4_nl>(packed, n_cols, row, dst);
    case GGML_TYPE_F32:
        for (int64_t k = 0; k < n_cols; ++k) {
            dst[k] = f32[k * tile_rows];
        }
        break;
    case GGML_TYPE_F16:
        for (int64_t k = 0; k < n_cols; ++k) {
            dst[k] = ggml_fp16_to_fp32(u16[k * tile_rows]);
        }
        break;
    default:
        for (int64_t k = 0; k < n_cols; ++k) {
            dst[k] = ggml_bf16_to_fp32({u16[k * tile_rows]});
        }
    }
}

} // namespace pyssd
