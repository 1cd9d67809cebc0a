// Where an element of a page lies.
//
// A layer is [num_pages][kv_heads] blocks of page_size tokens, keys and values together, so that a page of a layer is
// one run of memory. Within a block, where page_size is a multiple of 16, tokens lie in tiles of 16:
//
//     fp32   keys [key_size][16]          values [16][value_size]
//     bf16   keys [key_size / 2][16][2]   values [8][value_size][2]
//     int8   as bf16, behind two rows of bf16: [16] scales of keys, [16] scales of values
//
// Keys are transposed, so that 16 tokens fill a vector and a score needs no sum across its lanes. In bf16 two
// neighbours in the direction of the sum share a 32-bit word, the first in its low half: a shift or a mask widens 16 of
// them at once, and it is what bf16 dot products read. In int8 they share 16 bits, which products of pairs read widened.
// Other page sizes keep [token][key, then value], in int8 behind the scales of both, and tiles are put together when they
// are read.
//
// Rows of values are read in vectors of 16, the last of which may reach beyond the row: a store has SLACK bytes behind
// its last layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "interface.h"

namespace {

constexpr int TILE = 16;
constexpr int SLACK = 256;
constexpr int KEYS_BEHIND_SCALES = 2 * TILE * 2, VALUE_SCALES_BEHIND = TILE * 2;  // bytes, in a tile of int8
constexpr int MOST_ELEMENTS = 512;  // of a key or a value; Python refuses more
constexpr int MOST_TOKEN_BYTES = 2 * MOST_ELEMENTS * 4;

struct Layout {
    const akv_layer *layer;
    int64_t item;         // bytes of an element
    int64_t scale_bytes;  // of one head's scales for a token
    int64_t token_bytes;  // of one head's key and value, and of these
    bool tiled;

    explicit Layout(const akv_layer *of)
        : layer(of), item(of->kv_dtype == AKV_FP32 ? 4 : of->kv_dtype == AKV_BF16 ? 2 : 1),
          scale_bytes(of->kv_dtype == AKV_INT8 ? 4 : 0),
          token_bytes((of->key_size + of->value_size) * item + scale_bytes), tiled(of->page_size % TILE == 0) {}

    int64_t block_bytes() const { return token_bytes * layer->page_size; }
    int64_t page_bytes() const { return block_bytes() * layer->kv_heads; }

    char *block(int64_t page, int64_t head) const {
        return static_cast<char *>(layer->pages) + page * page_bytes() + head * block_bytes();
    }
    // The tile, or where there are none the token, that an offset within a page lies in.
    char *tile(int64_t page, int64_t head, int offset) const {
        return block(page, head) + (tiled ? offset / TILE * TILE : offset) * token_bytes;
    }
    char *keys_of(char *tile_start) const { return tile_start + scale_bytes * (tiled ? TILE : 1); }
    char *values_of(char *tile_start) const {
        return keys_of(tile_start) + static_cast<int64_t>(layer->key_size) * item * (tiled ? TILE : 1);
    }
};

inline uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

}  // namespace
