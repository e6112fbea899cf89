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
            const size_t at = size_t(g) * x.rows + row;
            f32x16 half[2];
            float amax[2], sum = 0.0f;
            for (int h = 0; h < 2; ++h) {
                half[h] = f32_load(values + g * kGroup + 16 * h);
                amax[h] = f32_reduce_max(f32_from_bits(i32_and(f32_to_bits(half[h]), magnitude)));
            }
            if (!x.half_scales) amax[0] = amax[1] = amax[0] > amax[1] ? amax[0] : amax[1];
            // x - x is 0 for every number and NaN for NaN and infinities: such a group gets a NaN scale, which reaches
            // all outputs of this row and of no other. A half too small for a normal scale counts as zero.
            const f32x16 a = half[0], b = half[1];
            const bool finite = f32_reduce_add(f32_add(f32_sub(a, a), f32_sub(b, b))) == 0.0f;
            for (int h = 0; h < 2; ++h) {
                const bool zero = !finite || amax[h] < 127.0f * 1.17549435e-38f;
                const f32x16 inverse = f32_set(zero ? 0.0f : 127.0f / amax[h]);
                const float scale = !finite ? NAN : zero ? 0.0f : amax[h] / 127.0f;
                const i32x16 codes = zero ? i32_zero() : i32_round(f32_mul(half[h], inverse));
                const int32_t code_sum = i32_reduce_add(codes);
                i32_store_i8(x.codes + at * kGroup + 16 * h, codes);
                x.scales[2 * at + h] = scale;
                x.code_sums[2 * at + h] = code_sum;
                sum += scale * float(code_sum);
            }
            x.sums[at] = sum;
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
    const float* scales;  // of the two halves
    float sum;
    const int32_t* code_sums;
};

// The dot products of the two halves of a group, times their scales.
static inline f32x16 scaled(i32x16 first, i32x16 second, const float* scales) {
    return f32_fma(f32_set(scales[0]), f32_from_i32(first), f32_mul(f32_set(scales[1]), f32_from_i32(second)));
}

// Each integer format says how a group of B neighbouring blocks is loaded and how one row's group is added to B sums.

// w = d (code - zero).
template <int kBits>
struct Symmetric {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 2, kUnitBytes = 2 * (32 + kCodeBytes);
    template <int B>
    struct Group {
        u8x64 w[B][8];
        f32x16 d[B];
    };
    template <int B>
    static inline void load(const uint8_t* p, int g, int b, Group<B>& out) {
        unpack<kBits>(p + 64 + g * kCodeBytes, out.w[b]);
        out.d[b] = f32_load_f16((const uint16_t*)(p + 32 * g));
    }
    template <int B>
    static inline void add(const Group<B>& w, const GroupInputs& x, f32x16* acc) {
        i32x16 dot[2][B];
        for (int h = 0; h < 2; ++h) {
            if constexpr (kBits == 8) {
                i32_dot_s8<4, B>(dot[h], w.w, 4 * h, x.codes + 16 * h, x.code_sums[h]);
            } else {
                for (int b = 0; b < B; ++b) dot[h][b] = i32_set(-(1 << (kBits - 1)) * x.code_sums[h]);
                i32_dot<kBits, 4, B>(dot[h], w.w, 4 * h, x.codes + 16 * h);
            }
        }
        for (int b = 0; b < B; ++b) acc[b] = f32_fma(w.d[b], scaled(dot[0][b], dot[1][b], x.scales), acc[b]);
    }
};

