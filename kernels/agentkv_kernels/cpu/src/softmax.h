// Scores to probabilities, row by row and block by block. Included by attention.h.
#pragma once

#include "products.h"
#include "whole_numbers.h"
#include "work.h"

namespace {

// Powers of two. fp32: Cephes' exp2f, its polynomial on [-0.5, 0.5] within 1.7e-7. For probabilities that are rounded
// to bf16 a shorter one does, within 7.5e-5.
template <Mode mode> inline F16 exp2(F16 x) {
    const F16 whole = round_to_int(x), rest = sub(x, whole);
    F16 p;
    if constexpr (is_dot(mode)) {
        p = fma(all(0.05517153f), rest, all(0.24261111f));
        p = fma(p, rest, all(0.693261f));
        p = fma(p, rest, all(0.99992806f));
    } else {
        p = fma(all(1.535336188319500e-4f), rest, all(1.339887440266574e-3f));
        p = fma(p, rest, all(9.618437357674640e-3f));
        p = fma(p, rest, all(5.550332471162809e-2f));
        p = fma(p, rest, all(2.402264791363012e-1f));
        p = fma(p, rest, all(6.931472028550421e-1f));
        p = fma(p, rest, all(1.0f));
    }
    return times_power(p, whole);
}

inline float exp2_of(float x) { return first(exp2<Mode::fp32>(all(x))); }

// cap * tanh(x), by 1 - 2 / (2^(2x log2 e) + 1).
inline F16 bent(F16 x, float cap) {
    const F16 e = add(exp2<Mode::fp32>(mul(x, all(2 * LOG2E))), all(1));
    return mul(all(cap), sub(all(1), div(all(2), e)));
}

// What the softmax of one row keeps from block to block. Tops are of scores times log2(e).
struct Running {
    float top;
    float total[16];
};

// Turns a row of scores into probabilities of keys from .. to among `tiles` tiles, and 0 elsewhere; returns the factor
// for what was summed before. A score is `slope` times what stands there, bent by the softcap where there is one, and
// what is left in the row is times the scales of the values, where they have scales. In Mode::whole what one of its numbers
// stands for is put into `whole_scale`.
template <Mode mode>
inline float soften(float *row, int tiles, int from, int to, float slope, float softcap, const float *value_scales,
                    Running &running, float *whole_scale) {
    const int first_tile = from < to ? from / TILE : tiles, stop_tile = from < to ? (to + TILE - 1) / TILE : tiles;
    if (softcap != 0 || slope <= 0) {
        for (int t = first_tile; t < stop_tile; ++t) {
            const F16 score = mul(load(row + t * TILE), all(slope));
            store(row + t * TILE, softcap != 0 ? bent(score, softcap * LOG2E) : score);
        }
        slope = 1;
    }
    F16 tops = all(NO_SCORE), other_tops = tops;
    if (first_tile < stop_tile) {
        // Only the first and the last tile hold keys that are hidden.
        const int last = stop_tile - 1;
        store(row + last * TILE, within(load(row + last * TILE), 0, to - last * TILE, NO_SCORE));
        store(row + first_tile * TILE, within(load(row + first_tile * TILE), from - first_tile * TILE, TILE, NO_SCORE));
        int t = first_tile;
        for (; t + 1 < stop_tile; t += 2) {
            tops = max(load(row + t * TILE), tops);
            other_tops = max(load(row + (t + 1) * TILE), other_tops);
        }
        if (t < stop_tile) tops = max(load(row + t * TILE), tops);
    }
    const float top_now = top(max(tops, other_tops)) * slope;
    const float top_new = top_now > running.top ? top_now : running.top;
    const float shrink = exp2_of(running.top - top_new);
    running.top = top_new;
    F16 total = mul(load(running.total), all(shrink));
    F16 most = zero(), none = zero();  // or NaN, where one is among the scales
    const auto put = [row, value_scales, &most, &none](int t, F16 p) {
        if constexpr (has_scales(mode)) p = mul(p, load(value_scales + t * TILE));
        if constexpr (mode == Mode::whole) {
            most = max(max(p, sub(zero(), p)), most);
            none = fma(p, zero(), none);
        }
        if constexpr (is_dot(mode)) {
#if defined(__AVX512BF16__)
            // Two bf16 tiles take the place of one of fp32, so no score is overwritten before it is read.
            store_bf16(reinterpret_cast<char *>(row) + t * TILE * 2, p);
#endif
        } else {
            store(row + t * TILE, p);
        }
    };
    for (int t = 0; t < first_tile; ++t) put(t, zero());
    for (int t = first_tile; t < stop_tile; ++t) {
        const F16 p = exp2<mode>(fma(load(row + t * TILE), all(slope), all(-top_new)));
        total = add(total, p);
        put(t, p);
    }
    for (int t = stop_tile; t < tiles; ++t) put(t, zero());
    store(running.total, total);
    if constexpr (mode == Mode::whole) put_probabilities(row, tiles, most, none, whole_scale);
    return shrink;
}

}  // namespace
