// The vector vocabulary on AArch64 with dot products: a logical vector is four registers; vec_portable.h says what each
// word means.
#pragma once
#include <arm_neon.h>
#include <cmath>
#include <cstdint>
#include <cstring>

struct f32x16 {
    float32x4_t v[4];
};
struct i32x16 {
    int32x4_t v[4];
};
struct mask16 {
    uint32x4_t v[4];
};
struct u8x64 {
    uint8x16_t v[4];
};

static inline f32x16 f32_zero() { return {{vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)}}; }
static inline f32x16 f32_set(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
static inline f32x16 f32_load(const float* p) {
    return {{vld1q_f32(p + 4 * 0), vld1q_f32(p + 4 * 1), vld1q_f32(p + 4 * 2), vld1q_f32(p + 4 * 3)}};
}
static inline void f32_store(float* p, f32x16 a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline f32x16 f32_load_n(const float* p, int n) {
    float lanes[16] = {};
    std::memcpy(lanes, p, sizeof(float) * n);
    return f32_load(lanes);
}
static inline void f32_store_n(float* p, f32x16 a, int n) {
    float lanes[16];
    f32_store(lanes, a);
    std::memcpy(p, lanes, sizeof(float) * n);
}
static inline f32x16 f32_add(f32x16 a, f32x16 b) {
    return {{vaddq_f32(a.v[0], b.v[0]), vaddq_f32(a.v[1], b.v[1]), vaddq_f32(a.v[2], b.v[2]), vaddq_f32(a.v[3], b.v[3])}};
}
static inline f32x16 f32_sub(f32x16 a, f32x16 b) {
    return {{vsubq_f32(a.v[0], b.v[0]), vsubq_f32(a.v[1], b.v[1]), vsubq_f32(a.v[2], b.v[2]), vsubq_f32(a.v[3], b.v[3])}};
}
static inline f32x16 f32_mul(f32x16 a, f32x16 b) {
    return {{vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1]), vmulq_f32(a.v[2], b.v[2]), vmulq_f32(a.v[3], b.v[3])}};
}
static inline f32x16 f32_div(f32x16 a, f32x16 b) {
    return {{vdivq_f32(a.v[0], b.v[0]), vdivq_f32(a.v[1], b.v[1]), vdivq_f32(a.v[2], b.v[2]), vdivq_f32(a.v[3], b.v[3])}};
}
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
    return {{vfmaq_f32(c.v[0], a.v[0], b.v[0]), vfmaq_f32(c.v[1], a.v[1], b.v[1]), vfmaq_f32(c.v[2], a.v[2], b.v[2]),
             vfmaq_f32(c.v[3], a.v[3], b.v[3])}};
}
static inline f32x16 f32_fnma(f32x16 a, f32x16 b, f32x16 c) {
    return {{vfmsq_f32(c.v[0], a.v[0], b.v[0]), vfmsq_f32(c.v[1], a.v[1], b.v[1]), vfmsq_f32(c.v[2], a.v[2], b.v[2]),
             vfmsq_f32(c.v[3], a.v[3], b.v[3])}};
}
// Not vmaxq, whose NaN rule differs.
static inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline f32x16 f32_max(f32x16 a, f32x16 b) {
    return {{larger(a.v[0], b.v[0]), larger(a.v[1], b.v[1]), larger(a.v[2], b.v[2]), larger(a.v[3], b.v[3])}};
}
static inline f32x16 f32_min(f32x16 a, f32x16 b) {
    return {{smaller(a.v[0], b.v[0]), smaller(a.v[1], b.v[1]), smaller(a.v[2], b.v[2]), smaller(a.v[3], b.v[3])}};
}
static inline mask16 f32_lt(f32x16 a, f32x16 b) {
    return {{vcltq_f32(a.v[0], b.v[0]), vcltq_f32(a.v[1], b.v[1]), vcltq_f32(a.v[2], b.v[2]), vcltq_f32(a.v[3], b.v[3])}};
}
static inline mask16 f32_eq(f32x16 a, f32x16 b) {
    return {{vceqq_f32(a.v[0], b.v[0]), vceqq_f32(a.v[1], b.v[1]), vceqq_f32(a.v[2], b.v[2]), vceqq_f32(a.v[3], b.v[3])}};
}
static inline f32x16 f32_blend(mask16 m, f32x16 a, f32x16 b) {
    return {{vbslq_f32(m.v[0], b.v[0], a.v[0]), vbslq_f32(m.v[1], b.v[1], a.v[1]), vbslq_f32(m.v[2], b.v[2], a.v[2]),
             vbslq_f32(m.v[3], b.v[3], a.v[3])}};
}
static inline i32x16 i32_blend(mask16 m, i32x16 a, i32x16 b) {
    return {{vbslq_s32(m.v[0], b.v[0], a.v[0]), vbslq_s32(m.v[1], b.v[1], a.v[1]), vbslq_s32(m.v[2], b.v[2], a.v[2]),
             vbslq_s32(m.v[3], b.v[3], a.v[3])}};
}

