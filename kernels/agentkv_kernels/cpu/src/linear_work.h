// What the parting of a product (linear.cpp) hands to an instruction set (linear.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "interface.h"

enum class Numbers : int32_t { fp32 = AKV_FP32, bf16 = AKV_BF16 };
enum class Then : int32_t { write = AKV_WRITE, add = AKV_ADD, gate = AKV_GATE };

constexpr int PANEL_OUTPUTS = 32, LINE_BYTES = 128;
constexpr int GROUP = 32, INT4_GROUP_BYTES = 2 * PANEL_OUTPUTS * 2 + GROUP / 2 * PANEL_OUTPUTS;  // of codes of 4 bits

// One panel of a weight, and the rows that meet it.
struct Panel {
    const char *start;
    const float *bias;   // of its outputs, or null
    Numbers numbers;
    Then then;
    int32_t bits;        // of a code, or 0 where weights are as they were
    int32_t lines;       // inputs, or pairs of them
    int32_t outputs;     // that are written: less than 32 in the last one, and at most 16 where halves are gated
    int64_t row_bytes;   // from row to row
    int64_t out_bytes;
};

struct LinearKernels {
    bool rows_are_fp32;  // where bf16 is multiplied: there is no product of pairs
    void (*prepare)(const void *row, Numbers numbers, int size, const akv_norm *norm, float *wide, void *to);
    void (*multiply)(const Panel &panel, const char *rows, char *out, int64_t count);
    void (*prepare_low)(const void *row, int size, int bits, const akv_norm *norm, float *wide, void *to);
    void (*multiply_low)(const Panel &panel, const char *rows, char *out, int64_t count);
    void (*turn)(const akv_turn &how, Numbers numbers, char *token, const float *cos, const float *sin);
    void (*hadamard)(const void *head, Numbers numbers, int size, float factor, void *to);
};