// w = d code + m.
template <int kBits>
struct Affine {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 1, kUnitBytes = 64 + kCodeBytes;
    template <int B>
    struct Group {
        u8x64 w[B][8];
        f32x16 d[B], m[B];
    };
    template <int B>
    static inline void load(const uint8_t* p, int, int b, Group<B>& out) {
        unpack<kBits>(p + 64, out.w[b]);
        out.d[b] = f32_load_f16((const uint16_t*)p);
        out.m[b] = f32_load_f16((const uint16_t*)(p + 32));
    }
    template <int B>
    static inline void add(const Group<B>& w, const GroupInputs& x, f32x16* acc) {
        i32x16 dot[2][B];
        for (int h = 0; h < 2; ++h) {
            for (int b = 0; b < B; ++b) dot[h][b] = i32_zero();
            i32_dot<kBits, 4, B>(dot[h], w.w, 4 * h, x.codes + 16 * h);
        }
        const f32x16 sum = f32_set(x.sum);
        for (int b = 0; b < B; ++b) {
            acc[b] = f32_fma(w.d[b], scaled(dot[0][b], dot[1][b], x.scales), acc[b]);
            acc[b] = f32_fma(w.m[b], sum, acc[b]);
        }
    }
};

// w = d sc code - m mn, eight groups sharing d and m. The minimum is kept with its sign turned.
template <int kBits>
struct SuperAffine {
    static constexpr int kCodeBytes = 64 * kBits, kGroups = 8, kUnitBytes = 8 * (kCodeBytes + 32) + 64;
    template <int B>
    struct Group {
        u8x64 w[B][8];
        f32x16 d[B], m[B];
    };
    template <int B>
    static inline void load(const uint8_t* p, int g, int b, Group<B>& out) {
        unpack<kBits>(p + g * kCodeBytes, out.w[b]);
        const uint8_t* sc = p + 8 * kCodeBytes + 16 * g;
        const uint16_t* halves = (const uint16_t*)(p + 8 * (kCodeBytes + 32));
        out.d[b] = f32_mul(f32_load_f16(halves), f32_from_i32(i32_load_u8(sc)));
        out.m[b] = f32_fnma(f32_load_f16(halves + 16), f32_from_i32(i32_load_u8(sc + 128)), f32_zero());
    }
    template <int B>
    static inline void add(const Group<B>& w, const GroupInputs& x, f32x16* acc) {
        i32x16 dot[B];
        for (int b = 0; b < B; ++b) dot[b] = i32_zero();
        i32_dot<kBits, 8, B>(dot, w.w, 0, x.codes);
        const f32x16 scale = f32_set(x.scales[0]), sum = f32_set(x.sum);
        for (int b = 0; b < B; ++b) {
            acc[b] = f32_fma(f32_mul(w.d[b], scale), f32_from_i32(dot[b]), acc[b]);
            acc[b] = f32_fma(w.m[b], sum, acc[b]);
        }
    }
};

// w = d sc (code - 32), a scale for each half group.
struct SuperSymmetric6 {
    static constexpr int kCodeBytes = 384, kGroups = 8, kUnitBytes = 8 * (kCodeBytes + 32) + 32;
    template <int B>
    struct Group {
        u8x64 w[B][8];
        f32x16 d0[B], d1[B];
    };
    template <int B>
    static inline void load(const uint8_t* p, int g, int b, Group<B>& out) {
        unpack<6>(p + g * kCodeBytes, out.w[b]);
        const int8_t* sc = (const int8_t*)(p + 8 * kCodeBytes + 32 * g);
        const f32x16 d = f32_load_f16((const uint16_t*)(p + 8 * (kCodeBytes + 32)));
        out.d0[b] = f32_mul(d, f32_from_i32(i32_load_i8(sc)));
        out.d1[b] = f32_mul(d, f32_from_i32(i32_load_i8(sc + 16)));
    }
    template <int B>
    static inline void add(const Group<B>& w, const GroupInputs& x, f32x16* acc) {
        i32x16 dot0[B], dot1[B];
        for (int b = 0; b < B; ++b) {
            dot0[b] = i32_set(-32 * x.code_sums[0]);
            dot1[b] = i32_set(-32 * x.code_sums[1]);
        }
        i32_dot<6, 4, B>(dot0, w.w, 0, x.codes);
        i32_dot<6, 4, B>(dot1, w.w, 4, x.codes + 16);
        const f32x16 scale = f32_set(x.scales[0]);
        for (int b = 0; b < B; ++b) {
            const f32x16 both = f32_fma(w.d0[b], f32_from_i32(dot0[b]), f32_mul(w.d1[b], f32_from_i32(dot1[b])));
            acc[b] = f32_fma(scale, both, acc[b]);
        }
    }
};

