#include "gemm.h"

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "gemm_neon.h"
#endif

namespace pyssd {

namespace {

template <class V, class tile, int M>
void run(const void * w, int64_t n, const void * const * cols, float * const * out) {
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
    if constexpr (std::is_same<V, isa_neon>::value && M > 1) {
        return gemm_neon<tile, M>((const tile *) w, n / tile::n_weights, cols, out);
    }
#endif
    if constexpr (tile::n_weights == 256) {
        gemm_k<V, tile, M>((const tile *) w, n / 256, cols, out);
    } else {
        gemm_32<V, tile, M>((const tile *) w, n / 32, cols, out);
    }
}

template <class V, int M>
gemm_fn pick_type(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q4_K:
        return run<V, tile_q4_K, M>;
    case GGML_TYPE_Q5_K:
        return run<V, tile_q5_K, M>;
    case GGML_TYPE_Q6_K:
        return run<V, tile_q6_K, M>;
    case GGML_TYPE_Q8_0:
        return run<V, tile_q8_0, M>;
    case GGML_TYPE_Q4_0:
        return run<V, tile_q4_0, M>;
    case GGML_TYPE_Q4_1:
        return run<V, tile_q4_1, M>;
    case GGML_TYPE_Q5_0:
        return run<V, tile_q5_0, M>;
    case GGML_TYPE_IQ4_NL:
        return run<V, tile_iq4_nl, M>;
    case GGML_TYPE_F32:
        return gemm_float<V, GGML_TYPE_F32, M>;
    case GGML_TYPE_F16:
        return gemm_float<V, GGML_TYPE_F16, M>;
    case GGML_TYPE_BF16:
        return gemm_float<V, GGML_TYPE_BF16, M>;
    default:
        return nullptr;
    }
}

template <class V>
gemm_fn pick(ggml_type type, int n_cols) {
    switch (n_cols) {
    case 1:
        return pick_type<V, 1>(type);
    case 2:
        return pick_type<V, 2>(type);
    case 3:
        return pick_type<V, 3>(type);
    case 4:
        return pick_type<V, 4>(type);
    case 5:
        return pick_type<V, 5>(type);
    case 6:
        return pick_type<V, 6>(type);
    case 7:
        return pick_type<V, 7>(type);
    case 8:
        return pick_type<V, 8>(type);
    default:
        return nullptr;
    }
}

} // namespace

gemm_fn gemm_for(ggml_type type, int n_cols) {
    return pick<isa_native>(type, n_cols);
}

gemm_fn gemm_reference(ggml_type type, int n_cols) {
    return pick<isa_scalar>(type, n_cols);
}

} // namespace pyssd
