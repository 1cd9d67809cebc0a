// Writing pages, and moving them: new tokens, whole pages within a store, and pages to and from the canonical form.

#include <cstdlib>

#include "layout.h"
#include "team.h"

namespace {

constexpr int64_t LEAST_TOKENS = 16;  // for which other threads pay

// Where one head's keys or values of a token lie, element by element.
template <class Element> struct Place {
    Element *start;
    int64_t step;   // to the element after next where keys are in pairs; else to the next
    bool pairs;     // two neighbours lie together, and then comes a step

    void put(const Element *from, int size) const {
        if (!pairs) {
            for (int i = 0; i < size; ++i) start[i * step] = from[i];
            return;
        }
        for (int i = 0; i < size; i += 2) {
            start[i / 2 * step] = from[i];
            start[i / 2 * step + 1] = from[i + 1];
        }
    }
    void get(Element *to, int size) const {
        if (!pairs) {
            for (int i = 0; i < size; ++i) to[i] = start[i * step];
            return;
        }
        for (int i = 0; i < size; i += 2) {
            to[i] = start[i / 2 * step];
            to[i + 1] = start[i / 2 * step + 1];
        }
    }
    void fill(Element with, int size) const {
        for (int i = 0; i < size; ++i) start[pairs ? i / 2 * step + i % 2 : i * step] = with;
    }
};

template <class Element> Place<Element> key_place(const Layout &layout, int64_t page, int head, int offset) {
    Element *elements = reinterpret_cast<Element *>(layout.keys_of(layout.tile(page, head, offset)));
    if (!layout.tiled) return {elements, 1, false};
    if (sizeof(Element) == 4) return {elements + offset % TILE, TILE, false};
    return {elements + 2 * (offset % TILE), 2 * TILE, true};
}

template <class Element> Place<Element> value_place(const Layout &layout, int64_t page, int head, int offset) {
    Element *elements = reinterpret_cast<Element *>(layout.values_of(layout.tile(page, head, offset)));
    if (!layout.tiled) return {elements, 1, false};
    const int j = offset % TILE;
    if (sizeof(Element) == 4) return {elements + static_cast<int64_t>(j) * layout.layer->value_size, 1, false};
    return {elements + static_cast<int64_t>(j / 2) * 2 * layout.layer->value_size + j % 2, 2, false};
}

// The scales of a token, its key's and then its value's, lie so far apart.
int scale_step(const Layout &layout) { return layout.tiled ? TILE : 1; }
uint16_t *scales_at(const Layout &layout, int64_t page, int head, int offset) {
    return reinterpret_cast<uint16_t *>(layout.tile(page, head, offset)) + (layout.tiled ? offset % TILE : 0);
}

float wide(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
float wide(uint16_t bits) { return float_of(bits); }

// Whole numbers in place of elements; returns the scale. Each step is rounded in the one way of IEEE 754, so that the
// bits are those of `quantize` in Python.
template <class Element> uint16_t quantize(const Element *__restrict from, int size, int8_t *__restrict to) {
    float x[MOST_ELEMENTS];
    // Floats without their sign are in the order of their bits, infinity and NaN above all others.
    int32_t most = 0;
    for (int i = 0; i < size; ++i) {
        x[i] = wide(from[i]);
        int32_t bits;
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const uint16_t scale = bf16_of(wide(static_cast<uint32_t>(most)) / 127);
    const float divisor = float_of(scale);
    if (!(divisor > 0 && scale < 0x7f80)) {
        memset(to, 0, static_cast<size_t>(size));
        return scale;
    }
    for (int i = 0; i < size; ++i) {
        float number = x[i] / divisor;
        number = number > 127 ? 127 : number < -127 ? -127 : number;
        // The sum has no bits for a fraction, so it is rounded, ties to even; its lowest byte is the number.
        number += 12582912.f;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        to[i] = static_cast<int8_t>(bits & 0xff);
    }
    return scale;
}

template <class Element>
void store_tokens(const akv_layer *layer, const void *key, int64_t key_token, int64_t key_head, const void *value,
                  int64_t value_token, int64_t value_head, const int64_t *slots, int64_t num_tokens, int threads) {
    const Layout layout(layer);
    // Two tokens of a tile may share words, so threads part the heads among them and not the tokens.
    for_each(num_tokens < LEAST_TOKENS ? 1 : threads, layer->kv_heads, [&](int64_t item) {
        const int head = static_cast<int>(item);
        for (int64_t i = 0; i < num_tokens; ++i) {
            const int64_t page = slots[i] / layer->page_size;
            const int offset = static_cast<int>(slots[i] % layer->page_size);
            const Element *from_key = static_cast<const Element *>(key) + i * key_token + head * key_head;
            const Element *from_value = static_cast<const Element *>(value) + i * value_token + head * value_head;
            if (layer->kv_dtype == AKV_INT8) {
                int8_t numbers[MOST_ELEMENTS];
                uint16_t *scales = scales_at(layout, page, head, offset);
                scales[0] = quantize(from_key, layer->key_size, numbers);
                key_place<int8_t>(layout, page, head, offset).put(numbers, layer->key_size);
                scales[scale_step(layout)] = quantize(from_value, layer->value_size, numbers);
                value_place<int8_t>(layout, page, head, offset).put(numbers, layer->value_size);
                continue;
            }
            key_place<Element>(layout, page, head, offset).put(from_key, layer->key_size);
            value_place<Element>(layout, page, head, offset).put(from_value, layer->value_size);
        }
    });
}

// Canonical pages: keys [n][page_size][kv_heads][key_size], values alike.
template <class Element>
void move_pages(const akv_layer *layer, const int64_t *page_ids, int64_t n, Element *keys, Element *values, bool out) {
    const Layout layout(layer);
    for (int64_t i = 0; i < n; ++i)
        for (int offset = 0; offset < layer->page_size; ++offset)
            for (int head = 0; head < layer->kv_heads; ++head) {
                const int64_t at = (i * layer->page_size + offset) * layer->kv_heads + head;
                const auto key = key_place<Element>(layout, page_ids[i], head, offset);
                const auto value = value_place<Element>(layout, page_ids[i], head, offset);
                if (out) {
                    key.get(keys + at * layer->key_size, layer->key_size);
                    value.get(values + at * layer->value_size, layer->value_size);
                } else {
                    key.put(keys + at * layer->key_size, layer->key_size);
                    value.put(values + at * layer->value_size, layer->value_size);
                }
            }
}

void move(const akv_layer *layer, const int64_t *page_ids, int64_t n, void *keys, void *values, bool out) {
    if (layer->kv_dtype == AKV_FP32)
        move_pages(layer, page_ids, n, static_cast<uint32_t *>(keys), static_cast<uint32_t *>(values), out);
    else if (layer->kv_dtype == AKV_BF16)
        move_pages(layer, page_ids, n, static_cast<uint16_t *>(keys), static_cast<uint16_t *>(values), out);
    else
        move_pages(layer, page_ids, n, static_cast<int8_t *>(keys), static_cast<int8_t *>(values), out);
}

// Canonical scales: [n][page_size][kv_heads][2].
void move_scales(const akv_layer *layer, const int64_t *page_ids, int64_t n, uint16_t *scales, bool out) {
    const Layout layout(layer);
    for (int64_t i = 0; i < n; ++i)
        for (int offset = 0; offset < layer->page_size; ++offset)
            for (int head = 0; head < layer->kv_heads; ++head, scales += 2) {
                uint16_t *here = scales_at(layout, page_ids[i], head, offset);
                for (int which = 0; which < 2; ++which) {
                    uint16_t &one = here[which * scale_step(layout)];
                    if (out)
                        scales[which] = one;
                    else
                        one = scales[which];
                }
            }
}

template <class Element> void fill(const akv_layer *layer, const int64_t *slots, int64_t n, Element with, uint16_t scale) {
    const Layout layout(layer);
    for (int64_t i = 0; i < n; ++i)
        for (int head = 0; head < layer->kv_heads; ++head) {
            const int64_t page = slots[i] / layer->page_size;
            const int offset = static_cast<int>(slots[i] % layer->page_size);
            if (layer->kv_dtype == AKV_INT8) {
                uint16_t *scales = scales_at(layout, page, head, offset);
                scales[0] = scales[scale_step(layout)] = scale;
            }
            key_place<Element>(layout, page, head, offset).fill(with, layer->key_size);
            value_place<Element>(layout, page, head, offset).fill(with, layer->value_size);
        }
}

bool slots_exist(const akv_layer *layer, const int64_t *slots, int64_t n) {
    const int64_t limit = static_cast<int64_t>(layer->num_pages) * layer->page_size;
    for (int64_t i = 0; i < n; ++i)
        if (slots[i] < 0 || slots[i] >= limit) return false;
    return true;
}

}  // namespace

extern "C" {

int32_t akv_store(const akv_layer *layer, const void *key, int64_t key_token, int64_t key_head, const void *value,
                  int64_t value_token, int64_t value_head, const int64_t *slots, int64_t num_tokens, int32_t threads) {
    if (!slots_exist(layer, slots, num_tokens)) return AKV_BAD_SLOT;
    if (num_tokens < 64) threads = 1;
    if (layer->dtype == AKV_FP32)
        store_tokens<uint32_t>(layer, key, key_token, key_head, value, value_token, value_head, slots, num_tokens, threads);
    else
        store_tokens<uint16_t>(layer, key, key_token, key_head, value, value_token, value_head, slots, num_tokens, threads);
    return AKV_OK;
}

// As if all sources were read before the first destination is written.
int32_t akv_copy(const akv_layer *layers, int64_t num_layers, const int64_t *from, const int64_t *to, int64_t n) {
    char *kept = nullptr;
    for (int64_t l = 0; l < num_layers; ++l) {
        const Layout layout(layers + l);
        const int64_t bytes = layout.page_bytes();
        if (n == 1) {
            memmove(layout.block(to[0], 0), layout.block(from[0], 0), static_cast<size_t>(bytes));
            continue;
        }
        char *grown = static_cast<char *>(realloc(kept, static_cast<size_t>(bytes * n)));
        if (n > 0 && !grown) {
            free(kept);
            return AKV_NO_MEMORY;
        }
        kept = grown;
        for (int64_t i = 0; i < n; ++i) memcpy(kept + i * bytes, layout.block(from[i], 0), static_cast<size_t>(bytes));
        for (int64_t i = 0; i < n; ++i) memcpy(layout.block(to[i], 0), kept + i * bytes, static_cast<size_t>(bytes));
    }
    free(kept);
    return AKV_OK;
}

void akv_export(const akv_layer *layer, const int64_t *page_ids, int64_t n, void *keys, void *values) {
    move(layer, page_ids, n, keys, values, true);
}

void akv_import(const akv_layer *layer, const int64_t *page_ids, int64_t n, void *keys, void *values) {
    move(layer, page_ids, n, keys, values, false);
}

// Of quantized layers alone.
void akv_export_scales(const akv_layer *layer, const int64_t *page_ids, int64_t n, void *scales) {
    move_scales(layer, page_ids, n, static_cast<uint16_t *>(scales), true);
}

void akv_import_scales(const akv_layer *layer, const int64_t *page_ids, int64_t n, void *scales) {
    move_scales(layer, page_ids, n, static_cast<uint16_t *>(scales), false);
}

int32_t akv_fill(const akv_layer *layer, const int64_t *slots, int64_t n, float with) {
    if (!slots_exist(layer, slots, n)) return AKV_BAD_SLOT;
    uint32_t bits;
    memcpy(&bits, &with, 4);
    int8_t number;
    const uint16_t scale = quantize(&bits, 1, &number);
    if (layer->kv_dtype == AKV_FP32)
        fill(layer, slots, n, bits, scale);
    else if (layer->kv_dtype == AKV_BF16)
        fill(layer, slots, n, bf16_of(with), scale);
    else
        fill(layer, slots, n, number, scale);
    return AKV_OK;
}
}