// How many groups ahead of the codes memory is asked for, by block taken at a time: enough to cover its latency at full
// bandwidth.
constexpr size_t kPrefetchGroups = 28;

// Asks for what the walk over this block, and then over the one B further on, will read some way after `offset`.
template <int B>
static inline void prefetch(const uint8_t* block, size_t offset, size_t bytes, size_t block_bytes) {
    const size_t distance = B * kPrefetchGroups * bytes;
    const size_t ahead = offset + (distance < block_bytes ? distance : block_bytes);
    const uint8_t* p = block + ahead + (ahead < block_bytes ? 0 : (B - 1) * block_bytes);
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// Rows in runs whose codes stay in the second cache and whose sums stay in the first.
constexpr int kRowRun = 64;

// Rows row0 .. row0 + rows - 1 times B neighbouring blocks. The codes of a group are unpacked once, for all rows. M is the
// number of rows where it is fixed, so that their sums stay in registers, or 0.
template <class F, int B, int M>
static void integer_run(const uint8_t* p, size_t block_bytes, const ActivationRows& x, int row0, int any_rows, float* y, size_t ldy) {
    const int rows = M > 0 ? M : any_rows;
    f32x16 acc[M > 0 ? M : kRowRun][B];
    for (int m = 0; m < rows; ++m)
        for (int b = 0; b < B; ++b) acc[m][b] = f32_zero();
    constexpr int kGroupBytes = F::kUnitBytes / F::kGroups;
    const int num_groups = x.k / kGroup;
    for (int group = 0; group < num_groups; ++group) {
        typename F::template Group<B> w;
        for (int b = 0; b < B; ++b) {
            const uint8_t* block = p + b * block_bytes;
            F::load(block + size_t(group / F::kGroups) * F::kUnitBytes, group % F::kGroups, b, w);
            prefetch<B>(block, size_t(group) * kGroupBytes, kGroupBytes, block_bytes);
        }
        const size_t at = size_t(group) * x.rows + row0;
        const int8_t* codes = x.codes + at * kGroup;
        const float *scales = x.scales + 2 * at, *sums = x.sums + at;
        const int32_t* code_sums = x.code_sums + 2 * at;
        const auto add = [&](int m) { F::add(w, {codes + m * kGroup, scales + 2 * m, sums[m], code_sums + 2 * m}, acc[m]); };
        if constexpr (M > 0) {
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) add(m);
        } else {
            for (int m = 0; m < rows; ++m) add(m);
        }
    }
    for (int m = 0; m < rows; ++m)
        for (int b = 0; b < B; ++b) f32_store(y + (row0 + m) * ldy + b * kChannels, acc[m][b]);
}

// Few rows wait for memory, which serves one stream faster than two; more rows wait for the processor, which then uses a
// row's codes for several blocks.
template <class F, int M>
static void few_rows_run(const uint8_t* p, size_t block_bytes, const ActivationRows& x, int row0, int rows, float* y, size_t ldy) {
    if (rows == M) integer_run<F, 1, M>(p, block_bytes, x, row0, M, y, ldy);
    else if constexpr (M > 1) few_rows_run<F, M - 1>(p, block_bytes, x, row0, rows, y, ldy);
}

template <class F>
static void matmul_integer(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end) {
    for (int row = 0; row < x.rows; row += kRowRun) {
        const int rows = x.rows - row < kRowRun ? x.rows - row : kRowRun;
        for (int b = block_begin; b < block_end;) {
            const uint8_t* p = w.data + size_t(b) * w.block_bytes;
            float* out = y + size_t(b) * kChannels;
            const bool few = rows <= kFewRows || block_end - b < kBlocksAtOnce;
            if (!few) integer_run<F, kBlocksAtOnce, 0>(p, w.block_bytes, x, row, rows, out, ldy);
            else if (rows <= kFewRows) few_rows_run<F, kFewRows>(p, w.block_bytes, x, row, rows, out, ldy);
            else integer_run<F, 1, 0>(p, w.block_bytes, x, row, rows, out, ldy);
            b += few ? 1 : kBlocksAtOnce;
        }
    }
}

