#pragma once

// Attention over cached keys and values, computed for every row as if the row were alone: the KV range is cut into fixed chunks
// that are reduced in order, whatever the number of rows, heads and threads.

#include "ggml-cpu-impl.h"
#include "ggml.h"

#include <cstddef>

namespace pyssd {

// did the context of this graph ask for it (see pyssd-mark.h)
bool attention_is_marked(const ggml_tensor * op);
size_t attention_work_size(int n_threads, const ggml_tensor * op);
void attention(const ggml_compute_params * params, ggml_tensor * op);

} // namespace pyssd
