// The products of any number of rows, tiles and vectors of values, by those of as many as fit into registers.
#pragma once

#include "products.h"

namespace {

// Calls with.call<n>() for n = count, 1 .. LIMIT.
template <int LIMIT, class With> inline void with_count(int count, const With &with) {
    if constexpr (LIMIT > 1) {
        if (count < LIMIT) return with_count<LIMIT - 1>(count, with);
    }
    with.template call<LIMIT>();
}

template <Mode mode> struct ScoreRows {
    const char *query;
    int key_size;
    char *const *keys;
    char *const *next;
    int tiles;  // a multiple of KEY_TILES
    float *out;
    int width;
    bool ask;

    template <int ROWS> void call() const {
        int t = 0;
        for (; t + tiles_at_once(ROWS) <= tiles; t += tiles_at_once(ROWS)) at_once<ROWS, tiles_at_once(ROWS)>(t);
        for (; t < tiles; t += KEY_TILES) at_once<ROWS, KEY_TILES>(t);
    }

    template <int ROWS, int TILES> void at_once(int t) const {
        if (ask)
            score_tiles<mode, ROWS, TILES, true>(query, key_size, keys + t, next + t, out + t * TILE, width);
        else
            score_tiles<mode, ROWS, TILES, false>(query, key_size, keys + t, next + t, out + t * TILE, width);
    }
};

template <Mode mode, int ROWS> struct AddVectors {
    Scores probs;
    int row;
    char *const *values, *const *next;
    int tiles, value_size, column;
    float *out;
    int sum_width;
    const float *factors;
    bool ask;

    template <int VECTORS> void call() const {
        if (ask)
            add_values<mode, ROWS, VECTORS, true>(probs, row, values, next, tiles, value_size, column, out, sum_width, factors);
        else
            add_values<mode, ROWS, VECTORS, false>(probs, row, values, next, tiles, value_size, column, out, sum_width, factors);
    }
};

template <Mode mode> struct AddRows {
    Scores probs;
    int row;
    char *const *values, *const *next;
    int tiles, value_size;
    float *out;
    int sum_width;
    const float *factors;
    bool ask;

    template <int ROWS> void call() const {
        for (int column = 0; column < sum_width; column += 16 * VALUE_VECTORS)
            with_count<VALUE_VECTORS>(
                cut(VALUE_VECTORS, (sum_width - column) / 16),
                AddVectors<mode, ROWS>{probs, row, values, next, tiles, value_size, column, out + column, sum_width,
                                       factors, ask});
    }
};

// Rows in turns of as equal a size as can be, none above MAX_ROWS.
template <class Do> inline void in_turns(int rows, const Do &work) {
    const int turns = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int turn = 0, row = 0; turn < turns; ++turn) {
        const int stop = rows * (turn + 1) / turns;
        work(row, stop - row);
        row = stop;
    }
}

}  // namespace
