#include "quant.h"

#include "pack.h"

#include <cmath>
#include <cstring>

namespace pyssd {

namespace {

float max_abs(const float * x, int n) {
    float lanes[16] = {};
    for (int k = 0; k < n; k += 16) {
        for (int l = 0; l < 16; ++l) {
            const float a = std::fabs(x[k + l]);
            lanes[l] = lanes[l] < a ? a : lanes[l];
        }
    }
    float m = 0.0f;
    for (float a : lanes) {
        m = m < a ? a : m;
    }
    return m;
}

// to the nearest integer, ties to even, in a form that compilers vectorise; |x| < 2^22
int32_t nearest(float x) {
    const float shifted = x + 12582912.0f;
    int32_t i;
    memcpy(&i, &shifted, sizeof(i));
    return (i & 0x007fffff) - 0x00400000;
}

float quantize(const float * x, int n, int8_t * q) {
    const float amax = max_abs(x, n);
    const float id = amax > 0.0f ? 127.0f / amax : 0.0f;
    for (int k = 0; k < n; ++k) {
        q[k] = (int8_t) nearest(x[k] * id);
    }
    return amax / 127.0f;
}

int32_t sum(const int8_t * q, int n) {
    int32_t s = 0;
    for (int k = 0; k < n; ++k) {
        s += q[k];
    }
    return s;
}

} // namespace

size_t act_size(ggml_type type, int64_t n) {
    switch (tile_block_weights(type)) {
    case 256:
        return n / 256 * sizeof(act_k);
    case 32:
        return n / 32 * sizeof(act_32);
    default:
        return 0;
    }
}

void act_quantize(ggml_type type, const float * x, int64_t n, void * dst) {
    if (tile_block_weights(type) == 256) {
        act_k * out = (act_k *) dst;
        for (int64_t i = 0; i < n / 256; ++i) {
            out[i].d = quantize(x + 256 * i, 256, out[i].q);
            for (int s = 0; s < 16; ++s) {
                out[i].bias16[s] = -32 * sum(out[i].q + 16 * s, 16);
            }
            for (int s = 0; s < 8; ++s) {
                out[i].sums32[s] = (int16_t) ((out[i].bias16[2 * s] + out[i].bias16[2 * s + 1]) / -32);
            }
        }
        return;
    }
    act_32 * out = (act_32 *) dst;
    for (int64_t i = 0; i < n / 32; ++i) {
        out[i].d = quantize(x + 32 * i, 32, out[i].q);
        out[i].sum = sum(out[i].q, 32);
        out[i].dsum = out[i].d * (float) out[i].sum;
    }
}

} // namespace pyssd
