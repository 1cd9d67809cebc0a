// Attention of some queries over a run of pages, written once and compiled for each instruction set.
//
// A file of an instruction set includes its vectors, then this, and defines the Kernels that step.cpp calls. All of it
// is local to that file, and nothing here comes from the standard library: what two files had in common would be merged
// by the linker, and code made for one processor would run on another.
//
// Queries of an item, times the query heads of the KV head, are the rows. Keys go by in blocks; for each block
//
//     scores   rows x keys, MAX_ROWS x KEY_TILES sums in registers at once
//     softmax  row by row, the running top and total as in FlashAttention (Dao et al. 2022, algorithm 1)
//     values   rows x value_size, MAX_ROWS x VALUE_VECTORS sums in registers at once
//
// A decode step of a few heads is the same with few rows; what it needs of memory is asked for one tile ahead.
#pragma once

#include "layout.h"
#include "work.h"

namespace {

enum class Mode {
    fp32,   // everything is fp32
    widen,  // keys and values are bf16, products fp32
    dot,    // keys, values, queries and probabilities are bf16, sums fp32
};

constexpr int cut(int a, int b) { return a < b ? a : b; }
constexpr int raise(int a, int b) { return a > b ? a : b; }

// Powers of two. fp32: Cephes' exp2f, its polynomial on [-0.5, 0.5] within 1.7e-7. For probabilities that are rounded
// to bf16 a shorter one does, within 7.5e-5.
template <Mode mode> inline F16 exp2(F16 x) {
    const F16 whole = round_to_int(x), rest = sub(x, whole);
    F16 p;
    if constexpr (mode == Mode::dot) {
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

// The scores of a block, or the probabilities that took their place: fp32, or in Mode::dot bf16 from the row's start.
struct Scores {
    float *rows;
    int width;  // floats from row to row

    float *row(int r) const { return rows + static_cast<int64_t>(r) * width; }
};

// Rows whose scores are kept at once, bytes of the pages of a block, which stay in the second level of cache meanwhile,
// and how many tiles ahead memory is asked for. Measured on Zen 4; all three are flat within a factor of two.
constexpr int CHUNK_ROWS = 12, BLOCK_BYTES = 256 << 10, AHEAD = 8, GATHER_AHEAD = 3;

// Asks for a line into the second level of cache, which takes more requests at once than the first.
inline void prefetch(const char *p) { __builtin_prefetch(p, 0, 2); }

// Scores of ROWS rows and KEY_TILES tiles. Queries are [row][key_size], fp32 or bf16. With `next`, tiles to come are
// asked for on the way.
template <Mode mode, int ROWS, bool ASK>
inline void score_tiles(const void *query, int key_size, char *const *keys, char *const *next, float *out, int width) {
    F16 sums[ROWS][KEY_TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < KEY_TILES; ++t) sums[r][t] = zero();
    // A line of a tile is 16 words: one element of 16 keys in fp32, a pair of them in bf16.
    const int lines = mode == Mode::fp32 ? key_size : key_size / 2;
    for (int i = 0; i < lines; ++i) {
        if constexpr (ASK) {
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) prefetch(next[t] + i * 64);
        }
        if constexpr (mode == Mode::fp32) {
            const float *q = static_cast<const float *>(query) + i;
            F16 key[KEY_TILES];
#pragma GCC unroll 8
            for (int t = 0; t < KEY_TILES; ++t) key[t] = load(reinterpret_cast<const float *>(keys[t] + i * 64));
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
    const int lines = mode == Mode::fp32 ? TILE : TILE / 2;
    for (int t = 0; t < tiles; ++t) {
        const char *from = values[t] + column * 4;
        const char *next = values[t + AHEAD] + column * 4;
        for (int i = 0; i < lines; ++i, from += value_size * 4, next += value_size * 4) {
            if constexpr (ASK) {
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) prefetch(next + n * 64);
            }
            if constexpr (mode == Mode::fp32) {
                F16 value[VECTORS];
#pragma GCC unroll 8
                for (int n = 0; n < VECTORS; ++n) value[n] = load(reinterpret_cast<const float *>(from + n * 64));
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

// What the softmax of one row keeps from block to block. Tops are of scores times log2(e).
struct Running {
    float top;
    float total[16];
};

// Turns a row of scores into probabilities of keys from .. to among `tiles` tiles, and 0 elsewhere; returns the factor
// for what was summed before. A score is `slope` times what stands there, bent by the softcap where there is one.
template <Mode mode>
inline float soften(float *row, int tiles, int from, int to, float slope, float softcap, Running &running) {
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
    const auto put = [row](int t, F16 p) {
        if constexpr (mode == Mode::dot) {
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
    return shrink;
}

// Copies the values of a tile, 0 in place of keys from .. to do not name: a probability of 0 removes no NaN.
inline void copy_values(const akv_layer *layer, const char *from_tile, int from, int to, char *out) {
    const int words = layer->value_size, lines = layer->dtype == AKV_FP32 ? TILE : TILE / 2, each = TILE / lines;
    for (int i = 0; i < lines; ++i) {
        uint32_t keep = 0;
        for (int half = 0; half < each; ++half) {
            const int j = i * each + half;
            if (j >= from && j < to) keep |= each == 1 ? 0xffffffffu : 0xffffu << 16 * half;
        }
        const uint32_t *source = reinterpret_cast<const uint32_t *>(from_tile) + static_cast<int64_t>(i) * words;
        uint32_t *target = reinterpret_cast<uint32_t *>(out) + static_cast<int64_t>(i) * words;
        for (int v = 0; v < words; ++v) target[v] = source[v] & keep;
    }
}

// Words of a key to every TILE-th word.
inline void spread(const uint32_t *__restrict key, int words, uint32_t *__restrict out) {
    for (int i = 0; i < words; ++i) out[i * TILE] = key[i];
}

// Two rows of bf16, element by element side by side.
inline void interleave(const uint16_t *__restrict low, const uint16_t *__restrict high, int n, uint32_t *__restrict out) {
    for (int i = 0; i < n; ++i) out[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
}

// Puts a tile together from pages that have none. Keys from .. to of those that start at token `base`; the others are 0.
inline void gather_tile(const Layout &layout, const Item &item, int head, int base, int from, int to, char *out) {
    const akv_layer *layer = layout.layer;
    const int value_size = layer->value_size, page_size = layer->page_size;
    alignas(64) static const char nothing[MOST_TOKEN_BYTES] = {};
    const char *tokens[TILE];
    for (int j = 0; j < TILE; ++j) {
        const int token = base + j;
        tokens[j] = j < from || j >= to ? nothing
                                        : layout.tile(item.pages[token / page_size], head, token % page_size);
    }
    uint32_t *words = reinterpret_cast<uint32_t *>(out);
    const int64_t key_bytes = layer->key_size * layout.item;
    for (int j = 0; j < TILE; ++j)
        spread(reinterpret_cast<const uint32_t *>(tokens[j]), static_cast<int>(key_bytes / 4), words + j);
    words += key_bytes / 4 * TILE;
    if (layer->dtype == AKV_FP32) {
        for (int j = 0; j < TILE; ++j, words += value_size)
            memcpy(words, tokens[j] + key_bytes, static_cast<size_t>(value_size) * 4);
        return;
    }
    for (int j = 0; j < TILE; j += 2, words += value_size)
        interleave(reinterpret_cast<const uint16_t *>(tokens[j] + key_bytes),
                   reinterpret_cast<const uint16_t *>(tokens[j + 1] + key_bytes), value_size, words);
}

// Asks for the tokens that gather_tile will read. Inlined by force: GCC takes a function that only asks for one without
// effect, and drops calls of it.
__attribute__((always_inline)) inline void ask_for_tokens(const Layout &layout, const Item &item, int head, int from, int to) {
    for (int token = from; token < to; ++token) {
        const char *start = layout.tile(item.pages[token / layout.layer->page_size], head, token % layout.layer->page_size);
        for (int64_t at = 0; at < layout.token_bytes; at += 64) prefetch(start + at);
    }
}

// How one item's memory is divided.
struct Sizes {
    int rows, chunk_rows, block_tiles, score_width, sum_width;
    size_t tile_bytes;

    Sizes(const Work &work, int num_rows) {
        const akv_layer *layer = work.layer;
        rows = num_rows * (work.call->num_heads / layer->kv_heads);
        chunk_rows = cut(rows, CHUNK_ROWS);
        const int most = static_cast<int>(BLOCK_BYTES / (Layout(layer).token_bytes * TILE)) / 4 * 4;
        block_tiles = cut(raise(most, 8), 64);
        score_width = block_tiles * TILE + 16;
        sum_width = (layer->value_size + 15) / 16 * 16;
        tile_bytes = static_cast<size_t>(Layout(layer).token_bytes) * TILE + SLACK;
    }

    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
    size_t query_bytes(const Work &work) const { return rounded(static_cast<size_t>(rows) * work.layer->key_size * 4); }
    size_t score_bytes() const { return rounded(sizeof(float) * chunk_rows * score_width); }
    size_t sum_bytes() const { return rounded(sizeof(float) * rows * sum_width); }
    size_t running_bytes() const { return rounded(sizeof(Running) * rows); }
    size_t factor_bytes() const { return rounded(sizeof(float) * chunk_rows); }
    size_t pointer_bytes() const { return rounded(sizeof(char *) * (2 * block_tiles + AHEAD + 2 * KEY_TILES)); }
    size_t gathered_bytes() const { return rounded(tile_bytes) * block_tiles; }
    size_t all(const Work &work) const {
        return query_bytes(work) + score_bytes() + sum_bytes() + running_bytes() + factor_bytes() + pointer_bytes() +
               gathered_bytes() + 64;
    }
};

size_t scratch_bytes(const Work &work, int num_rows) { return Sizes(work, num_rows).all(work); }

template <Mode mode> inline void pack_queries(const Work &work, const Item &item, int head, int group, void *out) {
    const akv_call *call = work.call;
    const int key_size = work.layer->key_size;
    for (int i = 0; i < item.num_rows; ++i)
        for (int g = 0; g < group; ++g) {
            const int64_t at = work.rows[item.first_row + i].token * call->query_token_stride +
                               (static_cast<int64_t>(head) * group + g) * call->query_head_stride;
            const int64_t row = (static_cast<int64_t>(i) * group + g) * key_size;
            if constexpr (mode == Mode::fp32)
                memcpy(static_cast<float *>(out) + row, static_cast<const float *>(call->query) + at,
                       static_cast<size_t>(key_size) * 4);
            else if constexpr (mode == Mode::dot)
                memcpy(static_cast<uint16_t *>(out) + row, static_cast<const uint16_t *>(call->query) + at,
                       static_cast<size_t>(key_size) * 2);
            else
                for (int d = 0; d < key_size; ++d)
                    static_cast<float *>(out)[row + d] = float_of(static_cast<const uint16_t *>(call->query)[at + d]);
        }
}

// The answer of a row, or its part of one.
inline void finish(const Work &work, const Row &row, int head, const Running &running, const float *sums) {
    const akv_call *call = work.call;
    const int value_size = work.layer->value_size;
    float total = sum(load(running.total));
    if (row.slot >= 0) {
        float *part = work.partials + (static_cast<int64_t>(row.slot) * call->num_heads + head) * work.partial_width;
        part[0] = running.top;
        part[1] = total;
        memcpy(part + 2, sums, sizeof(float) * value_size);
        return;
    }
    float factor = 1;
    if (call->sinks) {
        // The sink joins the denominator; the top is raised to it, so that no power overflows.
        const float sink = call->sinks[head] * LOG2E, top_both = sink > running.top ? sink : running.top;
        factor = exp2_of(running.top - top_both);
        total = total * factor + exp2_of(sink - top_both);
    }
    factor /= total;
    const int64_t at = (static_cast<int64_t>(row.token) * call->num_heads + head) * value_size;
    if (work.layer->dtype == AKV_FP32)
        for (int v = 0; v < value_size; ++v) static_cast<float *>(call->out)[at + v] = sums[v] * factor;
    else
        for (int v = 0; v < value_size; ++v) static_cast<uint16_t *>(call->out)[at + v] = bf16_of(sums[v] * factor);
}

template <Mode mode> void attend_item(const Work &work, const Item &item, int head, char *scratch) {
    const Layout layout(work.layer);
    const akv_layer *layer = work.layer;
    const akv_call *call = work.call;
    const Sizes sizes(work, item.num_rows);
    const int rows = sizes.rows, group = rows / item.num_rows, key_size = layer->key_size;

    scratch = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
    const auto take = [&scratch](size_t bytes) { return (scratch += bytes) - bytes; };
    char *query = take(sizes.query_bytes(work));
    const Scores scores{reinterpret_cast<float *>(take(sizes.score_bytes())), sizes.score_width};
    float *sums = reinterpret_cast<float *>(take(sizes.sum_bytes()));
    Running *running = reinterpret_cast<Running *>(take(sizes.running_bytes()));
    float *factors = reinterpret_cast<float *>(take(sizes.factor_bytes()));
    char **keys = reinterpret_cast<char **>(take(sizes.pointer_bytes()));
    char *gathered = take(sizes.gathered_bytes());

    pack_queries<mode>(work, item, head, group, query);
    const int query_row_bytes = key_size * (mode == Mode::dot ? 2 : 4);
    memset(sums, 0, sizes.sum_bytes());
    memset(running, 0, sizes.running_bytes());
    for (int r = 0; r < rows; ++r) running[r].top = NO_SCORE;

    const float slope = call->softcap != 0 ? call->scale / call->softcap : call->scale * LOG2E;
    const bool ahead = layout.tiled;
    for (int start = item.key_begin / TILE * TILE; start < item.key_end; start += sizes.block_tiles * TILE) {
        const int tiles = cut(sizes.block_tiles, (item.key_end - start + TILE - 1) / TILE);
        // Pointers stand in the order in which they are followed, so that what is wanted soon is asked for soon enough.
        const int padded = (tiles + KEY_TILES - 1) / KEY_TILES * KEY_TILES;
        char **values = keys + padded;
        for (int t = 0; t < tiles; ++t) {
            const int base = start + t * TILE;
            const int from = raise(item.key_begin - base, 0), to = cut(item.key_end - base, TILE);
            char *spare = gathered + Sizes::rounded(sizes.tile_bytes) * t;
            if (layout.tiled) {
                keys[t] = layout.tile(item.pages[base / layer->page_size], head, base % layer->page_size);
                values[t] = layout.values_of(keys[t]);
                if (to - from < TILE) {
                    copy_values(layer, values[t], from, to, spare);
                    values[t] = spare;
                }
            } else {
                const int soon = base + GATHER_AHEAD * TILE;
                ask_for_tokens(layout, item, head, soon, cut(soon + TILE, item.key_end));
                gather_tile(layout, item, head, base, from, to, spare);
                keys[t] = spare;
                values[t] = spare + key_size * TILE * layout.item;
            }
        }
        // Scores are computed KEY_TILES at a time.
        for (int t = tiles; t < padded; ++t) keys[t] = keys[tiles - 1];
        // What comes after: the keys of the next block, where there is one; else what was just read, which costs nothing.
        char **after = values + tiles;
        for (int t = 0; t < AHEAD + KEY_TILES; ++t) {
            const int base = start + (sizes.block_tiles + t) * TILE;
            after[t] = ahead && base < item.key_end
                           ? layout.tile(item.pages[base / layer->page_size], head, base % layer->page_size)
                           : values[tiles - 1];
        }

        // So many rows at a time that their scores stay in the first level of cache; the pages are in the second then.
        for (int low = 0; low < rows; low += sizes.chunk_rows) {
            const int count = cut(sizes.chunk_rows, rows - low);
            for (int t = 0; t < padded; t += KEY_TILES)
                in_turns(count, [&](int row, int turn_rows) {
                    with_count<MAX_ROWS>(
                        turn_rows, ScoreRows<mode>{query + static_cast<int64_t>(low + row) * query_row_bytes, key_size,
                                                   keys + t, keys + t + AHEAD, scores.row(row) + t * TILE, scores.width,
                                                   ahead && low + row == 0});
                });
            for (int r = 0; r < count; ++r) {
                const int position = work.rows[item.first_row + (low + r) / group].position;
                int from = item.key_begin, to = cut(item.key_end, position + 1);
                if (call->window) from = raise(from, position - call->window + 1);
                from = raise(from - start, 0);
                to = cut(to - start, tiles * TILE);
                factors[r] = soften<mode>(scores.row(r), tiles, from, to, slope, call->softcap, running[low + r]);
            }
            in_turns(count, [&](int row, int turn_rows) {
                with_count<MAX_ROWS>(turn_rows, AddRows<mode>{scores, row, values, tiles, layer->value_size,
                                                              sums + static_cast<int64_t>(low + row) * sizes.sum_width,
                                                              sizes.sum_width, factors + row, ahead && low + row == 0});
            });
        }
    }
    for (int r = 0; r < rows; ++r)
        finish(work, work.rows[item.first_row + r / group], head * group + r % group, running[r],
               sums + static_cast<int64_t>(r) * sizes.sum_width);
}

void attend(const Work &work, const Item &item, int head, char *scratch) {
    if (work.layer->dtype == AKV_FP32) return attend_item<Mode::fp32>(work, item, head, scratch);
#if defined(__AVX512BF16__)
    attend_item<Mode::dot>(work, item, head, scratch);
#else
    attend_item<Mode::widen>(work, item, head, scratch);
#endif
}

uint64_t read(const Work &work, const Item &item, int head) {
    const Layout layout(work.layer);
    const int step = layout.tiled ? TILE : 1;
    const int64_t bytes = layout.token_bytes * step;
    W16 mixed[4] = {};
    for (int token = item.key_begin / step * step; token < item.key_end; token += step) {
        const char *from = layout.tile(item.pages[token / work.layer->page_size], head, token % work.layer->page_size);
        int64_t at = 0;
        for (; at + 256 <= bytes; at += 256)
            for (int i = 0; i < 4; ++i) mixed[i] = mix(mixed[i], load_words(from + at + 64 * i));
        for (; at + 64 <= bytes; at += 64) mixed[0] = mix(mixed[0], load_words(from + at));
    }
    return folded(mix(mix(mixed[0], mixed[1]), mix(mixed[2], mixed[3])));
}

}  // namespace