static inline f32x16 load_weights(const float* p) { return f32_load(p); }
struct HalfWeights {
    uint16_t bits;
};
struct BrainWeights {
    uint16_t bits;
};
static inline f32x16 load_weights(const HalfWeights* p) { return f32_load_f16(&p->bits); }
static inline f32x16 load_weights(const BrainWeights* p) { return f32_load_bf16(&p->bits); }

// Inputs that all rows take before the next: their weights stay in the first cache meanwhile.
constexpr int kInputRun = 128;

// Adds `inputs` inputs to the sums of M rows of x, which lie k apart.
template <int M, class T>
static void float_tile(const T* w, const float* x, int k, int inputs, f32x16* sums) {
    f32x16 acc[M];
    for (int m = 0; m < M; ++m) acc[m] = sums[m];
    for (int i = 0; i < inputs; ++i) {
        __builtin_prefetch(w + (i + kInputRun) * kChannels, 0, 3);
        const f32x16 weights = load_weights(w + i * kChannels);
        for (int m = 0; m < M; ++m) acc[m] = f32_fma(weights, f32_set(x[size_t(m) * k + i]), acc[m]);
    }
    for (int m = 0; m < M; ++m) sums[m] = acc[m];
}

template <class T>
static void float_run(const T* w, const ActivationRows& x, int row0, int rows, float* y, size_t ldy) {
    f32x16 acc[kRowRun];
    for (int m = 0; m < rows; ++m) acc[m] = f32_zero();
    for (int i = 0; i < x.k; i += kInputRun, w += kInputRun * kChannels) {
        const int inputs = x.k - i < kInputRun ? x.k - i : kInputRun;
        const float* values = x.values + size_t(row0) * x.k + i;
        int m = 0;
        for (; rows - m >= kFloatRows; m += kFloatRows) float_tile<kFloatRows>(w, values + size_t(m) * x.k, x.k, inputs, acc + m);
        if (rows - m >= 4) {
            float_tile<4>(w, values + size_t(m) * x.k, x.k, inputs, acc + m);
            m += 4;
        }
        if (rows - m >= 2) {
            float_tile<2>(w, values + size_t(m) * x.k, x.k, inputs, acc + m);
            m += 2;
        }
        if (m < rows) float_tile<1>(w, values + size_t(m) * x.k, x.k, inputs, acc + m);
    }
    for (int m = 0; m < rows; ++m) f32_store(y + (row0 + m) * ldy, acc[m]);
}

template <class T>
static void matmul_float(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end) {
    for (int row = 0; row < x.rows; row += kRowRun) {
        const int rows = x.rows - row < kRowRun ? x.rows - row : kRowRun;
        for (int b = block_begin; b < block_end; ++b)
            float_run((const T*)(w.data + size_t(b) * w.block_bytes), x, row, rows, y + size_t(b) * kChannels, ldy);
    }
}

static void matmul(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end) {
    switch (w.format) {
        case Format::F32:
            return matmul_float<float>(w, x, y, ldy, block_begin, block_end);
        case Format::F16:
            return matmul_float<HalfWeights>(w, x, y, ldy, block_begin, block_end);
        case Format::BF16:
            return matmul_float<BrainWeights>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4S:
            return matmul_integer<Symmetric<4>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4A:
            return matmul_integer<Affine<4>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5S:
            return matmul_integer<Symmetric<5>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5A:
            return matmul_integer<Affine<5>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q8S:
            return matmul_integer<Symmetric<8>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q4K:
            return matmul_integer<SuperAffine<4>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q5K:
            return matmul_integer<SuperAffine<5>>(w, x, y, ldy, block_begin, block_end);
        case Format::Q6K:
            return matmul_integer<SuperSymmetric6>(w, x, y, ldy, block_begin, block_end);
    }
}
