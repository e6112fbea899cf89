// Quantising activations and multiplying them by packed weights (layouts: formats/packed.h).
//
// y[row][channel] is one float chain over k in the stored order: a group of 32 inputs adds its exact integer dot product,
// scaled, by a fused step. Neither the number of rows nor their tiling enters, so a row's bits depend on that row alone.

using foredraft::ActivationRows;
using foredraft::Format;
using foredraft::kChannels;
using foredraft::kGroup;
using foredraft::PackedMatrix;

static void quantize_rows(const ActivationRows& x, int row_begin, int row_end) {
    const i32x16 magnitude = i32_set(0x7fffffff);
    for (int row = row_begin; row < row_end; ++row) {
        const float* values = x.values + size_t(row) * x.k;
        for (int g = 0; g < x.k / kGroup; ++g) {
            const f32x16 a = f32_load(values + g * kGroup), b = f32_load(values + g * kGroup + 16);
            const f32x16 abs_a = f32_from_bits(i32_and(f32_to_bits(a), magnitude));
            const f32x16 abs_b = f32_from_bits(i32_and(f32_to_bits(b), magnitude));
            const float amax = f32_reduce_max(f32_max(abs_a, abs_b));
            // x - x is 0 for every number and NaN for NaN and infinities: such a group gets a NaN scale, which reaches
            // all outputs of this row and of no other. A group too small for a normal scale counts as zero.
            const bool finite = f32_reduce_add(f32_add(f32_sub(a, a), f32_sub(b, b))) == 0.0f;
            const bool zero = !finite || amax < 127.0f * 1.17549435e-38f;
            const f32x16 inverse = f32_set(zero ? 0.0f : 127.0f / amax);
            const float scale = !finite ? NAN : zero ? 0.0f : amax / 127.0f;
            const i32x16 codes_a = zero ? i32_zero() : i32_round(f32_mul(a, inverse));
            const i32x16 codes_b = zero ? i32_zero() : i32_round(f32_mul(b, inverse));
            const int32_t sum_a = i32_reduce_add(codes_a), sum_b = i32_reduce_add(codes_b);
            const size_t at = size_t(g) * x.rows + row;
            i32_store_i8(x.codes + at * kGroup, codes_a);
            i32_store_i8(x.codes + at * kGroup + 16, codes_b);
            x.scales[at] = scale;
            x.sums[at] = scale * float(sum_a + sum_b);
            x.code_sums[2 * at] = sum_a;
            x.code_sums[2 * at + 1] = sum_b;
        }
    }
}

// The eight lines of a group from 4, 5 and 6 bits.
static inline void unpack4(const uint8_t* p, u8x64* w) {
    for (int j = 0; j < 4; ++j) {
        const u8x64 v = u8_load(p + 64 * j);
        w[j] = u8_and(v, 15);
        w[j + 4] = u8_and(u8_shr16<4>(v), 15);
    }
}

static inline void unpack5(const uint8_t* p, u8x64* w) {
    unpack4(p, w);
    const u8x64 tops = u8_load(p + 256);
    w[0] = u8_or(w[0], u8_and(u8_shl16<4>(tops), 16));
    w[1] = u8_or(w[1], u8_and(u8_shl16<3>(tops), 16));
    w[2] = u8_or(w[2], u8_and(u8_shl16<2>(tops), 16));
    w[3] = u8_or(w[3], u8_and(u8_shl16<1>(tops), 16));
    w[4] = u8_or(w[4], u8_and(tops, 16));
    w[5] = u8_or(w[5], u8_and(u8_shr16<1>(tops), 16));
    w[6] = u8_or(w[6], u8_and(u8_shr16<2>(tops), 16));
    w[7] = u8_or(w[7], u8_and(u8_shr16<3>(tops), 16));
}

