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
// A decode step is the same with few rows, which are done before the next keys and values are there. How many requests
// for memory are under way at once decides then, and that depends on how keys go by: in short blocks, all KV heads of a
// block one after the other, the tiles of a block side by side, and in the meantime the next block is asked for. Each
// page is one run of memory then, and several are read at a time.
#pragma once

#include "layout.h"
#include "products.h"
#include "rows.h"
#include "softmax.h"
#include "tiles.h"
#include "work.h"

namespace {

// Rows whose scores are kept at once, and bytes of the pages of a block of many rows; both stay in the second level of
// cache meanwhile. Measured on Zen 4, where they are flat within a factor of two. In chunks of 12 rows, whose scores fit the
// first level, no prefill was faster, and sixteen sequences over one prefix took 5 % longer: now the keys of some tiles
// are in the first level while all rows of a chunk meet them.
constexpr int CHUNK_ROWS = 48, BLOCK_BYTES = 256 << 10;

// An item with no more rows waits for memory rather than for sums.
constexpr int FEW_ROWS = 2 * MAX_ROWS;

// Query heads that share a KV head, and rows of so many queries.
inline int group_of(const Work &work) { return work.call->num_heads / work.layer->kv_heads; }
inline int rows_of(const Work &work, int num_queries) { return num_queries * group_of(work); }

// Whether whole numbers are put down as bf16 first. It pays where rows of more than one chunk read them.
inline bool puts_down(const Work &work, int num_queries) {
#if defined(__AVX512BF16__)
    const akv_layer *layer = work.layer;
    return layer->kv_dtype == AKV_INT8 && layer->dtype == AKV_BF16 && rows_of(work, num_queries) > CHUNK_ROWS;
#else
    return static_cast<void>(work), static_cast<void>(num_queries), false;
#endif
}

// Whether memory and not arithmetic decides how long an item takes.
inline bool few_rows(const Work &work, int num_queries) {
    return rows_of(work, num_queries) <= FEW_ROWS && work.layer->page_size % TILE == 0;
}

// How one item's memory is divided.
struct Sizes {
    int heads, rows, chunk_rows, block_tiles, score_width, sum_width;
    size_t tile_bytes;

    Sizes(const Work &work, int num_queries, int num_heads) : heads(num_heads), rows(rows_of(work, num_queries)) {
        const akv_layer *layer = work.layer;
        chunk_rows = cut(rows, CHUNK_ROWS);
        int64_t token_bytes = Layout(layer).token_bytes;
        if (puts_down(work, num_queries)) token_bytes += static_cast<int64_t>(layer->key_size) + layer->value_size;
        const int most = static_cast<int>(BLOCK_BYTES / (token_bytes * TILE)) / 4 * 4;
        block_tiles = few_rows(work, num_queries) ? ABREAST : cut(raise(most, 8), 64);
        score_width = block_tiles * TILE + TILE;  // scale_behind the tiles
        sum_width = (layer->value_size + 15) / 16 * 16;
        tile_bytes = static_cast<size_t>(token_bytes) * TILE + SLACK;
    }

    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
    // Of one head; of each head there is one.
    size_t query_bytes(const Work &work) const { return rounded(static_cast<size_t>(rows) * work.layer->key_size * 4); }
    size_t sum_bytes() const { return rounded(sizeof(float) * rows * sum_width); }
    size_t running_bytes() const { return rounded(sizeof(Running) * rows); }
    // For all of them.
    size_t score_bytes() const { return rounded(sizeof(float) * chunk_rows * score_width); }
    size_t factor_bytes() const { return rounded(sizeof(float) * chunk_rows); }
    size_t scale_bytes() const { return sizeof(float) * block_tiles * TILE; }
    // Of starts; of keys and values, each with its next; and those behind a multiple of KEY_TILES.
    size_t pointer_bytes() const { return rounded(sizeof(char *) * (3 * block_tiles + 3 * ABREAST + 4 * KEY_TILES)); }
    size_t gathered_bytes() const { return rounded(tile_bytes) * (block_tiles + 1); }
    size_t all(const Work &work) const {
        return heads * (query_bytes(work) + sum_bytes() + running_bytes()) + score_bytes() + factor_bytes() + scale_bytes() +
               pointer_bytes() + gathered_bytes() + 64;
    }
};

size_t scratch_bytes(const Work &work, int num_queries, int heads) { return Sizes(work, num_queries, heads).all(work); }

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
            else if constexpr (mode == Mode::whole) {
                float wide[MOST_ELEMENTS];
                for (int d = 0; d < key_size; ++d) wide[d] = float_of(static_cast<const uint16_t *>(call->query)[at + d]);
                put_query(wide, key_size, static_cast<char *>(out) + row / key_size * query_row_bytes<mode>(key_size));
            } else
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
    if (work.layer->dtype == AKV_FP32) {
        float *out = static_cast<float *>(call->out) + at;
        for (int v = 0; v < value_size; ++v) out[v] = sums[v] * factor;
    } else {
        uint16_t *out = static_cast<uint16_t *>(call->out) + at;
        const int whole = value_size / 16 * 16;
        for (int v = 0; v < whole; v += 16) store_rounded(out + v, mul(load(sums + v), all(factor)));
        for (int v = whole; v < value_size; ++v) out[v] = bf16_of(sums[v] * factor);
    }
}

