#pragma once

// The few lines a test executable needs: count failed checks, report them, exit with their number.

#include <cstdio>

inline int & failures() {
    static int n = 0;
    return n;
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                         \
            failures()++;                                                                                              \
        }                                                                                                              \
    } while (0)
