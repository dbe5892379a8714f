#pragma once

// Upstream's attention over a few rows, computed for each as for a row alone.

#include "ggml-cpu-impl.h"
#include "ggml.h"

namespace pyssd {

// the graph asks for it (pyssd-rows.h), and there is more than one row
bool attention_is_by_row(const ggml_tensor * op);
void attention_by_row(const ggml_compute_params * params, ggml_tensor * op);

} // namespace pyssd
