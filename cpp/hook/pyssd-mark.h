#pragma once

// How a graph tells pyssd's CPU kernels that its context asked for width-invariant attention: a mark in an operation parameter
// that upstream leaves unused. Other backends ignore it.

#include <cstdint>

namespace pyssd {

constexpr int     attention_mark_slot = 8;
constexpr int32_t attention_mark      = 0x70797373;

} // namespace pyssd
