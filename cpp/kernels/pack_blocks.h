#pragma once

// One row of a block in a common form, and how it is read from ggml's blocks, put into a tile and taken out again. Weights move
// as words of four, one byte each: cheap enough for a model to load at nearly the speed of memory.

#include "pack.h"

#define GGML_COMMON_DECL_C
#define GGML_COMMON_IMPL_C
#include "ggml-common.h"

#include <cstring>

namespace pyssd {

struct row_block {
    uint16_t d;
    uint16_t m = 0;
    uint8_t scales[16];
    uint8_t mins[8];
    uint32_t w[64]; // a byte per weight: unsigned, signed for Q8_0
};

// four weights, the first in the lowest byte
inline uint32_t load_word(const void * p) {
    uint32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

inline void store_word(void * p, uint32_t x) {
    memcpy(p, &x, sizeof(x));
}

constexpr uint32_t each_byte = 0x01010101;

inline uint16_t bits_of(ggml_half h) {
    uint16_t u;
    memcpy(&u, &h, sizeof(u));
    return u;
}

// ---- from ggml's blocks -----------------------------------------------------------------------------------------------

// 6-bit scales and minima of eight sub-blocks in 12 bytes
inline void read_scales(const uint8_t * packed, row_block & out) {
    for (int j = 0; j < 4; ++j) {
        out.scales[j] = packed[j] & 63;
        out.mins[j] = packed[j + 4] & 63;
        out.scales[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6) << 4;
        out.mins[j + 4] = packed[j + 8] >> 4 | (packed[j + 4] >> 6) << 4;
    }
}

// n words: low nibbles to w, high nibbles to w + n
template <int n>
inline void read_nibbles(const uint8_t * q, uint32_t * w) {
    for (int i = 0; i < n; ++i) {
        const uint32_t x = load_word(q + 4 * i);
        w[i] = x & 15 * each_byte;
        w[i + n] = x >> 4 & 15 * each_byte;
    }
}

inline void read(const block_q4_K & b, row_block & out) {
    out.d = bits_of(b.d);
    out.m = bits_of(b.dmin);
    read_scales(b.scales, out);
    for (int p = 0; p < 4; ++p) {
        read_nibbles<8>(b.qs + 32 * p, out.w + 16 * p);
    }
}

inline void read(const block_q5_K & b, row_block & out) {
    out.d = bits_of(b.d);
    out.m = bits_of(b.dmin);
    read_scales(b.scales, out);
    for (int p = 0; p < 4; ++p) {
        read_nibbles<8>(b.qs + 32 * p, out.w + 16 * p);
    }
    for (int s = 0; s < 8; ++s) {
        for (int i = 0; i < 8; ++i) {
            out.w[8 * s + i] |= (load_word(b.qh + 4 * i) >> s & each_byte) << 4;
        }
    }
}

inline void read(const block_q6_K & b, row_block & out) {
    out.d = bits_of(b.d);
    memcpy(out.scales, b.scales, 16);
    for (int p = 0; p < 2; ++p) {
        read_nibbles<16>(b.ql + 64 * p, out.w + 32 * p);
        for (int part = 0; part < 4; ++part) {
            for (int i = 0; i < 8; ++i) {
                out.w[32 * p + 8 * part + i] |= (load_word(b.qh + 32 * p + 4 * i) >> 2 * part & 3 * each_byte) << 4;
            }
        }
    }
}

inline void read(const block_q8_0 & b, row_block & out) {
    out.d = bits_of(b.d);
    memcpy(out.w, b.qs, 32);
}

inline void read(const block_q4_0 & b, row_block & out) {
    out.d = bits_of(b.d);
    read_nibbles<4>(b.qs, out.w);
}

inline void read(const block_q4_1 & b, row_block & out) {
    out.d = bits_of(b.d);
    out.m = bits_of(b.m);
    read_nibbles<4>(b.qs, out.w);
}

inline void read(const block_q5_0 & b, row_block & out) {
    out.d = bits_of(b.d);
    read_nibbles<4>(b.qs, out.w);
    for (int g = 0; g < 8; ++g) {
        const uint32_t h = b.qh[g / 2] >> g % 2 * 4 & 15;
        out.w[g] |= (h * 0x00204081 & each_byte) << 4; // bit i to byte i
    }
}

inline void read(const block_iq4_nl & b, row_block & out) {
    out.d = bits_of(b.d);
    read_nibbles<4>(b.qs, out.w);
}

// ---- into tiles and back ------------------------------------------------------------------------------------------------

template <size_t n>
inline void put_nibbles(uint8_t (&q)[n][64], int r, const uint32_t * w) {
    for (size_t v = 0; v < n; ++v) {
        store_word(q[v] + 4 * r, (w[2 * v] & 15 * each_byte) | (w[2 * v + 1] & 15 * each_byte) << 4);
    }
}

template <size_t n>
inline void get_nibbles(const uint8_t (&q)[n][64], int r, uint32_t * w) {
    for (size_t v = 0; v < n; ++v) {
        const uint32_t x = load_word(q[v] + 4 * r);
        w[2 * v] = x & 15 * each_byte;
        w[2 * v + 1] = x >> 4 & 15 * each_byte;
    }
}

// the bits above the fourth, n_bits of each weight, of 8/n_bits groups
template <int n_bits>
inline void put_high(uint8_t (&high)[64], int r, const uint32_t * w) {
    constexpr uint32_t mask = ((1 << n_bits) - 1) * each_byte;
    uint32_t x = 0;
    for (int g = 0; g < 8 / n_bits; ++g) {
        x |= (w[g] >> 4 & mask) << n_bits * g;
    }
    store_word(high + 4 * r, x);
}

template <int n_bits>
inline void get_high(const uint8_t (&high)[64], int r, uint32_t * w) {
    constexpr uint32_t mask = ((1 << n_bits) - 1) * each_byte;
    const uint32_t x = load_word(high + 4 * r);
    for (int g = 0; g < 8 / n_bits; ++g) {
        w[g] |= (x >> n_bits * g & mask) << 4;
    }
}

template <typename tile>
inline void put_with_mins(tile & t, int r, const row_block & b) {
    t.d[r] = b.d;
    t.dmin[r] = b.m;
    for (int s = 0; s < 8; ++s) {
        t.scales[s][r] = b.scales[s];
        t.mins[s / 2][2 * r + s % 2] = b.mins[s];
        put_nibbles(t.q[s], r, b.w + 8 * s);
    }
}

template <typename tile>
inline void get_with_mins(const tile & t, int r, row_block & b) {
    b.d = t.d[r];
    b.m = t.dmin[r];
    for (int s = 0; s < 8; ++s) {
        b.scales[s] = t.scales[s][r];
        b.mins[s] = t.mins[s / 2][2 * r + s % 2];
        get_nibbles(t.q[s], r, b.w + 8 * s);
    }
}

inline void put(tile_q4_K & t, int r, const row_block & b) {
    put_with_mins(t, r, b);
}

inline void get(const tile_q4_K & t, int r, row_block & b) {
    get_with_mins(t, r, b);
}

inline void put(tile_q5_K & t, int r, const row_block & b) {
    put_with_mins(t, r, b);
    for (int s = 0; s < 8; ++s) {
        put_high<1>(t.high[s], r, b.w + 8 * s);
    }
}

inline void get(const tile_q5_K & t, int r, row_block & b) {
    get_with_mins(t, r, b);
    for (int s = 0; s < 8; ++s) {
        get_high<1>(t.high[s], r, b.w + 8 * s);
    }
}

inline void put(tile_q6_K & t, int r, const row_block & b) {
    t.d[r] = b.d;
    for (int s = 0; s < 16; ++s) {
        t.scales[s][r] = (int8_t) b.scales[s];
        put_nibbles(t.q[s], r, b.w + 4 * s);
        put_high<2>(t.high[s], r, b.w + 4 * s);
    }
}

inline void get(const tile_q6_K & t, int r, row_block & b) {
    b.d = t.d[r];
    for (int s = 0; s < 16; ++s) {
        b.scales[s] = (uint8_t) t.scales[s][r];
        get_nibbles(t.q[s], r, b.w + 4 * s);
        get_high<2>(t.high[s], r, b.w + 4 * s);
    }
}

inline void put(tile_q8_0 & t, int r, const row_block & b) {
    t.d[r] = b.d;
    for (int g = 0; g < 8; ++g) {
        store_word(t.q[g] + 4 * r, b.w[g]);
    }
}

inline void get(const tile_q8_0 & t, int r, row_block & b) {
    b.d = t.d[r];
    for (int g = 0; g < 8; ++g) {
        b.w[g] = load_word(t.q[g] + 4 * r);
    }
}

// Q4_0, IQ4_NL
template <typename tile>
inline void put(tile & t, int r, const row_block & b) {
    t.d[r] = b.d;
    put_nibbles(t.q, r, b.w);
}

template <typename tile>
inline void get(const tile & t, int r, row_block & b) {
    b.d = t.d[r];
    get_nibbles(t.q, r, b.w);
}

inline void put(tile_q4_1 & t, int r, const row_block & b) {
    t.d[r] = b.d;
    t.m[r] = b.m;
    put_nibbles(t.q, r, b.w);
}

inline void get(const tile_q4_1 & t, int r, row_block & b) {
    b.d = t.d[r];
    b.m = t.m[r];
    get_nibbles(t.q, r, b.w);
}

inline void put(tile_q5_0 & t, int r, const row_block & b) {
    t.d[r] = b.d;
    put_nibbles(t.q, r, b.w);
    put_high<1>(t.high, r, b.w);
}

inline void get(const tile_q5_0 & t, int r, row_block & b) {
    b.d = t.d[r];
    get_nibbles(t.q, r, b.w);
    get_high<1>(t.high, r, b.w);
}

} // namespace pyssd
