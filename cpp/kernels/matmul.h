#pragma once

// The operations on packed matrices, split over ggml's threads.

#include "ggml-cpu-impl.h"
#include "ggml.h"

#include <cstddef>

namespace pyssd {

size_t mul_mat_work_size(const ggml_tensor * op);
void mul_mat(const ggml_compute_params * params, ggml_tensor * op);

size_t mul_mat_id_work_size(const ggml_tensor * op);
void mul_mat_id(const ggml_compute_params * params, ggml_tensor * op);

void get_rows(const ggml_compute_params * params, ggml_tensor * op);

} // namespace pyssd
