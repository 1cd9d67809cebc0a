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
    whole,     // all are whole numbers with scales (whole_numbers.h)
};
constexpr bool is_dot(Mode mode) { return mode == Mode::dot || mode == Mode::int8_dot; }
// Whether queries and probabilities are in pairs, too, so that one product takes two elements.
constexpr bool multiplies_pairs(Mode mode) { return is_dot(mode) || mode == Mode::whole; }
constexpr bool has_scales(Mode mode) { return mode == Mode::int8 || mode == Mode::int8_dot || mode == Mode::whole; }

// Asks for a line into the second level of cache, which takes more requests at once than the first. What does nothing
// else GCC takes for a function without effect, and drops calls of it: this one, and those that call it alone, are inlined
// by force.
#define ALWAYS_INLINE __attribute__((always_inline)) inline
ALWAYS_INLINE void prefetch(const char *p) { __builtin_prefetch(p, 0, 2); }

// A line of a tile is an element of 16 keys, or a pair of elements where they have less than 32 bits; so many bytes.
constexpr bool in_pairs(Mode mode) { return mode != Mode::fp32; }
constexpr int line_bytes(Mode mode) { return mode == Mode::int8 || mode == Mode::whole ? 2 * TILE : 4 * TILE; }

// A line of pairs, and the first or the second of each as floats.
template <Mode mode> ALWAYS_INLINE W16 load_pairs(const char *from) {
    if constexpr (line_bytes(mode) == 2 * TILE)
        return load_int8_pairs(from);
    else
        return load_words(from);
}
template <Mode mode> ALWAYS_INLINE F16 low_of(W16 w) {
    if constexpr (mode == Mode::int8)
        return low_numbers(w);
    else
        return low_halves(w);
}
template <Mode mode> ALWAYS_INLINE F16 high_of(W16 w) {
    if constexpr (mode == Mode::int8)
        return high_numbers(w);
    else
        return high_halves(w);
}

constexpr int cut(int a, int b) { return a < b ? a : b; }
constexpr int raise(int a, int b) { return a > b ? a : b; }

// A core has few requests for memory under way at once, its own and those that the processor makes by itself for what it
// takes for a stream. So tiles go by side by side, as many streams; and each is asked for so many tiles ahead, of two
// neighbouring lines the first alone, since the second comes with it. Measured on Zen 4, one core, over runs of 12 KiB at
// random: 11 GB/s read one after the other, 18 asked for ahead, 24 in eight streams; with every line asked for, 20.
constexpr int ABREAST = 8, ASKED_BYTES = 128;

// Tiles whose scores with so many rows are computed at once; any number of tiles are some of these and some KEY_TILES.
constexpr int tiles_at_once(int rows) { return cut(ABREAST, raise(1, MAX_ROWS / rows) * KEY_TILES); }

// 16 numbers as bf16.
inline void store_rounded(uint16_t *p, F16 a) {
#if defined(__AVX512BF16__)
    store_bf16(p, a);
#else
    float numbers[16];
    store(numbers, a);
    for (int i = 0; i < 16; ++i) p[i] = bf16_of(numbers[i]);
#endif
}

// The scores of a block, or the probabilities that took their place: fp32; where products are of bf16, that, from the row's
// start; in Mode::whole numbers of 16 bits from there, and what one stands for in the place behind the last tile.
struct Scores {
    float *rows;
    int width;  // floats from row to row

    float *row(int r) const { return rows + static_cast<int64_t>(r) * width; }
};

// Where a row's scale is in Mode::whole.
inline float *scale_behind(const Scores &probs, int row) { return probs.row(row) + probs.width - TILE; }

// Bytes from row to row of queries; in Mode::whole what a row's numbers stand for is behind them.
template <Mode mode> constexpr int64_t query_row_bytes(int key_size) {
    return static_cast<int64_t>(key_size) * (multiplies_pairs(mode) ? 2 : 4) + (mode == Mode::whole ? 4 : 0);
}

// Sums as they are kept in registers: floats, or in Mode::whole whole numbers.
template <Mode mode> struct Sum {
    typedef F16 type;
    static F16 nothing() { return zero(); }
};
template <> struct Sum<Mode::whole> {
    typedef W16 type;
    static W16 nothing() { return no_words(); }
};

// Scores of ROWS rows and TILES tiles. Queries are [row][key_size], fp32, bf16 or whole numbers. With ASK, tiles to come are
// asked for on the way.
template <Mode mode, int ROWS, int TILES, bool ASK>
inline void score_tiles(const char *query, int key_size, char *const *keys, char *const *next, float *out, int width) {
    typename Sum<mode>::type sums[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < TILES; ++t) sums[r][t] = Sum<mode>::nothing();
    const int64_t row_bytes = query_row_bytes<mode>(key_size);
    const int lines = in_pairs(mode) ? key_size / 2 : key_size;
    for (int i = 0; i < lines; ++i) {
        if (ASK && i * line_bytes(mode) % ASKED_BYTES == 0) {
#pragma GCC unroll 8
            for (int t = 0; t < TILES; ++t) prefetch(next[t] + i * line_bytes(mode));
        }
        if constexpr (!in_pairs(mode)) {
            const float *q = reinterpret_cast<const float *>(query) + i;
            F16 key[TILES];
#pragma GCC unroll 8
            for (int t = 0; t < TILES; ++t) key[t] = load(reinterpret_cast<const float *>(keys[t] + i * line_bytes(mode)));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size]);
#pragma GCC unroll 8
                for (int t = 0; t < TILES; ++t) sums[r][t] = fma(x, key[t], sums[r][t]);
            }
        } else if constexpr (!multiplies_pairs(mode)) {
            const float *q = reinterpret_cast<const float *>(query) + 2 * i;
            W16 words[TILES];
#pragma GCC unroll 8
            for (int t = 0; t < TILES; ++t) words[t] = load_pairs<mode>(keys[t] + i * line_bytes(mode));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size]);
