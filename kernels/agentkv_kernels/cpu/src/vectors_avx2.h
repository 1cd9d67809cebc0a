// Vectors of 16 floats in two AVX2 registers.
#pragma once

#include <immintrin.h>
#include <cstdint>

namespace {

struct F16 { __m256 a, b; };
struct W16 { __m256i a, b; };

constexpr int MAX_ROWS = 6, KEY_TILES = 1, VALUE_VECTORS = 1;
// Rows and vectors of a panel whose sums are; and rows where its weights are codes.
constexpr int PRODUCT_ROWS = 6, PRODUCT_VECTORS = 1, LOW_BIT_ROWS = 2;

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
// Lanes that are 1, 2, 4 or 8 apart, in each other's place.
template <int APART> inline F16 swapped(F16 x) {
    if constexpr (APART == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
    if constexpr (APART == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if constexpr (APART == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return {x.b, x.a};
}
inline float first(F16 x) { return _mm256_cvtss_f32(x.a); }

inline __m256 eight_int8(const char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
inline F16 load_int8(const void *p) {
    const char *bytes = static_cast<const char *>(p);
    return {eight_int8(bytes), eight_int8(bytes + 8)};
}
// Bytes of two codes each, which stand for 8 less.
inline __m256 eight_low(__m256i bytes) {
    const __m256i codes = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
}
inline void load_int4(const char *p, F16 &low, F16 &high) {
    const __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8)));
    low = {eight_low(a), eight_low(b)};
    high = {eight_low(_mm256_srli_epi32(a, 4)), eight_low(_mm256_srli_epi32(b, 4))};
}
inline __m256 eight_bf16(const char *p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline F16 load_bf16(const void *p) {
    const char *bytes = static_cast<const char *>(p);
    return {eight_bf16(bytes), eight_bf16(bytes + 16)};
}

inline float top(F16 x) {
    const __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline float sum(F16 x) {
    const __m256 m = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}

inline __m256 lanes_within(__m256 x, __m256i lanes, int from, int to, float other) {
    const __m256i inside = _mm256_and_si256(
        _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(from - 1)), _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lanes));
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(inside));
}
inline F16 within(F16 x, int from, int to, float other) {
    return {lanes_within(x.a, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), from, to, other),
            lanes_within(x.b, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), from, to, other)};
}

inline F16 round_to_int(F16 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
// The power is built as the exponent of a float, which has room for -126 .. 127; below that it is 0.
inline __m256 power_of_two(__m256 n) {
    n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127)), _mm256_set1_ps(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 times_power(F16 x, F16 n) { return mul(x, {power_of_two(n.a), power_of_two(n.b)}); }

inline W16 load_words(const void *p) {
    const __m256i *words = static_cast<const __m256i *>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline F16 low_halves(W16 w) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
inline F16 high_halves(W16 w) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(w.a, high)), _mm256_castsi256_ps(_mm256_and_si256(w.b, high))};
}
// Whole numbers: 16 pairs of 8 bits as pairs of 16, one half of each as floats, products of pairs added to sums of 32 bits,
// and these as floats.
inline W16 no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline W16 load_int8_pairs(const void *p) {
    const __m128i *bytes = static_cast<const __m128i *>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)), _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
}
inline __m256 eight_numbers(__m256i words) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16)); }
inline F16 low_numbers(W16 w) {
    return {eight_numbers(_mm256_slli_epi32(w.a, 16)), eight_numbers(_mm256_slli_epi32(w.b, 16))};
}
inline F16 high_numbers(W16 w) { return {eight_numbers(w.a), eight_numbers(w.b)}; }
inline W16 dot(W16 sums, W16 pairs, uint32_t pair) {
    const __m256i both = _mm256_set1_epi32(static_cast<int>(pair));
    return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(pairs.a, both)),
            _mm256_add_epi32(sums.b, _mm256_madd_epi16(pairs.b, both))};
}
inline F16 numbers_of(F16 sums) { return sums; }
inline F16 numbers_of(W16 sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
inline void store_int16(void *p, F16 x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256(static_cast<__m256i *>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}

inline W16 mix(W16 x, W16 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline uint64_t folded(W16 x) {
    alignas(32) uint64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i *>(parts), _mm256_xor_si256(x.a, x.b));
    return parts[0] + parts[1] + parts[2] + parts[3];
}

}  // namespace
