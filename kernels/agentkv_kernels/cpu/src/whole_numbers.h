// What Mode::whole rounds, so that products over pages of int8 are of whole numbers throughout: with few rows it takes longer
// to widen keys and values than to multiply them.
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

// A row of queries: its numbers, and behind them what one stands for.
inline void put_query(const float *query, int key_size, char *out) {
    float most = 0, none = 0;  // or NaN, which makes every score none
    for (int d = 0; d < key_size; ++d) {
        const float size = query[d] < 0 ? -query[d] : query[d];
        most = size > most ? size : most;
        none += 0 * query[d];
    }
    const float scale = most / MOST_INT16 + none, factor = to_int16(most);
    for (int d = 0; d < key_size; ++d, out += 2) {
        const float x = query[d] * factor;
        const int16_t number = x == x ? static_cast<int16_t>(x < 0 ? x - 0.5f : x + 0.5f) : 0;
        memcpy(out, &number, 2);
    }
    memcpy(out, &scale, 4);
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

}  // namespace
