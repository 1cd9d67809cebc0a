// The two products over pages of int8, in whole numbers throughout: for few rows, which would wait for numbers to be widened.
//
//     scores   queries rounded to 16 bits by the largest of a row, times keys of 8, sums of 32
//     values   probabilities times the values' scales, rounded to 16 bits by the largest of a block, times values of 8
//
// A number of 16 bits is off by 2^-16 of the largest: for all above a 128th of that by less than bf16 is, and far less than
// what keys and values of 8 bits are off by. Sums of up to 512 elements, and of the 128 keys of a short block, stay below 2^31.
#pragma once

#include "layout.h"
#include "products.h"

namespace {

constexpr float MOST_INT16 = 32767;
static_assert(int64_t{128} * 32767 * MOST_ELEMENTS <= INT32_MAX && int64_t{128} * 32767 * ABREAST * TILE <= INT32_MAX);

// The factor that brings numbers up to `most` to 16 bits.
inline float to_int16(float most) { return most > 1e-30f ? MOST_INT16 / most : 0; }

// A row of queries: what one of its numbers stands for, then the numbers.
constexpr int64_t whole_query_bytes(int key_size) { return 4 + 2 * static_cast<int64_t>(key_size); }
inline void put_query(const float *query, int key_size, char *out) {
    float most = 0, none = 0;  // or NaN, which makes every score none
    for (int d = 0; d < key_size; ++d) {
        const float size = query[d] < 0 ? -query[d] : query[d];
        most = size > most ? size : most;
        none += 0 * query[d];
    }
    const float scale = most / MOST_INT16 + none, factor = to_int16(most);
    memcpy(out, &scale, 4);
    for (int d = 0; d < key_size; ++d) {
        const float x = query[d] * factor;
        const int16_t number = x == x ? static_cast<int16_t>(x < 0 ? x - 0.5f : x + 0.5f) : 0;
        memcpy(out + 4 + 2 * d, &number, 2);
    }
}

// As score_tiles; queries by put_query.
template <int ROWS, int TILES>
inline void score_numbers(const char *query, int key_size, char *const *keys, char *const *next, float *out, int width,
                          bool ask) {
    W16 sums[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < TILES; ++t) sums[r][t] = no_words();
    const int64_t row_bytes = whole_query_bytes(key_size);
    for (int i = 0; i < key_size / 2; ++i) {
        const int at = i * line_bytes(Mode::whole);
        if (ask && at % ASKED_BYTES == 0) {
#pragma GCC unroll 8
            for (int t = 0; t < TILES; ++t) prefetch(next[t] + at);
        }
        uint32_t pairs[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) memcpy(&pairs[r], query + r * row_bytes + 4 + 4 * i, 4);
#pragma GCC unroll 8
        for (int t = 0; t < TILES; ++t) {
            const W16 numbers = load_int8_pairs(keys[t] + at);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r][t] = add_pair_products(sums[r][t], numbers, pairs[r]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; ++t) {
        if (ask) prefetch(next[t] - KEYS_BEHIND_SCALES);
        const F16 scales = load_bf16(keys[t] - KEYS_BEHIND_SCALES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            float scale;
            memcpy(&scale, query + r * row_bytes, 4);
            store(out + r * width + t * TILE, mul(mul(numbers_of(sums[r][t]), scales), all(scale)));
        }
    }
}

// Numbers of a row of probabilities times scales, in place of these; what one stands for is put behind the row.
inline void put_probabilities(float *row, int tiles, F16 tops, F16 none, float *scale) {
    const float most = top(tops);
    *scale = most / MOST_INT16 + sum(none);
    const F16 factor = all(to_int16(most));
    // A tile's numbers take half of its place, so none is overwritten before it is read.
    for (int t = 0; t < tiles; ++t)
        store_int16(reinterpret_cast<char *>(row) + t * TILE * 2, mul(load(row + t * TILE), factor));
}
inline float *scale_behind(const Scores &probs, int row) { return probs.row(row) + probs.width - TILE; }

// As add_values, of one short block.
template <int ROWS, int VECTORS>
inline void add_numbers(Scores probs, int row, char *const *values, char *const *next, int tiles, int value_size, int column,
                        float *out, int sum_width, const float *factors, bool ask) {
    W16 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) sums[r][n] = no_words();
    for (int i = 0; i < TILE / 2; ++i) {
        const int64_t at = (column + static_cast<int64_t>(i) * value_size) * 2;
        const float *p = probs.row(row) + i;
        for (int t = 0; t < tiles; ++t) {
            if (ask) prefetch(next[t] + at);
            W16 numbers[VECTORS];
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) numbers[n] = load_int8_pairs(values[t] + at + n * line_bytes(Mode::whole));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                uint32_t pair;
                memcpy(&pair, p + r * probs.width + t * (TILE / 2), 4);
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) sums[r][n] = add_pair_products(sums[r][n], numbers[n], pair);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) {
            float *before = out + r * sum_width + n * 16;
            store(before, fma(numbers_of(sums[r][n]), all(*scale_behind(probs, row + r)), mul(load(before), all(factors[r]))));
        }
}

}  // namespace