static inline void unpack6(const uint8_t* p, u8x64* w) {
    unpack4(p, w);
    for (int h = 0; h < 2; ++h) {
        const u8x64 tops = u8_load(p + 256 + 64 * h);
        w[4 * h] = u8_or(w[4 * h], u8_and(u8_shl16<4>(tops), 48));
        w[4 * h + 1] = u8_or(w[4 * h + 1], u8_and(u8_shl16<2>(tops), 48));
        w[4 * h + 2] = u8_or(w[4 * h + 2], u8_and(tops, 48));
        w[4 * h + 3] = u8_or(w[4 * h + 3], u8_and(u8_shr16<2>(tops), 48));
    }
}

template <int kBits>
static inline void unpack(const uint8_t* p, u8x64* w) {
    if constexpr (kBits == 4) unpack4(p, w);
    if constexpr (kBits == 5) unpack5(p, w);
    if constexpr (kBits == 6) unpack6(p, w);
    if constexpr (kBits == 8) {
        for (int j = 0; j < 8; ++j) w[j] = u8_load(p + 64 * j);
    }
}

// What a group of one row brings to the product.
struct GroupInputs {
    const int8_t* codes;
    float scale, sum;
    const int32_t* code_sums;
};

// w = d (code - zero).
template <int kBits>
struct Symmetric {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 2, kUnitBytes = 2 * (32 + kCodeBytes);
    struct Unit {};
    struct Group {
        u8x64 w[8];
        f32x16 d;
    };
    static inline Unit unit(const uint8_t*) { return {}; }
    static inline void load(const uint8_t* p, Unit, int g, Group& out) {
        unpack<kBits>(p + 64 + g * kCodeBytes, out.w);
        out.d = f32_load_f16((const uint16_t*)(p + 32 * g));
    }
    static inline f32x16 add(const Group& w, const GroupInputs& x, f32x16 acc) {
        const int32_t sum = x.code_sums[0] + x.code_sums[1];
        i32x16 dot;
        if constexpr (kBits == 8) dot = i32_dot_s8<8>(w.w, x.codes, sum);
        else dot = i32_dot<kBits, 8>(i32_set(-(1 << (kBits - 1)) * sum), w.w, x.codes);
        return f32_fma(f32_mul(w.d, f32_set(x.scale)), f32_from_i32(dot), acc);
    }
};

// w = d code + m.
template <int kBits>
struct Affine {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 1, kUnitBytes = 64 + kCodeBytes;
    struct Unit {};
    struct Group {
        u8x64 w[8];
        f32x16 d, m;
    };
    static inline Unit unit(const uint8_t*) { return {}; }
    static inline void load(const uint8_t* p, Unit, int, Group& out) {
        unpack<kBits>(p + 64, out.w);
        out.d = f32_load_f16((const uint16_t*)p);
        out.m = f32_load_f16((const uint16_t*)(p + 32));
    }
    static inline f32x16 add(const Group& w, const GroupInputs& x, f32x16 acc) {
        const i32x16 dot = i32_dot<kBits, 8>(i32_zero(), w.w, x.codes);
        acc = f32_fma(f32_mul(w.d, f32_set(x.scale)), f32_from_i32(dot), acc);
        return f32_fma(w.m, f32_set(x.sum), acc);
    }
};

// w = d sc code - m mn, eight groups sharing d and m.
template <int kBits>
struct SuperAffine {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 8, kUnitBytes = 8 * (kCodeBytes + 32) + 64;
    struct Unit {
        f32x16 d, m;
    };
    struct Group {
        u8x64 w[8];
        f32x16 d, m;
    };
    static inline Unit unit(const uint8_t* p) {
        const uint16_t* halves = (const uint16_t*)(p + 8 * (kCodeBytes + 32));
        return {f32_load_f16(halves), f32_load_f16(halves + 16)};
    }
    static inline void load(const uint8_t* p, Unit u, int g, Group& out) {
        unpack<kBits>(p + g * kCodeBytes, out.w);
        const uint8_t* sc = p + 8 * kCodeBytes + 16 * g;
        out.d = f32_mul(u.d, f32_from_i32(i32_load_u8(sc)));
        out.m = f32_mul(u.m, f32_from_i32(i32_load_u8(sc + 128)));
    }
    static inline f32x16 add(const Group& w, const GroupInputs& x, f32x16 acc) {
        const i32x16 dot = i32_dot<kBits, 8>(i32_zero(), w.w, x.codes);
        acc = f32_fma(f32_mul(w.d, f32_set(x.scale)), f32_from_i32(dot), acc);
        return f32_fnma(w.m, f32_set(x.sum), acc);
    }
};

