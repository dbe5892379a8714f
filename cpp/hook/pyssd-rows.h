#pragma once

/* How a graph tells the CPU backend to compute the rows of a pass as passes of one row would: a mark in an operation
   parameter that upstream leaves unused, in attention and matrix products. For C and C++: our edits to upstream's sources
   ask for it. */

#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

#define PYSSD_ROWS_SLOT 8
#define PYSSD_ROWS_MARK 0x70797331

static inline void pyssd_rows_mark(struct ggml_tensor * op) {
    op->op_params[PYSSD_ROWS_SLOT] = PYSSD_ROWS_MARK;
}

static inline bool pyssd_rows_single(const struct ggml_tensor * op) {
    return op->op_params[PYSSD_ROWS_SLOT] == PYSSD_ROWS_MARK;
}

/* a product for which that takes reference mode. sgemm adds up these types as a single row's product does, so it may stay;
   of Q4_0 and IQ4_NL that is not known: their rows are repacked wherever they were tried */
static inline bool pyssd_rows_reference(const struct ggml_tensor * op) {
    const enum ggml_type type = op->src[0]->type;
    return pyssd_rows_single(op) && type != GGML_TYPE_Q8_0 && type != GGML_TYPE_Q5_0;
}
