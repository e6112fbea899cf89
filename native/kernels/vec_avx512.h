// The vector vocabulary on AVX-512 (F, BW, VL, VNNI) with FMA and F16C; vec_portable.h says what each word means.
#pragma once
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
struct mask16 {
    __mmask16 bits;
};
struct u8x64 {
    __m512i v;
};

static inline f32x16 f32_zero() { return {_mm512_setzero_ps()}; }
static inline f32x16 f32_set(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 f32_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void f32_store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline f32x16 f32_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
static inline void f32_store_n(float* p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
static inline f32x16 f32_add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 f32_sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 f32_mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 f32_div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 f32_fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 f32_max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 f32_min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline mask16 f32_lt(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
static inline mask16 f32_eq(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
static inline f32x16 f32_blend(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.bits, a.v, b.v)}; }
static inline i32x16 i32_blend(mask16 m, i32x16 a, i32x16 b) { return {_mm512_mask_blend_epi32(m.bits, a.v, b.v)}; }

static inline i32x16 i32_zero() { return {_mm512_setzero_si512()}; }
static inline i32x16 i32_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline i32x16 i32_load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void i32_store(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
static inline i32x16 i32_load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
static inline i32x16 i32_load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
static inline void i32_store_i8(int8_t* p, i32x16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
static inline int32_t i32_reduce_add(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
static inline i32x16 i32_add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline i32x16 i32_sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline i32x16 i32_mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
static inline i32x16 i32_and(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline i32x16 i32_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline i32x16 i32_xor(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
static inline i32x16 i32_shl(i32x16 a) {
    return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
static inline i32x16 i32_shr(i32x16 a) {
    return {_mm512_srli_epi32(a.v, N)};
}

static inline f32x16 f32_from_i32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline i32x16 i32_round(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline f32x16 f32_from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
static inline i32x16 f32_to_bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }

static inline f32x16 f32_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void f32_store_f16(uint16_t* p, f32x16 a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline f32x16 f32_load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

static inline float f32_reduce_add(f32x16 a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float f32_reduce_max(f32x16 a) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline u8x64 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline u8x64 u8_and(u8x64 a, uint8_t m) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(char(m)))}; }
static inline u8x64 u8_or(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
static inline u8x64 u8_shr16(u8x64 a) {
    return {_mm512_srli_epi16(a.v, N)};
}
template <int N>
static inline u8x64 u8_shl16(u8x64 a) {
    return {_mm512_slli_epi16(a.v, N)};
}
static inline __m512i broadcast4(const int8_t* x) {
    int32_t w;
    std::memcpy(&w, x, 4);
    return _mm512_set1_epi32(w);
}
constexpr int kBlocksAtOnce = 2;
constexpr int kFloatRows = 8, kFewRows = 8;
template <int kBits, int N, int B>
static inline void i32_dot(i32x16* acc, const u8x64 (*w)[8], int first, const int8_t* x) {
    for (int j = 0; j < N; ++j) {
        const __m512i four = broadcast4(x + 4 * j);
        for (int b = 0; b < B; ++b) acc[b].v = _mm512_dpbusd_epi32(acc[b].v, w[b][first + j].v, four);
    }
}
template <int N, int B>
static inline void i32_dot_s8(i32x16* out, const u8x64 (*w)[8], int first, const int8_t* x, int32_t sum_x) {
    for (int b = 0; b < B; ++b) out[b] = i32_set(-128 * sum_x);
    i32_dot<6, N, B>(out, w, first, x);
}
