// The two products of attention, of a few rows with a few tiles, with all sums in registers. Included by attention.h.
#pragma once

#include "layout.h"

namespace {

enum class Mode {
    fp32,   // everything is fp32
    int8,   // keys and values are whole numbers with scales, queries and products fp32
    widen,  // keys and values are bf16, products fp32
    dot,    // keys, values, queries and probabilities are bf16, sums fp32
    int8_dot,  // as dot, over whole numbers that were put down as bf16, with their scales
};
constexpr bool is_dot(Mode mode) { return mode == Mode::dot || mode == Mode::int8_dot; }
constexpr bool has_scales(Mode mode) { return mode == Mode::int8 || mode == Mode::int8_dot; }

// Asks for a line into the second level of cache, which takes more requests at once than the first. What does nothing
// else GCC takes for a function without effect, and drops calls of it: this one, and those that call it alone, are inlined
// by force.
#define ALWAYS_INLINE __attribute__((always_inline)) inline
ALWAYS_INLINE void prefetch(const char *p) { __builtin_prefetch(p, 0, 2); }

// A line of a tile is an element of 16 keys, or a pair of elements where they are bf16; so many bytes.
constexpr bool in_pairs(Mode mode) { return mode == Mode::widen || is_dot(mode); }
constexpr int line_bytes(Mode mode) { return mode == Mode::int8 ? TILE : 64; }

template <Mode mode> ALWAYS_INLINE F16 load_line(const char *from) {
    if constexpr (mode == Mode::int8)
        return load_int8(from);
    else
        return load(reinterpret_cast<const float *>(from));
}

constexpr int cut(int a, int b) { return a < b ? a : b; }
constexpr int raise(int a, int b) { return a > b ? a : b; }

// Memory is asked for so many tiles ahead, and of two neighbouring lines the first alone: the second comes with it, and a
// core has few requests at a time to give away. Measured on Zen 4, where every line cost an eighth more.
constexpr int AHEAD = 4, ASKED_BYTES = 128;

// The scores of a block, or the probabilities that took their place: fp32, or in Mode::dot bf16 from the row's start.
struct Scores {
    float *rows;
    int width;  // floats from row to row

    float *row(int r) const { return rows + static_cast<int64_t>(r) * width; }
};

// Scores of ROWS rows and KEY_TILES tiles. Queries are [row][key_size], fp32 or bf16. With `next`, tiles to come are
// asked for on the way.
template <Mode mode, int ROWS, bool ASK>
inline void score_tiles(const void *query, int key_size, char *const *keys, char *const *next, float *out, int width) {
    F16 sums[ROWS][KEY_TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = zero();
    const int lines = in_pairs(mode) ? key_size / 2 : key_size;
    for (int i = 0; i < lines; ++i) {
        if (ASK && i * line_bytes(mode) % ASKED_BYTES == 0) {
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) prefetch(next[t] + i * line_bytes(mode));
        }
        if constexpr (!in_pairs(mode)) {
            const float *q = static_cast<const float *>(query) + i;
            F16 key[KEY_TILES];
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) key[t] = load_line<mode>(keys[t] + i * line_bytes(mode));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size]);
#pragma GCC unroll 8
                for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = fma(x, key[t], sums[r][t]);
            }
        } else if constexpr (mode == Mode::widen) {
            const float *q = static_cast<const float *>(query) + 2 * i;
            W16 words[KEY_TILES];
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) words[t] = load_words(keys[t] + i * 64);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size]);
#pragma GCC unroll 8
                for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = fma(x, low_halves(words[t]), sums[r][t]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size + 1]);
#pragma GCC unroll 8
                for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = fma(x, high_halves(words[t]), sums[r][t]);
            }
        } else {
#if defined(__AVX512BF16__)
            const uint32_t *q = static_cast<const uint32_t *>(query) + i;
            W16 words[KEY_TILES];
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) words[t] = load_words(keys[t] + i * 64);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = dot(sums[r][t], words[t], q[r * (key_size / 2)]);
#endif
        }
    }
    if constexpr (has_scales(mode)) {
#pragma GCC unroll 8
        for (int t = 0; t < KEY_TILES; ++t) {
            if (ASK) prefetch(next[t] - KEYS_BEHIND_SCALES);
            const F16 scales = load_bf16(keys[t] - KEYS_BEHIND_SCALES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r][t] = mul(sums[r][t], scales);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < KEY_TILES; ++t) store(out + r * width + t * TILE, sums[r][t]);
}

