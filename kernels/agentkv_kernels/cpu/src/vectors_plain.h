// Vectors of 16 floats in what every processor has, by the vector types of GCC and Clang.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef float V4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

struct F16 { V4 v[4]; };
struct W16 { U4 v[4]; };

constexpr int MAX_ROWS = 2, KEY_TILES = 1, VALUE_VECTORS = 1;
// Rows and vectors of a panel whose sums are; and rows where its weights are codes.
constexpr int PRODUCT_ROWS = 2, PRODUCT_VECTORS = 1, LOW_BIT_ROWS = 1;

template <class Of> inline F16 each(Of of) { return {of(0), of(1), of(2), of(3)}; }

inline F16 all(float x) {
    return each([&](int) { return V4{x, x, x, x}; });
}
inline F16 zero() { return all(0); }
inline F16 load(const float *p) {
    F16 a;
    memcpy(&a, p, sizeof a);
    return a;
}
inline void store(float *p, F16 a) { memcpy(p, &a, sizeof a); }
inline F16 add(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 sub(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 mul(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 div(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F16 max(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
// Lanes that are 1, 2, 4 or 8 apart, in each other's place.
template <int APART> inline F16 swapped(F16 a) {
    return each([&](int i) {
        const V4 from = a.v[i ^ APART / 4];
        return V4{from[0 ^ APART % 4], from[1 ^ APART % 4], from[2 ^ APART % 4], from[3 ^ APART % 4]};
    });
}
inline float first(F16 a) { return a.v[0][0]; }
inline float top(F16 a) {
    float found = a.v[0][0];
    for (int i = 1; i < 16; ++i) found = a.v[i / 4][i % 4] > found ? a.v[i / 4][i % 4] : found;
    return found;
}
inline float sum(F16 a) {
    const V4 s = (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
    return (s[0] + s[1]) + (s[2] + s[3]);
}
inline F16 within(F16 a, int from, int to, float other) {
    for (int i = 0; i < 16; ++i)
        if (i < from || i >= to) a.v[i / 4][i % 4] = other;
    return a;
}
inline F16 round_to_int(F16 a) {
    // Below 2^22 the sum has no bits for a fraction, so that it is rounded; scores beyond that keep what they are.
    const V4 big = {12582912.f, 12582912.f, 12582912.f, 12582912.f}, limit = {4194304.f, 4194304.f, 4194304.f, 4194304.f};
    return each([&](int i) {
        const V4 shifted = a.v[i] + big;
        const V4 rounded = shifted - big;
        return (a.v[i] < limit) & (a.v[i] > -limit) ? rounded : a.v[i];
    });
}
inline F16 times_power(F16 a, F16 n) {
    const V4 least = {-127, -127, -127, -127}, most = {127, 127, 127, 127};
    return each([&](int i) {
        V4 m = n.v[i] > least ? n.v[i] : least;
        m = m < most ? m : most;
        const I4 bits = (__builtin_convertvector(m, I4) + 127) << 23;
        V4 power;
        memcpy(&power, &bits, sizeof power);
        return a.v[i] * power;
    });
}
inline W16 load_words(const void *p) {
    W16 w;
    memcpy(&w, p, sizeof w);
    return w;
}
inline V4 as_floats(U4 bits) {
    V4 f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
inline F16 low_halves(W16 w) {
    return each([&](int i) { return as_floats(w.v[i] << 16); });
}
inline F16 high_halves(W16 w) {
    return each([&](int i) { return as_floats(w.v[i] & 0xffff0000u); });
}
inline F16 load_int8(const void *p) {
    int8_t numbers[16];
    memcpy(numbers, p, sizeof numbers);
    return each([&](int i) {
        const int8_t *four = numbers + 4 * i;
        return __builtin_convertvector(I4{four[0], four[1], four[2], four[3]}, V4);
    });
}
// 16 bytes of two codes each, which stand for 8 less.
inline void load_int4(const char *p, F16 &low, F16 &high) {
    float halves[2][16];
    for (int i = 0; i < 16; ++i) {
        const int byte = static_cast<unsigned char>(p[i]);
        halves[0][i] = static_cast<float>((byte & 15) - 8);
        halves[1][i] = static_cast<float>((byte >> 4) - 8);
    }
    low = load(halves[0]);
    high = load(halves[1]);
}
inline F16 load_bf16(const void *p) {
    uint16_t halves[16];
    memcpy(halves, p, sizeof halves);
    return each([&](int i) {
        const uint16_t *four = halves + 4 * i;
        return as_floats(U4{four[0], four[1], four[2], four[3]} << 16);
    });
}
// Whole numbers: 16 pairs of 8 bits as pairs of 16, one half of each as floats, products of pairs added to sums of 32 bits,
// and these as floats.
inline W16 no_words() { return {}; }
inline W16 load_int8_pairs(const void *p) {
    int8_t numbers[32];
    memcpy(numbers, p, sizeof numbers);
    W16 w;
    for (int i = 0; i < 16; ++i)
        w.v[i / 4][i % 4] =
            (static_cast<uint32_t>(numbers[2 * i]) & 0xffffu) | static_cast<uint32_t>(numbers[2 * i + 1]) << 16;
    return w;
}
inline F16 low_numbers(W16 w) {
    return each([&](int i) { return __builtin_convertvector(reinterpret_cast<I4>(w.v[i] << 16) >> 16, V4); });
}
inline F16 high_numbers(W16 w) {
    return each([&](int i) { return __builtin_convertvector(reinterpret_cast<I4>(w.v[i]) >> 16, V4); });
}
inline W16 dot(W16 sums, W16 pairs, uint32_t pair) {
    const int32_t low = static_cast<int16_t>(pair & 0xffffu), high = static_cast<int16_t>(pair >> 16);
    for (int i = 0; i < 4; ++i) {
        const I4 lows = reinterpret_cast<I4>(pairs.v[i] << 16) >> 16, highs = reinterpret_cast<I4>(pairs.v[i]) >> 16;
        const I4 products = lows * low + highs * high;
        sums.v[i] += reinterpret_cast<U4>(products);
    }
    return sums;
}
inline F16 numbers_of(F16 sums) { return sums; }
inline F16 numbers_of(W16 sums) {
    return each([&](int i) { return __builtin_convertvector(reinterpret_cast<I4>(sums.v[i]), V4); });
}
inline void store_int16(void *p, F16 a) {
    int16_t numbers[16];
    const F16 rounded = round_to_int(a);
    for (int i = 0; i < 16; ++i) {
        const float x = rounded.v[i / 4][i % 4];
        numbers[i] = x >= -32768 && x <= 32767 ? static_cast<int16_t>(x) : 0;
    }
    memcpy(p, numbers, sizeof numbers);
}

inline W16 mix(W16 a, W16 b) {
    for (int i = 0; i < 4; ++i) a.v[i] ^= b.v[i];
    return a;
}
inline uint64_t folded(W16 a) {
    uint64_t parts[8], total = 0;
    memcpy(parts, &a, sizeof parts);
    for (const uint64_t part : parts) total += part;
    return total;
}

}  // namespace
