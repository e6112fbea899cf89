// The vector vocabulary on AVX2 with FMA and F16C, and with AVX-VNNI where it is compiled for that: a logical vector is two registers;
// vec_portable.h says what each word means.
#pragma once
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

struct f32x16 {
    __m256 v[2];
};
struct i32x16 {
    __m256i v[2];
};
struct mask16 {
    __m256 v[2];
};
struct u8x64 {
    __m256i v[2];
};

static inline f32x16 f32_zero() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
static inline f32x16 f32_set(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
static inline f32x16 f32_load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
static inline void f32_store(float* p, f32x16 a) {
    _mm256_storeu_ps(p, a.v[0]);
    _mm256_storeu_ps(p + 8, a.v[1]);
}
static inline __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
static inline f32x16 f32_load_n(const float* p, int n) {
    return {{_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))}};
}
static inline void f32_store_n(float* p, f32x16 a, int n) {
    _mm256_maskstore_ps(p, first_lanes(n), a.v[0]);
    _mm256_maskstore_ps(p + 8, first_lanes(n - 8), a.v[1]);
}
static inline f32x16 f32_add(f32x16 a, f32x16 b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
static inline f32x16 f32_sub(f32x16 a, f32x16 b) { return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}}; }
static inline f32x16 f32_mul(f32x16 a, f32x16 b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
static inline f32x16 f32_div(f32x16 a, f32x16 b) { return {{_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}}; }
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
    return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
static inline f32x16 f32_fnma(f32x16 a, f32x16 b, f32x16 c) {
    return {{_mm256_fnmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fnmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
static inline f32x16 f32_max(f32x16 a, f32x16 b) { return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}}; }
static inline f32x16 f32_min(f32x16 a, f32x16 b) { return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}}; }
static inline mask16 f32_lt(f32x16 a, f32x16 b) {
    return {{_mm256_cmp_ps(a.v[0], b.v[0], _CMP_LT_OQ), _mm256_cmp_ps(a.v[1], b.v[1], _CMP_LT_OQ)}};
}
static inline mask16 f32_eq(f32x16 a, f32x16 b) {
    return {{_mm256_cmp_ps(a.v[0], b.v[0], _CMP_EQ_OQ), _mm256_cmp_ps(a.v[1], b.v[1], _CMP_EQ_OQ)}};
}
static inline f32x16 f32_blend(mask16 m, f32x16 a, f32x16 b) {
    return {{_mm256_blendv_ps(a.v[0], b.v[0], m.v[0]), _mm256_blendv_ps(a.v[1], b.v[1], m.v[1])}};
}
static inline i32x16 i32_blend(mask16 m, i32x16 a, i32x16 b) {
    return {
        {_mm256_blendv_epi8(a.v[0], b.v[0], _mm256_castps_si256(m.v[0])), _mm256_blendv_epi8(a.v[1], b.v[1], _mm256_castps_si256(m.v[1]))}};
}

static inline i32x16 i32_zero() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
static inline i32x16 i32_set(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
static inline i32x16 i32_load(const int32_t* p) {
    return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))}};
}
static inline void i32_store(int32_t* p, i32x16 a) {
    _mm256_storeu_si256((__m256i*)p, a.v[0]);
    _mm256_storeu_si256((__m256i*)(p + 8), a.v[1]);
}
static inline i32x16 i32_load_u8(const uint8_t* p) {
    return {{_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))}};
}
static inline i32x16 i32_load_i8(const int8_t* p) {
    return {{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))}};
}
static inline void i32_store_i8(int8_t* p, i32x16 a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.v[0], a.v[1]), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline int32_t i32_reduce_add(i32x16 a) {
    const __m256i h = _mm256_add_epi32(a.v[0], a.v[1]);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
static inline i32x16 i32_add(i32x16 a, i32x16 b) { return {{_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}}; }
static inline i32x16 i32_sub(i32x16 a, i32x16 b) { return {{_mm256_sub_epi32(a.v[0], b.v[0]), _mm256_sub_epi32(a.v[1], b.v[1])}}; }
static inline i32x16 i32_mul(i32x16 a, i32x16 b) { return {{_mm256_mullo_epi32(a.v[0], b.v[0]), _mm256_mullo_epi32(a.v[1], b.v[1])}}; }
static inline i32x16 i32_and(i32x16 a, i32x16 b) { return {{_mm256_and_si256(a.v[0], b.v[0]), _mm256_and_si256(a.v[1], b.v[1])}}; }
static inline i32x16 i32_or(i32x16 a, i32x16 b) { return {{_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])}}; }
static inline i32x16 i32_xor(i32x16 a, i32x16 b) { return {{_mm256_xor_si256(a.v[0], b.v[0]), _mm256_xor_si256(a.v[1], b.v[1])}}; }
template <int N>
static inline i32x16 i32_shl(i32x16 a) {
    return {{_mm256_slli_epi32(a.v[0], N), _mm256_slli_epi32(a.v[1], N)}};
}
template <int N>
static inline i32x16 i32_shr(i32x16 a) {
    return {{_mm256_srli_epi32(a.v[0], N), _mm256_srli_epi32(a.v[1], N)}};
}

