// The vector vocabulary of the kernels, in plain C++: the reference that every instruction set must equal bit for bit.
//
// One logical vector is always 16 lanes wide, whatever the registers: a float sum runs over 16 fixed lanes and one fixed
// tree (reduce_add), so all instruction sets add in the same order. Fused steps are explicit (fma); the build forbids
// contraction. Each kernel translation unit includes exactly one vec_*.h, inside its own namespace, and then the *.inl
// kernels, which are written once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct f32x16 {
    float lane[16];
};
struct i32x16 {
    int32_t lane[16];
};
struct mask16 {
    uint16_t bits;
};
// 64 bytes: 16 channels x 4 consecutive k, the operand of dot4.
struct u8x64 {
    uint8_t byte[64];
};

#define FD_EACH(i) for (int i = 0; i < 16; ++i)

static inline f32x16 f32_zero() { return f32x16{}; }
static inline f32x16 f32_set(float x) {
    f32x16 r;
    FD_EACH(i) r.lane[i] = x;
    return r;
}
static inline f32x16 f32_load(const float* p) {
    f32x16 r;
    std::memcpy(&r, p, 64);
    return r;
}
static inline void f32_store(float* p, f32x16 a) { std::memcpy(p, &a, 64); }
// The first n lanes (0..16) from memory, the rest zero; nothing past p[n-1] is read or written.
static inline f32x16 f32_load_n(const float* p, int n) {
    f32x16 r{};
    std::memcpy(&r, p, sizeof(float) * n);
    return r;
}
static inline void f32_store_n(float* p, f32x16 a, int n) { std::memcpy(p, &a, sizeof(float) * n); }
static inline f32x16 f32_add(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] + b.lane[i];
    return a;
}
static inline f32x16 f32_sub(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] - b.lane[i];
    return a;
}
static inline f32x16 f32_mul(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] * b.lane[i];
    return a;
}
static inline f32x16 f32_div(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] / b.lane[i];
    return a;
}
// a * b + c, rounded once; fnma: c - a * b.
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
    FD_EACH(i) a.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return a;
}
static inline f32x16 f32_fnma(f32x16 a, f32x16 b, f32x16 c) {
    FD_EACH(i) a.lane[i] = std::fma(-a.lane[i], b.lane[i], c.lane[i]);
    return a;
}
// x86's rule, which NEON must emulate: a > b ? a : b, so a NaN in either operand gives b.
static inline f32x16 f32_max(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
static inline f32x16 f32_min(f32x16 a, f32x16 b) {
    FD_EACH(i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
static inline mask16 f32_lt(f32x16 a, f32x16 b) {
    mask16 m{0};
    FD_EACH(i) m.bits |= uint16_t(a.lane[i] < b.lane[i]) << i;
    return m;
}
static inline mask16 f32_eq(f32x16 a, f32x16 b) {
    mask16 m{0};
    FD_EACH(i) m.bits |= uint16_t(a.lane[i] == b.lane[i]) << i;
    return m;
}
// b where the mask is set, else a.
static inline f32x16 f32_blend(mask16 m, f32x16 a, f32x16 b) {
    FD_EACH(i) if (m.bits >> i & 1) a.lane[i] = b.lane[i];
    return a;
}
static inline i32x16 i32_blend(mask16 m, i32x16 a, i32x16 b) {
    FD_EACH(i) if (m.bits >> i & 1) a.lane[i] = b.lane[i];
    return a;
}

static inline i32x16 i32_zero() { return i32x16{}; }
static inline i32x16 i32_set(int32_t x) {
    i32x16 r;
    FD_EACH(i) r.lane[i] = x;
    return r;
}
static inline i32x16 i32_load(const int32_t* p) {
    i32x16 r;
    std::memcpy(&r, p, 64);
    return r;
}
static inline void i32_store(int32_t* p, i32x16 a) { std::memcpy(p, &a, 64); }
static inline i32x16 i32_load_u8(const uint8_t* p) {
    i32x16 r;
    FD_EACH(i) r.lane[i] = p[i];
    return r;
}
static inline i32x16 i32_load_i8(const int8_t* p) {
    i32x16 r;
    FD_EACH(i) r.lane[i] = p[i];
    return r;
}
// Lanes must fit in a byte.
static inline void i32_store_i8(int8_t* p, i32x16 a) { FD_EACH(i) p[i] = int8_t(a.lane[i]); }
static inline int32_t i32_reduce_add(i32x16 a) {
    int32_t s = 0;
    FD_EACH(i) s += a.lane[i];
    return s;
}
// Wrap-around arithmetic.
static inline i32x16 i32_add(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] = int32_t(uint32_t(a.lane[i]) + uint32_t(b.lane[i]));
    return a;
}
static inline i32x16 i32_sub(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] = int32_t(uint32_t(a.lane[i]) - uint32_t(b.lane[i]));
    return a;
}
static inline i32x16 i32_mul(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] = int32_t(uint32_t(a.lane[i]) * uint32_t(b.lane[i]));
    return a;
}
static inline i32x16 i32_and(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] &= b.lane[i];
    return a;
}
static inline i32x16 i32_or(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] |= b.lane[i];
    return a;
}
static inline i32x16 i32_xor(i32x16 a, i32x16 b) {
    FD_EACH(i) a.lane[i] ^= b.lane[i];
    return a;
}
template <int N>
static inline i32x16 i32_shl(i32x16 a) {
    FD_EACH(i) a.lane[i] = int32_t(uint32_t(a.lane[i]) << N);
    return a;
}
template <int N>
static inline i32x16 i32_shr(i32x16 a) {
    FD_EACH(i) a.lane[i] = int32_t(uint32_t(a.lane[i]) >> N);
    return a;
}

