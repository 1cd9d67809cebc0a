// Products of few rows with weights of 8 or 4 bits, widened in registers. Included beside linear.h.
//
//     int8   [32] scales in fp32, then [in][32] codes -127 .. 127
//     int4   for each 32 inputs [32] scales and [32] middles in bf16, then [16][32] bytes: the codes of two inputs, each
//            8 more than it stands for, the first in the low half
//
// A weight is code * scale, or code * scale + middle. Rows are fp32, or for codes of 4 bits pairs of bf16 where there is a
// product of them; behind a row stand the sums of its groups of 32 in fp32, which the middles are multiplied with.
#pragma once

#include "linear.h"

namespace {

constexpr int INT4_ROW_ITEM = ROWS_ARE_FP32 ? 4 : 2;  // bytes

template <int ROWS, int VECTORS>
ALWAYS_INLINE void add_int8(const char *codes, const float *rows, int64_t row_floats, int inputs, F16 (&sums)[ROWS][VECTORS]) {
    for (int i = 0; i < inputs; ++i) {
        F16 weight[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) weight[v] = load_int8(codes + static_cast<int64_t>(i) * PANEL_OUTPUTS + v * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 x = all(rows[r * row_floats + i]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(x, weight[v], sums[r][v]);
        }
    }
}

// Rows of a group stand row_bytes apart.
template <int ROWS, int VECTORS>
ALWAYS_INLINE void add_int4(const char *bytes, const char *rows, int64_t row_bytes, F16 (&sums)[ROWS][VECTORS]) {
    for (int i = 0; i < GROUP / 2; ++i) {
#if defined(__AVX512BF16__)
        W16 weight[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) weight[v] = load_int4_pairs(bytes + i * PANEL_OUTPUTS + v * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t pair = reinterpret_cast<const uint32_t *>(rows + r * row_bytes)[i];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], weight[v], pair);
        }
#else
        F16 low[VECTORS], high[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) load_int4(bytes + i * PANEL_OUTPUTS + v * 16, low[v], high[v]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const float *x = reinterpret_cast<const float *>(rows + r * row_bytes) + 2 * i;
            const F16 first_x = all(x[0]), second_x = all(x[1]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) {
                sums[r][v] = fma(first_x, low[v], sums[r][v]);
                sums[r][v] = fma(second_x, high[v], sums[r][v]);
            }
        }
#endif
    }
}

template <int ROWS, int VECTORS> inline void clear(F16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = zero();
}

template <int ROWS> void multiply_int8(const Panel &panel, const char *rows, char *out) {
    float waiting[ROWS][16];
    for (int vector = 0; vector < 2; vector += PRODUCT_VECTORS) {
        F16 sums[ROWS][PRODUCT_VECTORS];
        clear(sums);
        add_int8<ROWS, PRODUCT_VECTORS>(panel.start + PANEL_OUTPUTS * 4 + vector * 16, reinterpret_cast<const float *>(rows),
                                        panel.row_bytes / 4, panel.lines, sums);
#pragma GCC unroll 2
        for (int v = 0; v < PRODUCT_VECTORS; ++v) {
            const F16 scale = load(reinterpret_cast<const float *>(panel.start) + (vector + v) * 16);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r][v] = mul(sums[r][v], scale);
        }
        finish_rows<Numbers::bf16, ROWS>(panel, vector, out, sums, waiting);
    }
}

template <int ROWS> void multiply_int4(const Panel &panel, const char *rows, char *out) {
    float waiting[ROWS][16];
    for (int vector = 0; vector < 2; vector += PRODUCT_VECTORS) {
        F16 sums[ROWS][PRODUCT_VECTORS];
        clear(sums);
        for (int g = 0; g < panel.lines / GROUP; ++g) {
            const char *group = panel.start + static_cast<int64_t>(g) * INT4_GROUP_BYTES;
            F16 part[ROWS][PRODUCT_VECTORS];
            clear(part);
            add_int4<ROWS, PRODUCT_VECTORS>(group + PANEL_OUTPUTS * 4 + vector * 16, rows + g * GROUP * INT4_ROW_ITEM,
                                            panel.row_bytes, part);
#pragma GCC unroll 2
            for (int v = 0; v < PRODUCT_VECTORS; ++v) {
                const F16 scale = load_bf16(group + (vector + v) * 32);
                const F16 middle = load_bf16(group + PANEL_OUTPUTS * 2 + (vector + v) * 32);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const char *totals = rows + r * panel.row_bytes + panel.lines * INT4_ROW_ITEM;
                    sums[r][v] = fma(part[r][v], scale, sums[r][v]);
                    sums[r][v] = fma(all(reinterpret_cast<const float *>(totals)[g]), middle, sums[r][v]);
                }
            }
        }
        finish_rows<Numbers::bf16, ROWS>(panel, vector, out, sums, waiting);
    }
}

template <int ROWS> void multiply_low_rows(const Panel &panel, const char *rows, char *out) {
    if (panel.bits == 8)
        multiply_int8<ROWS>(panel, rows, out);
    else
        multiply_int4<ROWS>(panel, rows, out);
}

template <int ROWS> void multiply_low_rest(const Panel &panel, const char *rows, char *out, int count) {
    if constexpr (ROWS > 0) {
        if (count == ROWS)
            multiply_low_rows<ROWS>(panel, rows, out);
        else
            multiply_low_rest<ROWS - 1>(panel, rows, out, count);
    }
}

// `count` prepared rows with one panel of codes.
void multiply_low(const Panel &panel, const char *rows, char *out, int64_t count) {
    for (; count >= LOW_BIT_ROWS; count -= LOW_BIT_ROWS) {
        multiply_low_rows<LOW_BIT_ROWS>(panel, rows, out);
        rows += LOW_BIT_ROWS * panel.row_bytes;
        out += LOW_BIT_ROWS * panel.out_bytes;
    }
    multiply_low_rest<LOW_BIT_ROWS - 1>(panel, rows, out, static_cast<int>(count));
}

// Makes of a row of bf16 what `multiply_low` reads: normed where there is a norm, and rounded to bf16 as everywhere.
// `wide` holds a row in fp32.
void prepare_low(const void *row, int size, int bits, const akv_norm *norm, float *wide, void *to) {
    widen(row, Numbers::bf16, size, wide);
    if (norm) {
        norm_row(wide, Numbers::bf16, size, norm->weight, norm->eps);
        for (int i = 0; i < size; ++i) wide[i] = float_of(bf16_of(wide[i]));
    }
    if (bits == 8 || INT4_ROW_ITEM == 4)
        memcpy(to, wide, static_cast<size_t>(size) * 4);
    else
        narrow(wide, Numbers::bf16, size, to);
    if (bits == 8) return;
    float *totals = reinterpret_cast<float *>(static_cast<char *>(to) + size * INT4_ROW_ITEM);
    for (int g = 0; g < size / GROUP; ++g) totals[g] = sum(add(load(wide + g * GROUP), load(wide + g * GROUP + 16)));
}

}  // namespace