// w = d sc (code - 32), a scale for each half group.
struct SuperSymmetric6 {
    static constexpr int kCodeBytes = 384, kGroups = 8, kUnitBytes = 8 * (kCodeBytes + 32) + 32;
    struct Unit {
        f32x16 d;
    };
    struct Group {
        u8x64 w[8];
        f32x16 d, s0, s1;
    };
    static inline Unit unit(const uint8_t* p) { return {f32_load_f16((const uint16_t*)(p + 8 * (kCodeBytes + 32)))}; }
    static inline void load(const uint8_t* p, Unit u, int g, Group& out) {
        unpack<6>(p + g * kCodeBytes, out.w);
        const int8_t* sc = (const int8_t*)(p + 8 * kCodeBytes + 32 * g);
        out.d = u.d;
        out.s0 = f32_from_i32(i32_load_i8(sc));
        out.s1 = f32_from_i32(i32_load_i8(sc + 16));
    }
    static inline f32x16 add(const Group& w, const GroupInputs& x, f32x16 acc) {
        const i32x16 a = i32_dot<6, 4>(i32_set(-32 * x.code_sums[0]), w.w, x.codes);
        const i32x16 b = i32_dot<6, 4>(i32_set(-32 * x.code_sums[1]), w.w + 4, x.codes + 16);
        // Both products and their sum stay below 2^24, so this is integer arithmetic.
        const f32x16 both = f32_fma(w.s0, f32_from_i32(a), f32_mul(w.s1, f32_from_i32(b)));
        return f32_fma(f32_mul(w.d, f32_set(x.scale)), both, acc);
    }
};

// How far ahead of the codes memory is asked for: enough to cover its latency at full bandwidth.
constexpr int kPrefetchBytes = 4096;

static inline void prefetch(const uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + kPrefetchBytes + i, 0, 3);
}

// M rows from row0 on, one block of channels. The codes of a group are unpacked once, for all rows.
template <class F, int M>
static void integer_tile(const uint8_t* p, const ActivationRows& x, int row0, float* y, size_t ldy) {
    f32x16 acc[M];
    for (int m = 0; m < M; ++m) acc[m] = f32_zero();
    const int num_groups = x.k / kGroup;
    size_t at = size_t(row0);
    for (int g0 = 0; g0 < num_groups; g0 += F::kGroups, p += F::kUnitBytes) {
        const auto unit = F::unit(p);
        const int groups = F::kGroups == 2 && g0 + 1 == num_groups ? 1 : F::kGroups;
        for (int g = 0; g < groups; ++g, at += size_t(x.rows)) {
            prefetch(p + g * (F::kUnitBytes / F::kGroups), F::kUnitBytes / F::kGroups);
            typename F::Group w;
            F::load(p, unit, g, w);
            for (int m = 0; m < M; ++m) {
                const size_t i = at + m;
                acc[m] = F::add(w, {x.codes + i * kGroup, x.scales[i], x.sums[i], x.code_sums + 2 * i}, acc[m]);
            }
        }
    }
    for (int m = 0; m < M; ++m) f32_store(y + (row0 + m) * ldy, acc[m]);
}

