// What the planning of a step (step.cpp) hands to an instruction set (attention.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear_work.h"

// A query of an item: its token among the packed ones, its position in its sequence, and the partial result that it
// writes, or -1 where this item sees all of its keys and so writes the answer itself.
struct Row {
    int32_t token;
    int32_t position;
    int32_t slot;
};

// Queries that see keys key_begin .. key_end of one run of pages.
struct Item {
    const int32_t *pages;  // of the sequence, from its first page on
    int32_t key_begin;
    int32_t key_end;
    int32_t first_row;
    int32_t num_rows;
};

// What one thread does at a time: an item for some KV heads.
struct Unit {
    const Item *item;
    int32_t first_head, num_heads;
};

struct Work {
    const akv_layer *layer;
    const akv_call *call;
    const Row *rows;
    float *partials;         // [slot][num_heads][partial_width]: top, total, sums of values
    int32_t partial_width;
};

struct Kernels {
    // Whether an item of so many queries is faster for all heads at once, where threads have enough to do.
    bool (*few_rows)(const Work &work, int num_rows);
    // Bytes of scratch that `attend` needs for so many queries and heads.
    size_t (*scratch_bytes)(const Work &work, int num_rows, int num_heads);
    void (*attend)(const Work &work, const Unit &unit, char *scratch);
    // Reads what `attend` would read, tile after tile, and adds it up; benchmarks compare with it.
    uint64_t (*read)(const Work &work, const Unit &unit);
    const LinearKernels *linear;
};

extern const Kernels plain_kernels;
extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels;  // each only where it was compiled

// Scores are kept times log2(e), so that powers are of two. The top of no scores at all:
constexpr float NO_SCORE = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;