// One item for some KV heads: its memory, and the walk over its keys.
template <Mode mode> class Attending {
  public:
    Attending(const Work &work, const Unit &unit, char *scratch)
        : work(work), item(*unit.item), layer(work.layer), call(work.call), first_head(unit.first_head),
          stop_head(unit.first_head + unit.num_heads), layout(work.layer), sizes(work, item.num_rows, unit.num_heads),
          group(group_of(work)), few(few_rows(work, item.num_rows)) {
        scratch = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
        const auto take = [&scratch](size_t bytes) { return (scratch += bytes) - bytes; };
        scores = {reinterpret_cast<float *>(take(sizes.score_bytes())), sizes.score_width};
        factors = reinterpret_cast<float *>(take(sizes.factor_bytes()));
        value_scales = reinterpret_cast<float *>(take(sizes.scale_bytes()));
        starts = reinterpret_cast<char **>(take(sizes.pointer_bytes()));
        keys = starts + sizes.block_tiles + ABREAST + KEY_TILES;
        gathered = take(sizes.gathered_bytes());
        of_heads = scratch;
    }

    void run() {
        for (head = first_head; head < stop_head; ++head) {
            pack_queries<mode>(work, item, head, group, query());
            memset(sums_of(0), 0, sizes.sum_bytes());
            memset(running(), 0, sizes.running_bytes());
            for (int r = 0; r < sizes.rows; ++r) running()[r].top = NO_SCORE;
        }
        for (start = item.key_begin / TILE * TILE; start < item.key_end; start += sizes.block_tiles * TILE) {
            find_starts();
            for (head = first_head; head < stop_head; ++head) do_block();
        }
        for (head = first_head; head < stop_head; ++head)
            for (int r = 0; r < sizes.rows; ++r)
                finish(work, row_of(r), head * group + r % group, running()[r], sums_of(r));
    }

  private:
    void do_block() {
        find_tiles();
        for (int low = 0; low < sizes.rows; low += sizes.chunk_rows) {
            const int count = cut(sizes.chunk_rows, sizes.rows - low);
            score(low, count);
            if (has_scales(mode) && low == 0) find_value_scales();
            for (int r = 0; r < count; ++r) factors[r] = soften_row(low + r, r);
            in_turns(count, [&](int row, int turn_rows) {
                with_count<MAX_ROWS>(turn_rows, AddRows<mode>{scores, row, values, next_values, tiles, layer->value_size,
                                                              sums_of(low + row), sizes.sum_width, factors + row,
                                                              asks_in_turn(low + row)});
            });
        }
    }

    // What is kept of the head from block to block: queries [rows][key_size], in Mode::whole each row before its scale; sums
    // [rows][sum_width]; what is running.
    char *query() const {
        const size_t of_one = sizes.query_bytes(work) + sizes.sum_bytes() + sizes.running_bytes();
        return of_heads + of_one * static_cast<size_t>(head - first_head);
    }
    float *sums_of(int r) const {
        return reinterpret_cast<float *>(query() + sizes.query_bytes(work)) + static_cast<int64_t>(r) * sizes.sum_width;
    }
    Running *running() const {
        return reinterpret_cast<Running *>(query() + sizes.query_bytes(work) + sizes.sum_bytes());
    }

    const Row &row_of(int r) const { return work.rows[item.first_row + r / group]; }
    char *tile_at(int token) const {
        return layout.tile(item.pages[token / layer->page_size], head, token % layer->page_size);
    }
    int next_block() const { return start + sizes.block_tiles * TILE; }

    // Where tiles start for the first head: those of this block and some beyond, or null behind the last key.
    void find_starts() {
        if (!layout.tiled) return;
        int page = start / layer->page_size, offset = start % layer->page_size;
        for (int t = 0; t < sizes.block_tiles + ABREAST + KEY_TILES; ++t) {
            starts[t] = start + t * TILE < item.key_end ? layout.tile(item.pages[page], first_head, offset) : nullptr;
            offset += TILE;
            if (offset == layer->page_size) offset = 0, ++page;
        }
    }
    char *start_of(int t, int its_head) const {
        return starts[t] ? starts[t] + layout.block_bytes() * (its_head - first_head) : nullptr;
    }

    // Where the tiles of this block are: in the pages, or put together in `gathered`.
    void find_tiles() {
        tiles = cut(sizes.block_tiles, (item.key_end - start + TILE - 1) / TILE);
        padded = (tiles + KEY_TILES - 1) / KEY_TILES * KEY_TILES;
        // Pointers stand in the order in which they are followed, so that what is wanted soon is asked for soon enough.
        values = keys + padded;
        for (int t = 0; t < tiles; ++t) find_tile(t);
        // Scores are computed KEY_TILES at a time.
        for (int t = tiles; t < padded; ++t) keys[t] = keys[tiles - 1];
        few ? find_next_tiles() : find_tiles_ahead();
    }

    // Asked for are tiles of the same block, and of the next block its keys, where there is one; else what was just read,
    // which costs nothing.
    void find_tiles_ahead() {
        for (int t = 0; t < ABREAST + KEY_TILES; ++t) {
            char *ahead = layout.tiled ? start_of(sizes.block_tiles + t, head) : nullptr;
            values[tiles + t] = ahead ? layout.keys_of(ahead) : values[tiles - 1];
        }
        next_keys = keys + ABREAST;
        next_values = values + ABREAST;
    }

    // Asked for is the same block of the next head, or the next block of the first.
    void find_next_tiles() {
        const bool same = head + 1 < stop_head;
        next_keys = values + tiles;
        next_values = next_keys + padded;
        for (int t = 0; t < padded; ++t) {
            char *next = same ? start_of(t, head + 1) : start_of(sizes.block_tiles + t, first_head);
            next_keys[t] = next ? layout.keys_of(next) : keys[t];
            if (t < tiles) next_values[t] = next ? layout.values_of(next) : values[t];
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
        keys[t] = layout.keys_of(start_of(t, head));
        values[t] = layout.values_of(start_of(t, head));
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
        const int64_t row_bytes = query_row_bytes<mode>(layer->key_size);
        const int most = few ? ABREAST : KEY_TILES;
        for (int t = 0; t < padded; t += most) {
            const int its_tiles = cut(most, padded - t);
            in_turns(count, [&](int row, int turn_rows) {
                with_count<MAX_ROWS>(turn_rows,
                                     ScoreRows<mode>{query() + (low + row) * row_bytes, layer->key_size, keys + t,
                                                     next_keys + t, its_tiles, scores.row(row) + t * TILE, scores.width,
                                                     asks_in_turn(low + row)});
            });
            if (low > 0 && layout.tiled) ask_for_share((low / sizes.chunk_rows - 1) * padded + t, its_tiles);
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

    float soften_row(int r, int its_scores) const {
        const int position = row_of(r).position;
        int from = item.key_begin;
        if (call->window) from = raise(from, position - call->window + 1);
        const int to = cut(item.key_end, position + 1) - start;
        const float slope = call->softcap != 0 ? call->scale / call->softcap : call->scale * LOG2E;
        return soften<mode>(scores.row(its_scores), tiles, raise(from - start, 0), cut(to, tiles * TILE), slope, call->softcap,
                            value_scales, running()[r], scale_behind(scores, its_scores));
    }

    const Work &work;
    const Item &item;
    const akv_layer *layer;
    const akv_call *call;
    const int first_head, stop_head;
    const Layout layout;
    const Sizes sizes;
    const int group;  // rows of one token
    const bool few;

    Scores scores;
    float *factors;
    float *value_scales;  // of the block's keys, where they have some
    char **starts, **keys, **values, **next_keys, **next_values;  // of the block's tiles, and of those to ask for meanwhile
    char *gathered;
    char *of_heads;

    // The block: its head, its first token, its tiles, and these to a multiple of KEY_TILES.
    int head = 0, start = 0, tiles = 0, padded = 0;
};

void attend(const Work &work, const Unit &unit, char *scratch) {
#if defined(__AVX512BF16__)
    if (puts_down(work, unit.item->num_rows))
        return Attending<Mode::int8_dot>(work, unit, scratch).run();
#endif
    if (work.layer->kv_dtype == AKV_INT8 && work.layer->dtype == AKV_BF16 && few_rows(work, unit.item->num_rows))
        return Attending<Mode::whole>(work, unit, scratch).run();
    if (work.layer->kv_dtype == AKV_INT8) return Attending<Mode::int8>(work, unit, scratch).run();
    if (work.layer->dtype == AKV_FP32) return Attending<Mode::fp32>(work, unit, scratch).run();
#if defined(__AVX512BF16__)
    Attending<Mode::dot>(work, unit, scratch).run();
#else
    Attending<Mode::widen>(work, unit, scratch).run();
#endif
}

uint64_t read(const Work &work, const Unit &unit) {
    const Layout layout(work.layer);
    const Item &item = *unit.item;
    const int page_size = work.layer->page_size, step = layout.tiled ? TILE : 1;
    const int64_t bytes = layout.token_bytes * step;
    W16 mixed[4] = {};
    for (int token = item.key_begin / step * step; token < item.key_end; token += step)
        for (int head = unit.first_head; head < unit.first_head + unit.num_heads; ++head) {
            const char *from = layout.tile(item.pages[token / page_size], head, token % page_size);
            int64_t at = 0;
            for (; at + 256 <= bytes; at += 256)
                for (int i = 0; i < 4; ++i) mixed[i] = mix(mixed[i], load_words(from + at + 64 * i));
            for (; at + 64 <= bytes; at += 64) mixed[0] = mix(mixed[0], load_words(from + at));
        }
    return folded(mix(mix(mixed[0], mixed[1]), mix(mixed[2], mixed[3])));
}

}  // namespace