static inline f32x16 f32_from_i32(i32x16 a) {
    f32x16 r;
    FD_EACH(i) r.lane[i] = float(a.lane[i]);
    return r;
}
// Round to nearest even; |x| < 2^31 is the caller's duty.
static inline i32x16 i32_round(f32x16 a) {
    i32x16 r;
    FD_EACH(i) r.lane[i] = int32_t(std::nearbyintf(a.lane[i]));
    return r;
}
static inline f32x16 f32_from_bits(i32x16 a) {
    f32x16 r;
    std::memcpy(&r, &a, 64);
    return r;
}
static inline i32x16 f32_to_bits(f32x16 a) {
    i32x16 r;
    std::memcpy(&r, &a, 64);
    return r;
}

#include "kernels/half.inl"

static inline f32x16 f32_load_f16(const uint16_t* p) {
    f32x16 r;
    FD_EACH(i) r.lane[i] = half_to_float(p[i]);
    return r;
}
static inline void f32_store_f16(uint16_t* p, f32x16 a) { FD_EACH(i) p[i] = float_to_half(a.lane[i]); }
static inline f32x16 f32_load_bf16(const uint16_t* p) {
    i32x16 r;
    FD_EACH(i) r.lane[i] = int32_t(uint32_t(p[i]) << 16);
    return f32_from_bits(r);
}

// The one tree of the project: lane i + lane i+8, then +4, +2, +1.
static inline float f32_reduce_add(f32x16 a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; ++i) a.lane[i] = a.lane[i] + a.lane[i + w];
    return a.lane[0];
}
static inline float f32_reduce_max(f32x16 a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; ++i) a.lane[i] = a.lane[i] > a.lane[i + w] ? a.lane[i] : a.lane[i + w];
    return a.lane[0];
}

// Integer dot products: lane c adds w[j].byte[4c + i] * x[4j + i] over lines j and i = 0..3.
static inline u8x64 u8_load(const uint8_t* p) {
    u8x64 r;
    std::memcpy(&r, p, 64);
    return r;
}
static inline u8x64 u8_and(u8x64 a, uint8_t m) {
    for (auto& b : a.byte) b &= m;
    return a;
}
static inline u8x64 u8_or(u8x64 a, u8x64 b) {
    for (int i = 0; i < 64; ++i) a.byte[i] |= b.byte[i];
    return a;
}
// Shifts of each byte within its 16-bit word: bits may cross from the neighbour, mask afterwards.
template <int N>
static inline u8x64 u8_shr16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        uint16_t v;
        std::memcpy(&v, a.byte + i, 2);
        v = uint16_t(v >> N);
        std::memcpy(a.byte + i, &v, 2);
    }
    return a;
}
template <int N>
static inline u8x64 u8_shl16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        uint16_t v;
        std::memcpy(&v, a.byte + i, 2);
        v = uint16_t(v << N);
        std::memcpy(a.byte + i, &v, 2);
    }
    return a;
}

// Blocks of 16 channels that a product takes together: 2 where registers hold the lines of both.
constexpr int kBlocksAtOnce = 1;
// Rows whose sums float products hold in registers, and integer products of one block.
constexpr int kFloatRows = 4, kFewRows = 4;
// Adds N lines from line `first` on, for B blocks; codes of kBits <= 6 bits, x in -127..127.
template <int kBits, int N, int B>
static inline void i32_dot(i32x16* acc, const u8x64 (*w)[8], int first, const int8_t* x) {
    static_assert(kBits <= 6);
    for (int b = 0; b < B; ++b)
        for (int j = 0; j < N; ++j) FD_EACH(c) {
                int32_t s = 0;
                for (int i = 0; i < 4; ++i) s += int32_t(w[b][first + j].byte[4 * c + i]) * x[4 * j + i];
                acc[b].lane[c] += s;
            }
}
// Sets sums of N lines of 8-bit codes from line `first` on, unsigned bytes that stand for w - 128; sum_x is the sum of these 4N inputs, for
// sets whose instruction multiplies the unsigned byte.
template <int N, int B>
static inline void i32_dot_s8(i32x16* out, const u8x64 (*w)[8], int first, const int8_t* x, int32_t /*sum_x*/) {
    for (int b = 0; b < B; ++b) {
        out[b] = i32_zero();
        for (int j = 0; j < N; ++j) FD_EACH(c) {
                int32_t s = 0;
                for (int i = 0; i < 4; ++i) s += (int32_t(w[b][first + j].byte[4 * c + i]) - 128) * x[4 * j + i];
                out[b].lane[c] += s;
            }
    }
}
#undef FD_EACH
