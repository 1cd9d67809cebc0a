// Signs and a Hadamard matrix over heads, as agentkv_kernels/hadamard.py tells: sums and differences of elements that are 1
// apart, then 2, 4 and so on up to half a block. Every sum is of two, in fp32, so all instruction sets have the same bits.
#pragma once

#include "linear.h"

namespace {

struct Signs {
    float of[MOST_ELEMENTS];
    constexpr Signs() : of() {
        for (int i = 0; i < MOST_ELEMENTS; ++i) {
            of[i] = 1;
            for (int pairs = i & i >> 1; pairs; pairs &= pairs - 1) of[i] = -of[i];
        }
    }
};
constexpr Signs SIGNS;

// In front of the second of two elements that are so far apart, which takes itself from the first.
struct Seconds {
    float of[16];
    constexpr explicit Seconds(int apart) : of() {
        for (int i = 0; i < 16; ++i) of[i] = i & apart ? -1 : 1;
    }
};

// Within a vector, where a block has elements so far apart.
template <int APART> inline F16 mixed(F16 x, int block) {
    static constexpr Seconds SECONDS(APART);
    return block > APART ? fma(x, load(SECONDS.of), swapped<APART>(x)) : x;
}

// One head of [size], to where nothing of it lies.
void hadamard(const void *from, Numbers numbers, int size, float factor, void *to) {
    const int block = size & -size;
    float head[MOST_ELEMENTS + 16], short_signs[16];
    widen(from, numbers, size, head);
    for (int i = size; i % 16; ++i) head[i] = 0;
    const float *signs = SIGNS.of;
    if (block < 16) {
        for (int i = 0; i < 16; ++i) short_signs[i] = SIGNS.of[i & (block - 1)];
        signs = short_signs;
    }
    for (int i = 0; i < size; i += 16) {
        F16 x = mul(load(head + i), mul(load(signs + (i & (block - 1))), all(factor)));
        x = mixed<2>(mixed<1>(x, block), block);
        store(head + i, mixed<8>(mixed<4>(x, block), block));
    }
    for (int half = 16; half < block; half *= 2)
        for (int start = 0; start < size; start += 2 * half)
            for (int i = start; i < start + half; i += 16) {
                const F16 a = load(head + i), b = load(head + i + half);
                store(head + i, add(a, b));
                store(head + i + half, sub(a, b));
            }
    narrow(head, numbers, size, to);
}

}  // namespace
