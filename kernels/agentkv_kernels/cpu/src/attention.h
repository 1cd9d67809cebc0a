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
#include "products.h"
#include "softmax.h"
#include "tiles.h"
#include "work.h"

namespace {

// Rows whose scores are kept at once, and bytes of the pages of a block; both stay in the second level of cache
// meanwhile. Measured on Zen 4, where they are flat within a factor of two. In chunks of 12 rows, whose scores fit the
// first level, no prefill was faster, and sixteen sequences over one prefix took 5 % longer: now the keys of some tiles
// are in the first level while all rows of a chunk meet them.
constexpr int CHUNK_ROWS = 48, BLOCK_BYTES = 256 << 10;

// Whether whole numbers are put down as bf16 first. It pays where more rows read them than are computed at once.
inline bool puts_down(const Work &work, int rows) {
#if defined(__AVX512BF16__)
    return work.layer->kv_dtype == AKV_INT8 && work.layer->dtype == AKV_BF16 && rows > CHUNK_ROWS;
#else
    return static_cast<void>(work), static_cast<void>(rows), false;
#endif
}

// How one item's memory is divided.
struct Sizes {
    int rows, chunk_rows, block_tiles, score_width, sum_width;
    size_t tile_bytes;

    Sizes(const Work &work, int num_rows) {
        const akv_layer *layer = work.layer;
        rows = num_rows * (work.call->num_heads / layer->kv_heads);
        chunk_rows = cut(rows, CHUNK_ROWS);
        int64_t token_bytes = Layout(layer).token_bytes;
        if (puts_down(work, rows)) token_bytes += static_cast<int64_t>(layer->key_size) + layer->value_size;
        const int most = static_cast<int>(BLOCK_BYTES / (token_bytes * TILE)) / 4 * 4;
        block_tiles = cut(raise(most, 8), 64);
        score_width = block_tiles * TILE + 16;
        sum_width = (layer->value_size + 15) / 16 * 16;
        tile_bytes = static_cast<size_t>(token_bytes) * TILE + SLACK;
    }

    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
    size_t query_bytes(const Work &work) const { return rounded(static_cast<size_t>(rows) * work.layer->key_size * 4); }
    size_t score_bytes() const { return rounded(sizeof(float) * chunk_rows * score_width); }
    size_t sum_bytes() const { return rounded(sizeof(float) * rows * sum_width); }
    size_t running_bytes() const { return rounded(sizeof(Running) * rows); }
    size_t factor_bytes() const { return rounded(sizeof(float) * chunk_rows); }
    size_t scale_bytes() const { return sizeof(float) * block_tiles * TILE; }
    size_t pointer_bytes() const { return rounded(sizeof(char *) * (2 * block_tiles + AHEAD + 2 * KEY_TILES)); }
    size_t gathered_bytes() const { return rounded(tile_bytes) * (block_tiles + 1); }
    size_t all(const Work &work) const {
        return query_bytes(work) + score_bytes() + sum_bytes() + running_bytes() + factor_bytes() + scale_bytes() +
               pointer_bytes() + gathered_bytes() + 64;
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
            if constexpr (is_dot(mode))
                memcpy(static_cast<uint16_t *>(out) + row, static_cast<const uint16_t *>(call->query) + at,
                       static_cast<size_t>(key_size) * 2);
            else if (work.layer->dtype == AKV_FP32)
                memcpy(static_cast<float *>(out) + row, static_cast<const float *>(call->query) + at,
                       static_cast<size_t>(key_size) * 4);
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

// One item for one KV head: its memory, and the walk over its keys.
template <Mode mode> class Attending {
  public:
    Attending(const Work &work, const Item &item, int head, char *scratch)
        : work(work), item(item), layer(work.layer), call(work.call), head(head), layout(work.layer),
          sizes(work, item.num_rows), group(sizes.rows / item.num_rows) {
        scratch = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
        const auto take = [&scratch](size_t bytes) { return (scratch += bytes) - bytes; };
        query = take(sizes.query_bytes(work));
        scores = {reinterpret_cast<float *>(take(sizes.score_bytes())), sizes.score_width};
        sums = reinterpret_cast<float *>(take(sizes.sum_bytes()));
        running = reinterpret_cast<Running *>(take(sizes.running_bytes()));
        factors = reinterpret_cast<float *>(take(sizes.factor_bytes()));
        value_scales = reinterpret_cast<float *>(take(sizes.scale_bytes()));
        keys = reinterpret_cast<char **>(take(sizes.pointer_bytes()));
        gathered = take(sizes.gathered_bytes());
    }

    void run() {
        pack_queries<mode>(work, item, head, group, query);
        memset(sums, 0, sizes.sum_bytes());
        memset(running, 0, sizes.running_bytes());
        for (int r = 0; r < sizes.rows; ++r) running[r].top = NO_SCORE;
        for (start = item.key_begin / TILE * TILE; start < item.key_end; start += sizes.block_tiles * TILE) {
            find_tiles();
            for (int low = 0; low < sizes.rows; low += sizes.chunk_rows) {
                const int count = cut(sizes.chunk_rows, sizes.rows - low);
                score(low, count);
                if (has_scales(mode) && low == 0) find_value_scales();
                for (int r = 0; r < count; ++r) factors[r] = soften_row(low + r, scores.row(r));
                in_turns(count, [&](int row, int turn_rows) {
                    with_count<MAX_ROWS>(turn_rows, AddRows<mode>{scores, row, values, tiles, layer->value_size,
                                                                  sums_of(low + row), sizes.sum_width, factors + row,
                                                                  asks_in_turn(low + row)});
                });
            }
        }
        for (int r = 0; r < sizes.rows; ++r)
            finish(work, row_of(r), head * group + r % group, running[r], sums_of(r));
    }

  private:
    const Row &row_of(int r) const { return work.rows[item.first_row + r / group]; }
    float *sums_of(int r) const { return sums + static_cast<int64_t>(r) * sizes.sum_width; }
    char *tile_at(int token) const {
        return layout.tile(item.pages[token / layer->page_size], head, token % layer->page_size);
    }
    int next_block() const { return start + sizes.block_tiles * TILE; }

    // Where the tiles of this block are: in the pages, or put together in `gathered`.
    void find_tiles() {
        tiles = cut(sizes.block_tiles, (item.key_end - start + TILE - 1) / TILE);
        padded = (tiles + KEY_TILES - 1) / KEY_TILES * KEY_TILES;
        // Pointers stand in the order in which they are followed, so that what is wanted soon is asked for soon enough.
        values = keys + padded;
        for (int t = 0; t < tiles; ++t) find_tile(t);
        // Scores are computed KEY_TILES at a time.
        for (int t = tiles; t < padded; ++t) keys[t] = keys[tiles - 1];
        // What comes after: the keys of the next block, where there is one; else what was just read, which costs nothing.
        for (int t = 0; t < AHEAD + KEY_TILES; ++t) {
            const int base = next_block() + t * TILE;
            values[tiles + t] = layout.tiled && base < item.key_end ? layout.keys_of(tile_at(base)) : values[tiles - 1];
        }
    }

    void find_tile(int t) {
        const int base = start + t * TILE;
        const int from = raise(item.key_begin - base, 0), to = cut(item.key_end - base, TILE);
        // One that is put down as bf16 is first put together in the last place, which no tile has.
        char *spare = place_of(mode == Mode::int8_dot ? sizes.block_tiles : t);
        const int soon = base + GATHER_AHEAD * TILE;
        if (!layout.tiled) {
            ask_for_tokens(layout, item, head, soon, cut(soon + TILE, item.key_end));
            gather_tile(layout, item, head, base, from, to, spare);
            keys[t] = spare + layout.scale_bytes * TILE;
            values[t] = keys[t] + layer->key_size * TILE * layout.item;
            if constexpr (mode == Mode::int8_dot) put_down(t, keys[t]);
            return;
        }
        if (mode == Mode::int8_dot && soon < item.key_end) ask_for_tile(soon);
        keys[t] = layout.keys_of(tile_at(base));
        values[t] = layout.values_of(tile_at(base));
        if constexpr (mode == Mode::int8_dot) return put_down(t, keys[t]);
        if (!has_scales(mode) && to - from < TILE) {
            copy_values(layer, values[t], from, to, spare);
            values[t] = spare;
        }
    }

    char *place_of(int t) const { return gathered + Sizes::rounded(sizes.tile_bytes) * t; }

    void put_down(int t, const char *from) {
#if defined(__AVX512BF16__)
        keys[t] = place_of(t) + KEYS_BEHIND_SCALES;
        values[t] = keys[t] + layer->key_size * TILE * 2;
        put_down_as_bf16(layer, from, keys[t]);
#endif
    }

    ALWAYS_INLINE void ask_for_tile(int token) const {
        const char *tile = tile_at(token);
        for (int64_t at = 0; at < layout.token_bytes * TILE; at += 64) prefetch(tile + at);
    }

    // 0 for keys that are not the item's: what is there may be NaN. They stand in front of keys, which were just read.
    void find_value_scales() {
        for (int t = 0; t < tiles; ++t) {
            const int base = start + t * TILE;
            const F16 scales = load_bf16(keys[t] - KEYS_BEHIND_SCALES + VALUE_SCALES_BEHIND);
            store(value_scales + t * TILE,
                  within(scales, raise(item.key_begin - base, 0), cut(item.key_end - base, TILE), 0));
        }
    }

    // The first rows meet a block cold, and ask for it as they go. Where others follow they ask for the next block in
    // the meantime, little by little, so that only the first block is met cold.
    bool asks_in_turn(int row) const {
        return mode != Mode::int8_dot && layout.tiled && row == 0 && (sizes.rows <= sizes.chunk_rows || start <= item.key_begin);
    }

    void score(int low, int count) {
        const int64_t query_row_bytes = static_cast<int64_t>(layer->key_size) * (is_dot(mode) ? 2 : 4);
        for (int t = 0; t < padded; t += KEY_TILES) {
            in_turns(count, [&](int row, int turn_rows) {
                with_count<MAX_ROWS>(turn_rows,
                                     ScoreRows<mode>{query + (low + row) * query_row_bytes, layer->key_size, keys + t,
                                                     keys + t + AHEAD, scores.row(row) + t * TILE, scores.width,
                                                     asks_in_turn(low + row)});
            });
            if (low > 0 && layout.tiled) ask_for_share((low / sizes.chunk_rows - 1) * padded + t, KEY_TILES);
        }
    }

    // One share of the next block, of as many as there are tiles in all chunks but the first.
    ALWAYS_INLINE void ask_for_share(int share, int count) const {
        const int64_t next_tiles = cut(sizes.block_tiles, (item.key_end - next_block() + TILE - 1) / TILE);
        const int64_t shares = static_cast<int64_t>((sizes.rows - 1) / sizes.chunk_rows) * padded;
        const int64_t stop = next_tiles * (share + count) / shares;
        for (int64_t t = next_tiles * share / shares; t < stop; ++t)
            ask_for_tile(next_block() + static_cast<int>(t) * TILE);
    }

    float soften_row(int r, float *row) const {
        const int position = row_of(r).position;
        int from = item.key_begin;
        if (call->window) from = raise(from, position - call->window + 1);
        const int to = cut(item.key_end, position + 1) - start;
        const float slope = call->softcap != 0 ? call->scale / call->softcap : call->scale * LOG2E;
        return soften<mode>(row, tiles, raise(from - start, 0), cut(to, tiles * TILE), slope, call->softcap,
                            value_scales, running[r]);
    }

    const Work &work;
    const Item &item;
    const akv_layer *layer;
    const akv_call *call;
    const int head;
    const Layout layout;
    const Sizes sizes;
    const int group;  // rows of one token

    char *query;
    Scores scores;
    float *sums;  // [rows][sum_width]
    Running *running;
    float *factors;
    float *value_scales;  // of the block's keys, where they have some
    char **keys, **values;  // of the block's tiles
    char *gathered;

    int start = 0, tiles = 0, padded = 0;  // the block: its first token, its tiles, and these to a multiple of KEY_TILES
};

void attend(const Work &work, const Item &item, int head, char *scratch) {
#if defined(__AVX512BF16__)
    if (puts_down(work, item.num_rows * (work.call->num_heads / work.layer->kv_heads)))
        return Attending<Mode::int8_dot>(work, item, head, scratch).run();
#endif
    if (work.layer->kv_dtype == AKV_INT8) return Attending<Mode::int8>(work, item, head, scratch).run();
    if (work.layer->dtype == AKV_FP32) return Attending<Mode::fp32>(work, item, head, scratch).run();
#if defined(__AVX512BF16__)
    Attending<Mode::dot>(work, item, head, scratch).run();
#else
    Attending<Mode::widen>(work, item, head, scratch).run();
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
