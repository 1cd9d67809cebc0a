// Tiles of 16 tokens that do not lie in a page as they are wanted. Included by attention.h.
#pragma once

#include "layout.h"
#include "products.h"
#include "work.h"

namespace {

constexpr int GATHER_AHEAD = 3;  // tiles

// Copies the values of a tile, 0 in place of keys from .. to do not name: a probability of 0 removes no NaN.
inline void copy_values(const akv_layer *layer, const char *from_tile, int from, int to, char *out) {
    const int words = layer->value_size, lines = layer->kv_dtype == AKV_FP32 ? TILE : TILE / 2, each = TILE / lines;
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
template <class Word> inline void spread(const Word *__restrict key, int words, Word *__restrict out) {
    for (int i = 0; i < words; ++i) out[i * TILE] = key[i];
}

// Two rows of bf16, element by element side by side.
inline void interleave(const uint16_t *__restrict low, const uint16_t *__restrict high, int n, uint32_t *__restrict out) {
    for (int i = 0; i < n; ++i) out[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
}

// A tile of int8 of these tokens, each of which has its scales in front.
inline void gather_numbers(const akv_layer *layer, const char *const *tokens, char *out) {
    const int key_size = layer->key_size, value_size = layer->value_size;
    for (int j = 0; j < TILE; ++j) {
        memcpy(out + j * 2, tokens[j], 2);
        memcpy(out + (TILE + j) * 2, tokens[j] + 2, 2);
    }
    out += 2 * TILE * 2;
    for (int j = 0; j < TILE; ++j) {
        spread(reinterpret_cast<const uint16_t *>(tokens[j] + 4), key_size / 2, reinterpret_cast<uint16_t *>(out) + j);
    }
    out += key_size * TILE;
    for (int j = 0; j < TILE; j += 2, out += 2 * value_size) {
        const char *low = tokens[j] + 4 + key_size, *high = tokens[j + 1] + 4 + key_size;
        for (int v = 0; v < value_size; ++v) out[2 * v] = low[v], out[2 * v + 1] = high[v];
    }
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
    if (layer->kv_dtype == AKV_INT8) return gather_numbers(layer, tokens, out);
    uint32_t *words = reinterpret_cast<uint32_t *>(out);
    const int64_t key_bytes = layer->key_size * layout.item;
    for (int j = 0; j < TILE; ++j)
        spread(reinterpret_cast<const uint32_t *>(tokens[j]), static_cast<int>(key_bytes / 4), words + j);
    words += key_bytes / 4 * TILE;
    if (layer->kv_dtype == AKV_FP32) {
        for (int j = 0; j < TILE; ++j, words += value_size)
            memcpy(words, tokens[j] + key_bytes, static_cast<size_t>(value_size) * 4);
        return;
    }
    for (int j = 0; j < TILE; j += 2, words += value_size)
        interleave(reinterpret_cast<const uint16_t *>(tokens[j] + key_bytes),
                   reinterpret_cast<const uint16_t *>(tokens[j + 1] + key_bytes), value_size, words);
}

#if defined(__AVX512BF16__)
// A tile of int8 as one of bf16, which holds these numbers exactly; scales stay in front of keys, whose place is given.
inline void put_down_as_bf16(const akv_layer *layer, const char *keys, char *out) {
    const int key_size = layer->key_size, value_size = layer->value_size;
    memcpy(out - KEYS_BEHIND_SCALES, keys - KEYS_BEHIND_SCALES, KEYS_BEHIND_SCALES);
    const auto widen = [](const char *from, char *to) {
        const W16 pairs = load_int8_pairs(from);
        store_pairs(to, low_numbers(pairs), high_numbers(pairs));
    };
    for (int i = 0; i < key_size; i += 2) widen(keys + i * TILE, out + i * TILE * 2);
    const char *values = keys + key_size * TILE;
    out += key_size * TILE * 2;
    // What the last vector of a row puts behind it, the next row overwrites.
    for (int j = 0; j < TILE; j += 2, values += 2 * value_size, out += value_size * 4)
        for (int v = 0; v < value_size; v += 16)
            widen(values + v * 2, out + v * 4);
}
#endif

// Asks for the tokens that gather_tile will read.
ALWAYS_INLINE void ask_for_tokens(const Layout &layout, const Item &item, int head, int from, int to) {
    for (int token = from; token < to; ++token) {
        const char *start = layout.tile(item.pages[token / layout.layer->page_size], head, token % layout.layer->page_size);
        for (int64_t at = 0; at < layout.token_bytes; at += 64) prefetch(start + at);
    }
}

}  // namespace
