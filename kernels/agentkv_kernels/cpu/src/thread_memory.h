// Memory of one thread, that grows to what was asked of it at most.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace {

struct Memory {
    char *start = nullptr;
    size_t size = 0;

    ~Memory() { free(start); }
    char *take(size_t bytes) {
        if (bytes > size) {
            free(start);
            start = static_cast<char *>(malloc(bytes));
            size = start ? bytes : 0;
        }
        return start;
    }
};

}  // namespace