static inline i32x16 i32_zero() { return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}}; }
static inline i32x16 i32_set(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
static inline i32x16 i32_load(const int32_t* p) {
    return {{vld1q_s32(p + 4 * 0), vld1q_s32(p + 4 * 1), vld1q_s32(p + 4 * 2), vld1q_s32(p + 4 * 3)}};
}
static inline void i32_store(int32_t* p, i32x16 a) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}
static inline i32x16 i32_load_u8(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_u8(vget_high_u8(bytes));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
static inline i32x16 i32_load_i8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)), vmovl_s16(vget_high_s16(hi))}};
}
static inline void i32_store_i8(int8_t* p, i32x16 a) {
    const int16x8_t lo = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1])), hi = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
static inline int32_t i32_reduce_add(i32x16 a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
static inline i32x16 i32_add(i32x16 a, i32x16 b) {
    return {{vaddq_s32(a.v[0], b.v[0]), vaddq_s32(a.v[1], b.v[1]), vaddq_s32(a.v[2], b.v[2]), vaddq_s32(a.v[3], b.v[3])}};
}
static inline i32x16 i32_sub(i32x16 a, i32x16 b) {
    return {{vsubq_s32(a.v[0], b.v[0]), vsubq_s32(a.v[1], b.v[1]), vsubq_s32(a.v[2], b.v[2]), vsubq_s32(a.v[3], b.v[3])}};
}
static inline i32x16 i32_mul(i32x16 a, i32x16 b) {
    return {{vmulq_s32(a.v[0], b.v[0]), vmulq_s32(a.v[1], b.v[1]), vmulq_s32(a.v[2], b.v[2]), vmulq_s32(a.v[3], b.v[3])}};
}
static inline i32x16 i32_and(i32x16 a, i32x16 b) {
    return {{vandq_s32(a.v[0], b.v[0]), vandq_s32(a.v[1], b.v[1]), vandq_s32(a.v[2], b.v[2]), vandq_s32(a.v[3], b.v[3])}};
}
static inline i32x16 i32_or(i32x16 a, i32x16 b) {
    return {{vorrq_s32(a.v[0], b.v[0]), vorrq_s32(a.v[1], b.v[1]), vorrq_s32(a.v[2], b.v[2]), vorrq_s32(a.v[3], b.v[3])}};
}
static inline i32x16 i32_xor(i32x16 a, i32x16 b) {
    return {{veorq_s32(a.v[0], b.v[0]), veorq_s32(a.v[1], b.v[1]), veorq_s32(a.v[2], b.v[2]), veorq_s32(a.v[3], b.v[3])}};
}
template <int N>
static inline i32x16 i32_shl(i32x16 a) {
    return {{vshlq_n_s32(a.v[0], N), vshlq_n_s32(a.v[1], N), vshlq_n_s32(a.v[2], N), vshlq_n_s32(a.v[3], N)}};
}
template <int N>
static inline i32x16 i32_shr(i32x16 a) {
    return {{vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[0]), N)),
             vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[1]), N)),
             vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[2]), N)),
             vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[3]), N))}};
}

static inline f32x16 f32_from_i32(i32x16 a) {
    return {{vcvtq_f32_s32(a.v[0]), vcvtq_f32_s32(a.v[1]), vcvtq_f32_s32(a.v[2]), vcvtq_f32_s32(a.v[3])}};
}
static inline i32x16 i32_round(f32x16 a) {
    return {{vcvtnq_s32_f32(a.v[0]), vcvtnq_s32_f32(a.v[1]), vcvtnq_s32_f32(a.v[2]), vcvtnq_s32_f32(a.v[3])}};
}
static inline f32x16 f32_from_bits(i32x16 a) {
    return {{vreinterpretq_f32_s32(a.v[0]), vreinterpretq_f32_s32(a.v[1]), vreinterpretq_f32_s32(a.v[2]), vreinterpretq_f32_s32(a.v[3])}};
}
static inline i32x16 f32_to_bits(f32x16 a) {
    return {{vreinterpretq_s32_f32(a.v[0]), vreinterpretq_s32_f32(a.v[1]), vreinterpretq_s32_f32(a.v[2]), vreinterpretq_s32_f32(a.v[3])}};
}

