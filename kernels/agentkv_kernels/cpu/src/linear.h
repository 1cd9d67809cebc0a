// Products of rows with weights that were laid down in panels (linear.cpp), RMS norms and RoPE, for one instruction set.
//
// A panel is 32 outputs of a weight, input after input, so that the weight is read once from its first byte to its last
// and every load is a whole vector:
//
//     fp32   [in][32]            bf16   [in / 2][32][2], two neighbouring inputs in a word, the first in its low half
//
// An output is summed over the inputs in their order, in one fp32 register, whatever rows stand beside it and whatever
// thread computes it: the same row always gives the same bits.
#pragma once

#include <cmath>

#include "linear_work.h"
#include "softmax.h"

namespace {

#if defined(__AVX512BF16__)
constexpr bool ROWS_ARE_FP32 = false;
#else
constexpr bool ROWS_ARE_FP32 = true;
#endif

// Two neighbours of a row; rows lie as a caller has them, at odd numbers of elements, too.
inline uint32_t pair_of(const char *row, int i) {
    uint32_t pair;
    memcpy(&pair, row + static_cast<int64_t>(i) * 4, sizeof pair);
    return pair;
}

// Adds to sums the product of ROWS rows with VECTORS vectors of a panel. `lines` are inputs, or pairs of them.
template <Numbers numbers, int ROWS, int VECTORS>
ALWAYS_INLINE void add_products(const char *panel, const char *rows, int64_t row_bytes, int lines, F16 (&sums)[ROWS][VECTORS]) {
    for (int i = 0; i < lines; ++i) {
        const char *line = panel + static_cast<int64_t>(i) * LINE_BYTES;
        if constexpr (numbers == Numbers::fp32) {
            F16 weight[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) weight[v] = load(reinterpret_cast<const float *>(line + v * 64));
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(reinterpret_cast<const float *>(rows + r * row_bytes)[i]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(x, weight[v], sums[r][v]);
            }
        } else {
            W16 weight[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) weight[v] = load_words(line + v * 64);
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const uint32_t pair = pair_of(rows + r * row_bytes, i);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], weight[v], pair);
            }
#else
            // Rows were widened to fp32 (`rows_are_fp32`).
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const float *x = reinterpret_cast<const float *>(rows + r * row_bytes) + 2 * i;
                const F16 first_x = all(x[0]), second_x = all(x[1]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) {
                    sums[r][v] = fma(first_x, low_halves(weight[v]), sums[r][v]);
                    sums[r][v] = fma(second_x, high_halves(weight[v]), sums[r][v]);
                }
            }
#endif
        }
    }
}

// What bf16 would have made of it.
inline F16 rounded(F16 a) {
    uint16_t numbers[16];
    store_rounded(numbers, a);
    return load_bf16(numbers);
}

// x / (1 + e^-x). Below -87 it is some -1e-36 and stands for less; e^-x stays among the numbers, as powers of two must.
inline F16 silu(F16 x) {
    x = max(all(-87), x);
    return div(x, add(exp2<Mode::fp32>(max(all(-127), mul(x, all(-LOG2E)))), all(1)));
}

// Puts 16 results down, or as many as there are; `put` says how.
template <Numbers numbers, bool ADD> inline void put(void *to, F16 result, int count) {
    if constexpr (numbers == Numbers::fp32) {
        float *out = static_cast<float *>(to);
        if (count == 16) {
            store(out, ADD ? add(load(out), result) : result);
        } else {
            float each[16];
            store(each, result);
            for (int i = 0; i < count; ++i) out[i] = ADD ? out[i] + each[i] : each[i];
        }
    } else {
        uint16_t *out = static_cast<uint16_t *>(to);
        if (count == 16) {
            store_rounded(out, ADD ? add(load_bf16(out), rounded(result)) : result);
        } else {
            uint16_t each[16];
            store_rounded(each, result);
            for (int i = 0; i < count; ++i) out[i] = ADD ? bf16_of(float_of(out[i]) + float_of(each[i])) : each[i];
        }
    }
}

