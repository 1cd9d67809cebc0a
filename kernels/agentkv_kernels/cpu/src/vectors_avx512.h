// Vectors of 16 floats in one AVX-512 register.
#pragma once

#include <immintrin.h>
#include <cstdint>

namespace {

struct F16 { __m512 v; };
struct W16 { __m512i v; };  // 16 words: pairs of bf16 or of 16-bit numbers, or sums of 32

// Rows of queries, tiles of keys and vectors of values whose sums are kept in registers at once.
constexpr int MAX_ROWS = 6, KEY_TILES = 4, VALUE_VECTORS = 4;
// Rows and vectors of a panel whose sums are; and rows where its weights are codes.
constexpr int PRODUCT_ROWS = 12, PRODUCT_VECTORS = 2, LOW_BIT_ROWS = 6;

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// Lanes that are 1, 2, 4 or 8 apart, in each other's place.
template <int APART> inline F16 swapped(F16 a) {
    if constexpr (APART == 1) return {_mm512_permute_ps(a.v, 0xb1)};
    if constexpr (APART == 2) return {_mm512_permute_ps(a.v, 0x4e)};
    return {_mm512_shuffle_f32x4(a.v, a.v, APART == 4 ? 0xb1 : 0x4e)};
}
inline float top(F16 a) { return _mm512_reduce_max_ps(a.v); }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a.v); }
inline float first(F16 a) { return _mm512_cvtss_f32(a.v); }

// 16 whole numbers, 16 bf16.
inline F16 load_int8(const void *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))))};
}
// 16 bytes of two codes each, which stand for 8 less.
inline void load_int4(const void *p, F16 &low, F16 &high) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    const __m512 meant = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    low = {_mm512_permutexvar_ps(bytes, meant)};
    high = {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), meant)};
}
inline F16 load_bf16(const void *p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}

// Lanes from .. to of a, and `other` elsewhere.
inline F16 within(F16 a, int from, int to, float other) {
    const unsigned below_to = to >= 16 ? 0xffffu : (1u << to) - 1, below_from = (1u << from) - 1;
    const __mmask16 lanes = static_cast<__mmask16>(below_to & ~below_from);
    return {_mm512_mask_blend_ps(lanes, _mm512_set1_ps(other), a.v)};
}

inline F16 round_to_int(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole n.
inline F16 times_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline W16 load_words(const void *p) { return {_mm512_loadu_si512(p)}; }
inline F16 low_halves(W16 w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
inline F16 high_halves(W16 w) {
    return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
// Whole numbers: 16 pairs of 8 bits as pairs of 16, one half of each as floats, products of pairs added to sums of 32 bits,
// and these as floats.
inline W16 no_words() { return {_mm512_setzero_si512()}; }
inline W16 load_int8_pairs(const void *p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)))};
}
inline F16 low_numbers(W16 w) { return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w.v, 16), 16))}; }
inline F16 high_numbers(W16 w) { return {_mm512_cvtepi32_ps(_mm512_srai_epi32(w.v, 16))}; }
inline W16 dot(W16 sums, W16 pairs, uint32_t pair) {
    const __m512i both = _mm512_set1_epi32(static_cast<int>(pair));
#if defined(__AVX512VNNI__)
    // GCC 12 copies every sum before and after its _mm512_dpwssd_epi32, which costs a quarter of a decode step.
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(pairs.v), "v"(both));
    return sums;
#else
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs.v, both))};
#endif
}
inline F16 numbers_of(F16 sums) { return sums; }
inline F16 numbers_of(W16 sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
inline void store_int16(void *p, F16 a) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

inline W16 mix(W16 a, W16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline uint64_t folded(W16 a) {
    uint64_t parts[8], total = 0;
    _mm512_storeu_si512(parts, a.v);
    for (const uint64_t part : parts) total += part;
    return total;
}

#if defined(__AVX512BF16__)
inline F16 dot(F16 sums, W16 a, uint32_t pair) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)a.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)))};
}
// The same codes in bf16, two of a byte side by side. An index counts modulo 32, and of a byte's low half the next bit comes
// along, so the numbers stand there twice.
inline W16 load_int4_pairs(const void *p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    const __m256i eights = (__m256i)_mm512_cvtneps_pbh(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i meant = _mm512_inserti64x4(_mm512_castsi256_si512(eights), eights, 1);
    return {_mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), meant)};
}
// Two vectors of numbers that are exact in bf16, element by element side by side.
inline void store_pairs(void *p, F16 low, F16 high) {
    const __m512i words = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low.v), 16), _mm512_castps_si512(high.v));
    _mm512_storeu_si512(p, words);
}
inline void store_bf16(void *p, F16 a) {
    const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
    _mm256_storeu_si256(static_cast<__m256i *>(p), (__m256i)rounded);
}
#endif

}  // namespace
