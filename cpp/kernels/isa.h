#pragma once

// The vector instructions of the kernels behind one interface: 16 lanes = the 16 rows of a tile.
//
// A kernel written against it computes the same thing on every instruction set (exp apart, whose last bit may differ); the order
// of operations of an output depends on nothing but the matrix. Integer sums are exact in any order; float operations are
// spelled out (fma or not). isa_scalar.h documents what the functions do.

#include "isa_scalar.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "isa_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa_avx2.h"
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "isa_neon.h"
#endif

namespace pyssd {

// the instruction set of this build
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
using isa_native = isa_avx512;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using isa_native = isa_avx2;
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
using isa_native = isa_neon;
#else
using isa_native = isa_scalar;
#endif

} // namespace pyssd