template <Numbers numbers, bool ADD, int VECTORS>
inline void finish(const Panel &panel, int vector, char *to, const F16 *sums) {
    constexpr int item = numbers == Numbers::fp32 ? 4 : 2;
    F16 results[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
        results[v] = panel.bias ? add(sums[v], load(panel.bias + (vector + v) * 16)) : sums[v];
    for (int v = 0; v < VECTORS; ++v) {
        const int first = (vector + v) * 16, count = cut(16, panel.outputs - first);
        if (count > 0) put<numbers, ADD>(to + first * item, results[v], count);
    }
}

// The gates' vector and the other's, of ROWS rows.
template <Numbers numbers> inline void finish_gated(const Panel &panel, char *to, F16 gate, F16 other) {
    if (panel.bias) {
        gate = add(gate, load(panel.bias));
        other = add(other, load(panel.bias + 16));
    }
    if constexpr (numbers == Numbers::bf16) {
        gate = rounded(silu(rounded(gate)));
        other = rounded(other);
    } else {
        gate = silu(gate);
    }
    put<numbers, false>(to, mul(gate, other), cut(16, panel.outputs));
}

// Puts down the sums of ROWS rows for a panel's vectors from `vector` on. `waiting` is for gates, where one vector is summed
// after the other.
template <Numbers numbers, int ROWS>
ALWAYS_INLINE void finish_rows(const Panel &panel, int vector, char *out, F16 (&sums)[ROWS][PRODUCT_VECTORS],
                               [[maybe_unused]] float (&waiting)[ROWS][16]) {
    if (panel.then == Then::gate) {
        if constexpr (PRODUCT_VECTORS == 2) {
            for (int r = 0; r < ROWS; ++r) finish_gated<numbers>(panel, out + r * panel.out_bytes, sums[r][0], sums[r][1]);
        } else {
            for (int r = 0; r < ROWS; ++r) {
                if (vector == 0)
                    store(waiting[r], sums[r][0]);
                else
                    finish_gated<numbers>(panel, out + r * panel.out_bytes, load(waiting[r]), sums[r][0]);
            }
        }
    } else if (panel.then == Then::add) {
        for (int r = 0; r < ROWS; ++r)
            finish<numbers, true, PRODUCT_VECTORS>(panel, vector, out + r * panel.out_bytes, sums[r]);
    } else {
        for (int r = 0; r < ROWS; ++r)
            finish<numbers, false, PRODUCT_VECTORS>(panel, vector, out + r * panel.out_bytes, sums[r]);
    }
}

template <Numbers numbers, int ROWS> void multiply_rows(const Panel &panel, const char *rows, char *out) {
    float waiting[ROWS][16];
    for (int vector = 0; vector < 2; vector += PRODUCT_VECTORS) {
        F16 sums[ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < PRODUCT_VECTORS; ++v) sums[r][v] = zero();
        add_products<numbers, ROWS, PRODUCT_VECTORS>(panel.start + vector * 64, rows, panel.row_bytes, panel.lines, sums);
        finish_rows<numbers, ROWS>(panel, vector, out, sums, waiting);
    }
}

template <Numbers numbers, int ROWS> void multiply_rest(const Panel &panel, const char *rows, char *out, int count) {
    if constexpr (ROWS > 0) {
        if (count == ROWS)
            multiply_rows<numbers, ROWS>(panel, rows, out);
        else
            multiply_rest<numbers, ROWS - 1>(panel, rows, out, count);
    }
}

template <Numbers numbers> void multiply_all(const Panel &panel, const char *rows, char *out, int64_t count) {
    for (; count >= PRODUCT_ROWS; count -= PRODUCT_ROWS) {
        multiply_rows<numbers, PRODUCT_ROWS>(panel, rows, out);
        rows += PRODUCT_ROWS * panel.row_bytes;
        out += PRODUCT_ROWS * panel.out_bytes;
    }
    multiply_rest<numbers, PRODUCT_ROWS - 1>(panel, rows, out, static_cast<int>(count));
}

// `count` rows with one panel.
void multiply(const Panel &panel, const char *rows, char *out, int64_t count) {
    if (panel.numbers == Numbers::fp32)
        multiply_all<Numbers::fp32>(panel, rows, out, count);
    else
        multiply_all<Numbers::bf16>(panel, rows, out, count);
}

// A row as fp32.
inline void widen(const void *row, Numbers numbers, int size, float *to) {
    if (numbers == Numbers::fp32) {
        memcpy(to, row, static_cast<size_t>(size) * 4);
        return;
    }
    const uint16_t *from = static_cast<const uint16_t *>(row);
    int i = 0;
    for (; i + 16 <= size; i += 16) store(to + i, load_bf16(from + i));
    for (; i < size; ++i) to[i] = float_of(from[i]);
}

inline void narrow(const float *row, Numbers numbers, int size, void *to) {
    if (numbers == Numbers::fp32) {
        memcpy(to, row, static_cast<size_t>(size) * 4);
        return;
    }
    uint16_t *out = static_cast<uint16_t *>(to);
    int i = 0;
    for (; i + 16 <= size; i += 16) store_rounded(out + i, load(row + i));
    for (; i < size; ++i) out[i] = bf16_of(row[i]);
}

// RMS norm in place, with the roundings of a model in bf16: once before the weight, once behind it.
inline void norm_row(float *row, Numbers numbers, int size, const float *weight, float eps) {
    F16 squares = zero();
    int i = 0;
    for (; i + 16 <= size; i += 16) squares = fma(load(row + i), load(row + i), squares);
    float total = sum(squares);
    for (; i < size; ++i) total += row[i] * row[i];
    const float factor = 1 / std::sqrt(total / static_cast<float>(size) + eps);
    i = 0;
    for (; i + 16 <= size; i += 16) {
        F16 x = mul(load(row + i), all(factor));
        if (numbers == Numbers::bf16) x = rounded(x);
        store(row + i, mul(x, load(weight + i)));
    }
    for (; i < size; ++i) {
        const float x = row[i] * factor;
        row[i] = (numbers == Numbers::bf16 ? float_of(bf16_of(x)) : x) * weight[i];
    }
}

// Makes of a row what `multiply` reads: normed where there is a norm, in fp32 or as it is. `wide` holds a row in fp32.
void prepare(const void *row, Numbers numbers, int size, const akv_norm *norm, float *wide, void *to) {
    const bool narrowed = numbers == Numbers::fp32 || !ROWS_ARE_FP32;
    if (!norm && narrowed) {
        memcpy(to, row, static_cast<size_t>(size) * (numbers == Numbers::fp32 ? 4 : 2));
        if (numbers == Numbers::bf16 && size % 2) static_cast<uint16_t *>(to)[size] = 0;
        return;
    }
    widen(row, numbers, size, wide);
    if (norm) norm_row(wide, numbers, size, norm->weight, norm->eps);
    if (!narrowed) {
        // What is multiplied was rounded to bf16, as everywhere.
        for (int i = 0; i < size; ++i) static_cast<float *>(to)[i] = float_of(bf16_of(wide[i]));
        if (size % 2) static_cast<float *>(to)[size] = 0;
    } else {
        narrow(wide, numbers, size, to);
        if (numbers == Numbers::bf16 && size % 2) static_cast<uint16_t *>(to)[size] = 0;
    }
}

// Norms and turns the heads of one token, in place: halves change places, the first with the opposite sign.
void turn(const akv_turn &how, Numbers numbers, char *token, const float *cos, const float *sin) {
    const int size = how.size, half = size / 2, item = numbers == Numbers::fp32 ? 4 : 2;
    float head[MOST_ELEMENTS + 16], turned[MOST_ELEMENTS + 16];
    for (int h = 0; h < how.num_heads; ++h) {
        char *at = token + static_cast<int64_t>(h) * size * item;
        widen(at, numbers, size, head);
        const akv_norm &norm = h < how.num_query_heads ? how.query_norm : how.key_norm;
        if (norm.weight) {
            norm_row(head, numbers, size, norm.weight, norm.eps);
            if (numbers == Numbers::bf16)
                for (int i = 0; i < size; ++i) head[i] = float_of(bf16_of(head[i]));
        }
        for (int i = 0; i < half; ++i) {
            turned[i] = head[i] * cos[i] - head[i + half] * sin[i];
            turned[i + half] = head[i + half] * cos[i + half] + head[i] * sin[i + half];
        }
        narrow(turned, numbers, size, at);
    }
}

}  // namespace
