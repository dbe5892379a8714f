#pragma once

// Planted faults for `make sabotage`: every guarantee has a fault that its test must catch. Compiled in by
// -DPYSSD_FAULTS=ON only; a release build contains no trace of them.

#ifdef PYSSD_FAULTS
#include <cstdlib>
#include <cstring>

inline bool pyssd_fault(const char * name) {
    const char * planted = getenv("PYSSD_FAULT");
    return planted && strcmp(planted, name) == 0;
}
#else
inline constexpr bool pyssd_fault(const char *) {
    return false;
}
#endif
