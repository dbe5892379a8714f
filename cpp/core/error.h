#pragma once

// The one exception type of the core. bindings.cpp translates its kind to the class of pyssd.errors with that name.

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pyssd {

enum class error_kind {
    LIBRARY_NOT_FOUND, // LibraryNotFoundError
    LIBRARY_CONFLICT,  // LibraryConflictError
    UNSUPPORTED_MODEL, // UnsupportedModelError
    SKIP_SET,          // SkipSetError
    CONTEXT_OVERFLOW,  // ContextOverflowError
    DECODE,            // DecodeError, carries code
    BUSY,              // BusyError
    CLOSED,            // ClosedError
    CANCELLED,         // Cancelled
    ARGUMENT,          // ValueError
};

struct error : std::runtime_error {
    error_kind kind;
    int32_t code; // return value of llama_decode, 0 where no decode was involved

    error(error_kind kind, const std::string & text, int32_t code = 0)
        : std::runtime_error(text), kind(kind), code(code) {}
};

} // namespace pyssd