static inline f32x16 f32_load_f16(const uint16_t* p) {
    return {{vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * 0))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * 1))),
             vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * 2))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * 3)))}};
}
static inline void f32_store_f16(uint16_t* p, f32x16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
static inline f32x16 f32_load_bf16(const uint16_t* p) {
    return {{vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * 0), 16)), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * 1), 16)),
             vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * 2), 16)), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * 3), 16))}};
}

static inline float f32_reduce_add(f32x16 a) {
    const float32x4_t h = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t q = vadd_f32(vget_low_f32(h), vget_high_f32(h));
    return vget_lane_f32(q, 0) + vget_lane_f32(q, 1);
}
static inline float f32_reduce_max(f32x16 a) {
    float32x4_t h = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
    h = larger(h, vcombine_f32(vget_high_f32(h), vget_high_f32(h)));
    const float first = vgetq_lane_f32(h, 0), second = vgetq_lane_f32(h, 1);
    return first > second ? first : second;
}

static inline u8x64 u8_load(const uint8_t* p) {
    return {{vld1q_u8(p + 16 * 0), vld1q_u8(p + 16 * 1), vld1q_u8(p + 16 * 2), vld1q_u8(p + 16 * 3)}};
}
static inline u8x64 u8_and(u8x64 a, uint8_t m) {
    return {{vandq_u8(a.v[0], vdupq_n_u8(m)), vandq_u8(a.v[1], vdupq_n_u8(m)), vandq_u8(a.v[2], vdupq_n_u8(m)),
             vandq_u8(a.v[3], vdupq_n_u8(m))}};
}
static inline u8x64 u8_or(u8x64 a, u8x64 b) {
    return {{vorrq_u8(a.v[0], b.v[0]), vorrq_u8(a.v[1], b.v[1]), vorrq_u8(a.v[2], b.v[2]), vorrq_u8(a.v[3], b.v[3])}};
}
template <int N>
static inline u8x64 u8_shr16(u8x64 a) {
    return {{vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a.v[0]), N)),
             vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a.v[1]), N)),
             vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a.v[2]), N)),
             vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a.v[3]), N))}};
}
template <int N>
static inline u8x64 u8_shl16(u8x64 a) {
    return {{vreinterpretq_u8_u16(vshlq_n_u16(vreinterpretq_u16_u8(a.v[0]), N)),
             vreinterpretq_u8_u16(vshlq_n_u16(vreinterpretq_u16_u8(a.v[1]), N)),
             vreinterpretq_u8_u16(vshlq_n_u16(vreinterpretq_u16_u8(a.v[2]), N)),
             vreinterpretq_u8_u16(vshlq_n_u16(vreinterpretq_u16_u8(a.v[3]), N))}};
}

constexpr int kBlocksAtOnce = 1;
constexpr int kFloatRows = 4, kFewRows = 4;
// Codes below 7 bits are the same number signed or not. `flip` turns an unsigned byte w into w - 128.
template <int N>
static inline void dot_lines(int32x4_t* acc, const u8x64* w, const int8_t* x, uint8x16_t flip) {
    static_assert(N % 4 == 0);
    for (int j = 0; j < N; j += 4) {
        const int8x16_t inputs = vld1q_s8(x + 4 * j);
        for (int i = 0; i < 4; ++i) {
            acc[i] = vdotq_laneq_s32(acc[i], vreinterpretq_s8_u8(veorq_u8(w[j].v[i], flip)), inputs, 0);
            acc[i] = vdotq_laneq_s32(acc[i], vreinterpretq_s8_u8(veorq_u8(w[j + 1].v[i], flip)), inputs, 1);
            acc[i] = vdotq_laneq_s32(acc[i], vreinterpretq_s8_u8(veorq_u8(w[j + 2].v[i], flip)), inputs, 2);
            acc[i] = vdotq_laneq_s32(acc[i], vreinterpretq_s8_u8(veorq_u8(w[j + 3].v[i], flip)), inputs, 3);
        }
    }
}
template <int kBits, int N, int B>
static inline void i32_dot(i32x16* acc, const u8x64 (*w)[8], int first, const int8_t* x) {
    for (int b = 0; b < B; ++b) dot_lines<N>(acc[b].v, w[b] + first, x, vdupq_n_u8(0));
}
template <int N, int B>
static inline void i32_dot_s8(i32x16* out, const u8x64 (*w)[8], int first, const int8_t* x, int32_t /*sum_x*/) {
    for (int b = 0; b < B; ++b) {
        out[b] = i32_zero();
        dot_lines<N>(out[b].v, w[b] + first, x, vdupq_n_u8(128));
    }
}