#pragma GCC unroll 8
                for (int t = 0; t < TILES; ++t) sums[r][t] = fma(x, low_of<mode>(words[t]), sums[r][t]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const F16 x = all(q[r * key_size + 1]);
#pragma GCC unroll 8
                for (int t = 0; t < TILES; ++t) sums[r][t] = fma(x, high_of<mode>(words[t]), sums[r][t]);
            }
        } else {
            uint32_t pairs[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) memcpy(&pairs[r], query + r * row_bytes + 4 * i, 4);
#pragma GCC unroll 8
            for (int t = 0; t < TILES; ++t) {
                const W16 words = load_pairs<mode>(keys[t] + i * line_bytes(mode));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sums[r][t] = dot(sums[r][t], words, pairs[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; ++t) {
        F16 scales;
        if constexpr (has_scales(mode)) {
            if (ASK) prefetch(next[t] - KEYS_BEHIND_SCALES);
            scales = load_bf16(keys[t] - KEYS_BEHIND_SCALES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            F16 scores = numbers_of(sums[r][t]);
            if constexpr (has_scales(mode)) scores = mul(scores, scales);
            if constexpr (mode == Mode::whole) {
                float scale;
                memcpy(&scale, query + (r + 1) * row_bytes - 4, 4);
                scores = mul(scores, all(scale));
            }
            store(out + r * width + t * TILE, scores);
        }
    }
}

// Adds one line of VECTORS vectors of values to the sums of ROWS rows: of one key, or of two where they are in pairs.
// `probs` are those of these keys, `width` floats from row to row.
template <Mode mode, int ROWS, int VECTORS>
ALWAYS_INLINE void add_line(const char *from, const float *probs, int width, typename Sum<mode>::type (&sums)[ROWS][VECTORS]) {
    if constexpr (!in_pairs(mode)) {
        F16 value[VECTORS];
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) value[n] = load(reinterpret_cast<const float *>(from + n * line_bytes(mode)));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 x = all(probs[r * width]);
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, value[n], sums[r][n]);
        }
        return;
    }
    W16 words[VECTORS];
#pragma GCC unroll 8
    for (int n = 0; n < VECTORS; ++n) words[n] = load_pairs<mode>(from + n * line_bytes(mode));
    if constexpr (!multiplies_pairs(mode)) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 x = all(probs[r * width]);
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, low_of<mode>(words[n]), sums[r][n]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 x = all(probs[r * width + 1]);
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) sums[r][n] = fma(x, high_of<mode>(words[n]), sums[r][n]);
        }
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            uint32_t pair;
            memcpy(&pair, probs + r * width, 4);
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) sums[r][n] = dot(sums[r][n], words[n], pair);
        }
    }
}

// Adds the values of some tiles, times their probabilities, to ROWS rows of sums [row][sum_width], VECTORS vectors from
// `column` on. What is in the sums already is scaled first, by a factor for each row. In Mode::whole no more than ABREAST
// tiles, whose sums 32 bits hold.
template <Mode mode, int ROWS, int VECTORS, bool ASK>
inline void add_values(Scores probs, int row, char *const *values, char *const *next, int tiles, int value_size, int column,
                       float *out, int sum_width, const float *factors) {
    const auto before = [=](int r, int n) { return mul(load(out + r * sum_width + n * 16), all(factors[r])); };
    typename Sum<mode>::type sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) {
            if constexpr (mode == Mode::whole)
                sums[r][n] = Sum<mode>::nothing();
            else
                sums[r][n] = before(r, n);
        }
    // Probabilities of a tile, and of a line, in floats.
    constexpr int of_tile = multiplies_pairs(mode) ? TILE / 2 : TILE;
    constexpr int of_line = in_pairs(mode) && !multiplies_pairs(mode) ? 2 : 1;
    const int lines = in_pairs(mode) ? TILE / 2 : TILE;
    const int64_t item = line_bytes(mode) / TILE;
    for (int first = 0; first < tiles; first += ABREAST) {
        const int stop = cut(first + ABREAST, tiles);
        for (int i = 0; i < lines; ++i) {
            const int64_t at = (column + static_cast<int64_t>(i) * value_size) * item;
            const float *p = probs.row(row) + i * of_line;
            for (int t = first; t < stop; ++t) {
                if constexpr (ASK) {
#pragma GCC unroll 8
                    for (int n = 0; n < VECTORS; n += ASKED_BYTES / line_bytes(mode)) prefetch(next[t] + at + n * line_bytes(mode));
                }
                add_line<mode, ROWS, VECTORS>(values[t] + at, p + t * of_tile, probs.width, sums);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) {
            F16 now = numbers_of(sums[r][n]);
            if constexpr (mode == Mode::whole) now = fma(now, all(*scale_behind(probs, row + r)), before(r, n));
            store(out + r * sum_width + n * 16, now);
        }
}

}  // namespace
