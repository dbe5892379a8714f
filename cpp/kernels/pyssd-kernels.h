#pragma once

// pyssd's kernels inside ggml-cpu. The two functions with C linkage are found by name in the loaded library.

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// for models that this thread loads from now on: offer the packed buffer type to their weights (off: upstream's choice).
// tied = the model's LM head is its embedding matrix, which is then packed once and serves look-ups too
GGML_BACKEND_API void pyssd_kernels_offer(bool on, bool tied);

// name of the instruction set the kernels of this library use
GGML_BACKEND_API const char * pyssd_kernels_isa(void);

// called by our edit in ggml-cpu.cpp
ggml_backend_buffer_type_t pyssd_kernels_buffer_type(void);

#ifdef __cplusplus
}
#endif
