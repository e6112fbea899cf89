// Work over the vocabulary.
#include "kernels/noise.inl"

// 16 values from x + i, with `fill` past the end.
static inline f32x16 load_or(const float* x, int i, int n, float fill) {
    if (i + 16 <= n) return f32_load(x + i);
    float tail[16];
    for (int lane = 0; lane < 16; ++lane) tail[lane] = i + lane < n ? x[i + lane] : fill;
    return f32_load(tail);
}

static inline bool has_nan(f32x16 nan_or_zero) { return std::isnan(f32_reduce_add(nan_or_zero)); }

static int argmax(const float* x, int n) {
    constexpr int kWays = 4;  // independent chains of comparisons
    f32x16 best[kWays], nan = f32_zero();
    i32x16 where[kWays], index[kWays];
    int32_t lanes[16];
    for (int way = 0; way < kWays; ++way) {
        for (int lane = 0; lane < 16; ++lane) lanes[lane] = 16 * way + lane;
        best[way] = f32_set(-INFINITY);
        where[way] = index[way] = i32_load(lanes);
    }
    for (int i = 0; i < n; i += 16 * kWays) {
        for (int way = 0; way < kWays; ++way) {
            const f32x16 v = load_or(x, i + 16 * way, n, -INFINITY);
            nan = f32_blend(f32_eq(v, v), v, nan);
            const mask16 better = f32_lt(best[way], v);
            best[way] = f32_blend(better, best[way], v);
            where[way] = i32_blend(better, where[way], index[way]);
            index[way] = i32_add(index[way], i32_set(16 * kWays));
        }
    }
    if (n <= 0 || has_nan(nan)) return -1;
    float values[16];
    int32_t places[16];
    float top = -INFINITY;
    int winner = n;
    for (int way = 0; way < kWays; ++way) {
        f32_store(values, best[way]);
        i32_store(places, where[way]);
        for (int lane = 0; lane < 16; ++lane) {
            if (values[lane] > top || (values[lane] == top && places[lane] < winner)) {
                top = values[lane];
                winner = places[lane];
            }
        }
    }
    return winner;
}

static float max_value(const float* x, int n) {
    f32x16 best[4], nan = f32_zero();
    for (auto& b : best) b = f32_set(-INFINITY);
    for (int i = 0; i < n; i += 64) {
        for (int way = 0; way < 4; ++way) {
            const f32x16 v = load_or(x, i + 16 * way, n, -INFINITY);
            nan = f32_blend(f32_eq(v, v), v, nan);
            best[way] = f32_max(best[way], v);
        }
    }
    if (has_nan(nan)) return NAN;
    return f32_reduce_max(f32_max(f32_max(best[0], best[1]), f32_max(best[2], best[3])));
}

// The project's one tree, in double.
static inline double reduce_add(double lanes[16]) {
    for (int width = 8; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

static double exp_sum(const float* x, float max, float inv_temperature, int n, float* p) {
    const f32x16 top = f32_set(max), scale = f32_set(inv_temperature);
    double lanes[16] = {};
    for (int i = 0; i < n; i += 16) {
        const f32x16 e = f32_exp(f32_mul(f32_sub(load_or(x, i, n, -INFINITY), top), scale));
        float values[16];
        f32_store(values, e);
        if (i + 16 <= n) f32_store(p + i, e);
        else f32_store_n(p + i, e, n - i);
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += values[lane];
    }
    return reduce_add(lanes);
}

static int gather(const float* x, int n, float cutoff, int32_t* ids) {
    int count = 0;
    for (int i = 0; i < n; i += 64) {
        f32x16 best = load_or(x, i, n, -INFINITY);
        for (int way = 1; way < 4; ++way) best = f32_max(best, load_or(x, i + 16 * way, n, -INFINITY));
        if (!(f32_reduce_max(best) >= cutoff)) continue;
        for (int j = i; j < n && j < i + 64; ++j) {
            if (x[j] >= cutoff) ids[count++] = j;
        }
    }
    return count;
}

static void excess_sums(const float* p, double p_scale, const float* q, double q_scale, int n, double* sums) {
    for (int begin = 0; begin < n; begin += foredraft::kSumChunk) {
        const int end = n < begin + foredraft::kSumChunk ? n : begin + foredraft::kSumChunk;
        double lanes[16] = {};
        for (int i = begin; i < end; i += 16) {
            float a[16], b[16];
            f32_store(a, load_or(p, i, end, 0.0f));
            f32_store(b, q ? load_or(q, i, end, 0.0f) : f32_zero());
            for (int lane = 0; lane < 16; ++lane) {
                const double excess = p_scale * a[lane] - q_scale * b[lane];
                lanes[lane] += excess > 0 ? excess : 0;
            }
        }
        sums[begin / foredraft::kSumChunk] = reduce_add(lanes);
    }
}

// The words of 16 consecutive counters, [word][counter]: plain loops over the lanes, which compilers turn into vectors.
static inline void philox_lanes(uint32_t first, const foredraft::NoiseKey& key, uint32_t words[4][16]) {
    uint32_t* const c0 = words[0];
    uint32_t* const c1 = words[1];
    uint32_t* const c2 = words[2];
    uint32_t* const c3 = words[3];
    for (uint32_t lane = 0; lane < 16; ++lane) {
        c0[lane] = first + lane;
        c1[lane] = key.counter[0];
        c2[lane] = key.counter[1];
        c3[lane] = key.counter[2];
    }
    uint32_t k0 = key.key[0], k1 = key.key[1];
    for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < 16; ++lane) {
            const uint64_t a = uint64_t(0xD2511F53u) * c0[lane], b = uint64_t(0xCD9E8D57u) * c2[lane];
            c0[lane] = uint32_t(b >> 32) ^ c1[lane] ^ k0;
            c1[lane] = uint32_t(b);
            c2[lane] = uint32_t(a >> 32) ^ c3[lane] ^ k1;
            c3[lane] = uint32_t(a);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// argmin of E_i / p_i. Since E = -log(1 - v) >= v, an index can only win where v <= best * p: the logarithm is taken for
// those few.
static int race(const float* p, int n, const foredraft::NoiseKey& key) {
    double best = INFINITY;
    float bound = 3.0e38f;  // at least `best`, if that fits
    int winner = -1;
    uint32_t words[4][16];
    for (int base = 0; base < n; base += 64) {
        philox_lanes(uint32_t(base / 4), key, words);
        f32x16 slack = f32_set(-1.0f);
        for (int way = 0; way < 4 && base + 16 * way < n; ++way) {
            const i32x16 high_bits = i32_shr<8>(i32_load(reinterpret_cast<const int32_t*>(words[way])));
            const f32x16 v = f32_mul(f32_from_i32(high_bits), f32_set(0x1p-24f));  // rounded down
            slack = f32_max(slack, f32_fma(f32_set(bound), load_or(p, base + 16 * way, n, 0.0f), f32_sub(f32_zero(), v)));
        }
        if (f32_reduce_max(slack) < 0.0f) continue;
        for (int i = base; i < n && i < base + 64; ++i) {
            const uint32_t word = words[(i - base) / 16][i % 16];
            if (!(p[i] > 0.0f) || float(word >> 8) * 0x1p-24f > bound * p[i] * 1.000001f) continue;
            const double time = exponential(word) / p[i];
            if (time < best) {
                best = time;
                winner = i;
                bound = best < 2.9e38 ? float(best * 1.000001) : 3.0e38f;
            }
        }
    }
    return winner;
}