// Adds the values of some tiles, times their probabilities, to ROWS rows of sums [row][sum_width], VECTORS vectors from
// `column` on. What is in the sums already is scaled first, by a factor for each row.
template <Mode mode, int ROWS, int VECTORS, bool ASK>
inline void add_values(Scores probs, int row, char *const *values, int tiles, int value_size, int column, float *out,
                       int sum_width, const float *factors) {
    F16 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n)
            sums[r][n] = mul(load(out + r * sum_width + n * 16), all(factors[r]));
    const float *p = probs.row(row);
    const int lines = in_pairs(mode) ? TILE / 2 : TILE, item = line_bytes(mode) / TILE;
    for (int t = 0; t < tiles; ++t) {
        const char *from = values[t] + column * item;
        const char *next = values[t + AHEAD] + column * item;
        for (int i = 0; i < lines; ++i, from += value_size * item, next += value_size * item) {
            if constexpr (ASK) {
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; n += ASKED_BYTES / line_bytes(mode)) prefetch(next + n * line_bytes(mode));
            }
            if constexpr (!in_pairs(mode)) {
                F16 value[VECTORS];
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) value[n] = load_line<mode>(from + n * line_bytes(mode));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const F16 x = all(p[r * probs.width + t * TILE + i]);
#pragma GCC unroll 8
                    for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, value[n], sums[r][n]);
                }
            } else if constexpr (mode == Mode::widen) {
                W16 words[VECTORS];
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) words[n] = load_words(from + n * 64);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const F16 x = all(p[r * probs.width + t * TILE + 2 * i]);
#pragma GCC unroll 8
                    for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, low_halves(words[n]), sums[r][n]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const F16 x = all(p[r * probs.width + t * TILE + 2 * i + 1]);
#pragma GCC unroll 8
                    for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, high_halves(words[n]), sums[r][n]);
                }
            } else {
#if defined(__AVX512BF16__)
                W16 words[VECTORS];
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) words[n] = load_words(from + n * 64);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    uint32_t pair;
                    memcpy(&pair, p + r * probs.width + t * (TILE / 2) + i, 4);
#pragma GCC unroll 8
                    for (int n = 0; n < VECTORS; ++n) sums[r][n] = dot(sums[r][n], words[n], pair);
                }
#endif
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) store(out + r * sum_width + n * 16, sums[r][n]);
}

// Calls with.template operator()<n>() for n = count, 1 .. LIMIT.
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
    float *out;
    int width;
    bool ask;

    template <int ROWS> void call() const {
        if (ask)
            score_tiles<mode, ROWS, true>(query, key_size, keys, next, out, width);
        else
            score_tiles<mode, ROWS, false>(query, key_size, keys, next, out, width);
    }
};

template <Mode mode, int ROWS> struct AddVectors {
    Scores probs;
    int row;
    char *const *values;
    int tiles, value_size, column;
    float *out;
    int sum_width;
    const float *factors;
    bool ask;

    template <int VECTORS> void call() const {
        if (ask)
            add_values<mode, ROWS, VECTORS, true>(probs, row, values, tiles, value_size, column, out, sum_width, factors);
        else
            add_values<mode, ROWS, VECTORS, false>(probs, row, values, tiles, value_size, column, out, sum_width, factors);
    }
};

template <Mode mode> struct AddRows {
    Scores probs;
    int row;
    char *const *values;
    int tiles, value_size;
    float *out;
    int sum_width;
    const float *factors;
    bool ask;

    template <int ROWS> void call() const {
        for (int column = 0; column < sum_width; column += 16 * VALUE_VECTORS)
            with_count<VALUE_VECTORS>(
                cut(VALUE_VECTORS, (sum_width - column) / 16),
                AddVectors<mode, ROWS>{probs, row, values, tiles, value_size, column, out + column, sum_width, factors,
                                       ask});
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