static inline f32x16 f32_from_i32(i32x16 a) { return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}}; }
static inline i32x16 i32_round(f32x16 a) { return {{_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1])}}; }
static inline f32x16 f32_from_bits(i32x16 a) { return {{_mm256_castsi256_ps(a.v[0]), _mm256_castsi256_ps(a.v[1])}}; }
static inline i32x16 f32_to_bits(f32x16 a) { return {{_mm256_castps_si256(a.v[0]), _mm256_castps_si256(a.v[1])}}; }

static inline f32x16 f32_load_f16(const uint16_t* p) {
    return {{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))}};
}
static inline void f32_store_f16(uint16_t* p, f32x16 a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.v[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256 float_from_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
static inline f32x16 f32_load_bf16(const uint16_t* p) {
    return {{float_from_bf16(_mm_loadu_si128((const __m128i*)p)), float_from_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))}};
}

static inline float f32_reduce_add(f32x16 a) {
    const __m256 h = _mm256_add_ps(a.v[0], a.v[1]);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float f32_reduce_max(f32x16 a) {
    const __m256 h = _mm256_max_ps(a.v[0], a.v[1]);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline u8x64 u8_load(const uint8_t* p) {
    return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}};
}
static inline u8x64 u8_and(u8x64 a, uint8_t m) {
    const __m256i mask = _mm256_set1_epi8(char(m));
    return {{_mm256_and_si256(a.v[0], mask), _mm256_and_si256(a.v[1], mask)}};
}
static inline u8x64 u8_or(u8x64 a, u8x64 b) { return {{_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])}}; }
template <int N>
static inline u8x64 u8_shr16(u8x64 a) {
    return {{_mm256_srli_epi16(a.v[0], N), _mm256_srli_epi16(a.v[1], N)}};
}
template <int N>
static inline u8x64 u8_shl16(u8x64 a) {
    return {{_mm256_slli_epi16(a.v[0], N), _mm256_slli_epi16(a.v[1], N)}};
}

constexpr int kBlocksAtOnce = 1;
constexpr int kFloatRows = 4, kFewRows = 4;
static inline __m256i broadcast4(const int8_t* x) {
    int32_t w;
    std::memcpy(&w, x, 4);
    return _mm256_set1_epi32(w);
}
#ifdef __AVXVNNI__
template <int kBits, int N, int B>
static inline void i32_dot(i32x16* acc, const u8x64 (*w)[8], int first, const int8_t* x) {
    for (int b = 0; b < B; ++b) {
        for (int j = 0; j < N; ++j) {
            const __m256i four = broadcast4(x + 4 * j);
            for (int h = 0; h < 2; ++h) acc[b].v[h] = _mm256_dpbusd_avx_epi32(acc[b].v[h], w[b][first + j].v[h], four);
        }
    }
}
template <int N, int B>
static inline void i32_dot_s8(i32x16* out, const u8x64 (*w)[8], int first, const int8_t* x, int32_t sum_x) {
    for (int b = 0; b < B; ++b) out[b] = i32_set(-128 * sum_x);
    i32_dot<6, N, B>(out, w, first, x);
}
#else
// vpmaddubsw adds pairs of products in 16 bits, at most 254 (2^kBits - 1): so many lines fit before widening.
template <int kBits, int N, int B>
static inline void i32_dot(i32x16* acc, const u8x64 (*w)[8], int first, const int8_t* x) {
    constexpr int kRun = kBits == 4 ? 8 : kBits == 5 ? 4 : 2;
    const __m256i ones = _mm256_set1_epi16(1);
    for (int b = 0; b < B; ++b) {
        for (int begin = 0; begin < N; begin += kRun) {
            __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int j = begin; j < N && j < begin + kRun; ++j) {
                const __m256i four = broadcast4(x + 4 * j);
                for (int h = 0; h < 2; ++h) sum[h] = _mm256_add_epi16(sum[h], _mm256_maddubs_epi16(w[b][first + j].v[h], four));
            }
            for (int h = 0; h < 2; ++h) acc[b].v[h] = _mm256_add_epi32(acc[b].v[h], _mm256_madd_epi16(sum[h], ones));
        }
    }
}
// An unsigned 8-bit code would saturate: |w| times x with the sign of w stays within 2 * 128 * 127.
template <int N, int B>
static inline void i32_dot_s8(i32x16* out, const u8x64 (*w)[8], int first, const int8_t* x, int32_t /*sum_x*/) {
    const __m256i ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8(-128);
    for (int b = 0; b < B; ++b) {
        out[b] = i32_zero();
        for (int j = 0; j < N; ++j) {
            const __m256i four = broadcast4(x + 4 * j);
            for (int h = 0; h < 2; ++h) {
                const __m256i code = _mm256_xor_si256(w[b][first + j].v[h], offset);
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(four, code));
                out[b].v[h] = _mm256_add_epi32(out[b].v[h], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}
#endif
