#pragma once

// Packed weight layouts: tiles of 16 rows, the rows interleaved by four bytes, so that one vector instruction multiplies four
// consecutive weights of 16 rows with the same four activations. A tile is read from memory once, for up to 16 columns.
//
// A "group" is 16 rows x 4 weights = 64 bytes once unpacked: byte 4*r + i belongs to row r, weight i. 4-bit layouts keep two
// groups in one 64-byte vector (low and high nibbles). Weights are stored unsigned; `bias` is what was added to make them so.

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace pyssd {

constexpr int tile_rows = 16;

// K-quants: 256 weights a row, sub-blocks with integer scales

struct tile_q4_K {
    static constexpr int n_weights = 256, sub_size = 32, bias = 0;
    static constexpr bool has_mins = true;
    uint16_t d[16], dmin[16];
    uint8_t scales[8][16];
    uint8_t mins[4][32]; // of sub-blocks 2p and 2p + 1 side by side: byte 2*r + s%2
    uint8_t q[8][4][64]; // two groups a vector
};

struct tile_q5_K {
    static constexpr int n_weights = 256, sub_size = 32, bias = 0;
    static constexpr bool has_mins = true;
    uint16_t d[16], dmin[16];
    uint8_t scales[8][16];
    uint8_t mins[4][32]; // of sub-blocks 2p and 2p + 1 side by side: byte 2*r + s%2
    uint8_t q[8][4][64];
    uint8_t high[8][64]; // bit g of a byte: fifth bit of that byte in group g
};

struct tile_q6_K {
    static constexpr int n_weights = 256, sub_size = 16, bias = 32;
    static constexpr bool has_mins = false;
    uint16_t d[16];
    int8_t scales[16][16];
    uint8_t q[16][2][64];
    uint8_t high[16][64]; // bits 2g, 2g + 1 of a byte: upper bits of that byte in group g
};

// one scale for 32 weights

struct tile_q8_0 {
    static constexpr int n_weights = 32, bias = 0;
    static constexpr bool has_mins = false;
    uint16_t d[16];
    int8_t q[8][64]; // one group a vector
};

struct tile_q4_0 {
    static constexpr int n_weights = 32, bias = 8;
    static constexpr bool has_mins = false;
    uint16_t d[16];
    uint8_t q[4][64];
};

struct tile_q4_1 {
    static constexpr int n_weights = 32, bias = 0;
    static constexpr bool has_mins = true;
    uint16_t d[16], m[16];
    uint8_t q[4][64];
};

struct tile_q5_0 {
    static constexpr int n_weights = 32, bias = 16;
    static constexpr bool has_mins = false;
    uint16_t d[16];
    uint8_t q[4][64];
    uint8_t high[64];
};

struct tile_iq4_nl {
    static constexpr int n_weights = 32, bias = 0;
    static constexpr bool has_mins = false;
    uint16_t d[16];
    uint8_t q[4][64]; // indices into the table of values
};

// floats: two weights of 16 rows after one another
struct tile_f32 {
    static constexpr int n_weights = 1;
    float v[16];
};

struct tile_16bit { // F16 or BF16
    static constexpr int n_weights = 1;
    uint16_t v[16];
};

// bytes of one tile block and weights per row in it; 0 if there is no packed layout for the type
size_t tile_block_size(ggml_type type);
int tile_block_weights(ggml_type type);

// bytes of a packed matrix of n_rows x n_cols (rows padded to a multiple of 16)
size_t packed_size(ggml_type type, int64_t n_cols, int64_t n_rows);

// pack rows [first, first + n) of a plain matrix, first a multiple of 16; missing rows of the last tile become zero
void pack_rows(ggml_type type, void * dst, const void * src, int64_t n_cols, int64_t n_rows, int64_t first, int64_t n);

// one row of a packed matrix as floats, the values that ggml's to_float gives for the plain row
void unpack_row(ggml_type type, const void * packed, int64_t n_cols, int64_t row, float * dst);

} // namespace pyssd