template <class F>
struct IntegerTiles {
    template <int M>
    static void run(const uint8_t* p, const ActivationRows& x, int row0, float* y, size_t ldy) {
        integer_tile<F, M>(p, x, row0, y, ldy);
    }
};

static inline f32x16 load_weights(const float* p) { return f32_load(p); }
struct HalfWeights {
    uint16_t bits;
};
struct BrainWeights {
    uint16_t bits;
};
static inline f32x16 load_weights(const HalfWeights* p) { return f32_load_f16(&p->bits); }
static inline f32x16 load_weights(const BrainWeights* p) { return f32_load_bf16(&p->bits); }

template <class T>
struct FloatTiles {
    template <int M>
    static void run(const uint8_t* p, const ActivationRows& x, int row0, float* y, size_t ldy) {
        f32x16 acc[M];
        const float* values[M];
        for (int m = 0; m < M; ++m) {
            acc[m] = f32_zero();
            values[m] = x.values + size_t(row0 + m) * x.k;
        }
        for (int i = 0; i < x.k; ++i, p += kChannels * sizeof(T)) {
            __builtin_prefetch(p + kPrefetchBytes, 0, 3);
            const f32x16 w = load_weights((const T*)p);
            for (int m = 0; m < M; ++m) acc[m] = f32_fma(w, f32_set(values[m][i]), acc[m]);
        }
        for (int m = 0; m < M; ++m) f32_store(y + (row0 + m) * ldy, acc[m]);
    }
};

// Rows in runs whose codes stay in the second cache; within a run a block of weights is read from memory once and from
// the first cache for each further tile.
constexpr int kRowRun = 64;

template <class Tiles>
static void matmul_blocks(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end) {
    for (int run = 0; run < x.rows; run += kRowRun) {
        const int end = run + kRowRun < x.rows ? run + kRowRun : x.rows;
        for (int b = block_begin; b < block_end; ++b) {
            const uint8_t* p = w.data + size_t(b) * w.block_bytes;
            float* out = y + size_t(b) * kChannels;
            int row = run;
            for (; end - row >= 16; row += 16) Tiles::template run<16>(p, x, row, out, ldy);
            if (end - row >= 12) {
                Tiles::template run<12>(p, x, row, out, ldy);
                row += 12;
            }
            if (end - row >= 8) {
                Tiles::template run<8>(p, x, row, out, ldy);
                row += 8;
            }
            if (end - row >= 6) {
                Tiles::template run<6>(p, x, row, out, ldy);
                row += 6;
            }
            if (end - row >= 4) {
                Tiles::template run<4>(p, x, row, out, ldy);
                row += 4;
            }
            if (end - row >= 2) {
                Tiles::template run<2>(p, x, row, out, ldy);
                row += 2;
            }
            if (end - row >= 1) Tiles::template run<1>(p, x, row, out, ldy);
        }
    }
}

static void matmul(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end) {
    switch (w.format) {
        case Format::F32:
            return matmul_blocks<FloatTiles<float>>(w, x, y, ldy, block_begin, block_end);
        case Format::F16:
            return matmul_blocks<FloatTiles<HalfWeights>>(w, x, y, ldy, block_begin, block_end);
        case Format::BF16:
            return matmul_blocks<FloatTiles<BrainWeights>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4S:
            return matmul_blocks<IntegerTiles<Symmetric<4>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4A:
            return matmul_blocks<IntegerTiles<Affine<4>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5S:
            return matmul_blocks<IntegerTiles<Symmetric<5>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5A:
            return matmul_blocks<IntegerTiles<Affine<5>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q8S:
            return matmul_blocks<IntegerTiles<Symmetric<8>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4K:
            return matmul_blocks<IntegerTiles<SuperAffine<4>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5K:
            return matmul_blocks<IntegerTiles<SuperAffine<5>>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q6K:
            return matmul_blocks<IntegerTiles<SuperSymmetric6>>(w, x, y, ldy, block_begin, block_end);
    }
}
