// Attention of M rows over a paged cache.
//
// Every sum has an order that depends on logical positions only: a score runs over head_dim in one lane, the softmax
// sum over lanes by position mod 16, the value sum position after position. So a row's bits do not depend on where its
// slots lie, on the other rows, or on how they are tiled.

// Query heads in one register tile: two vectors each.
#if defined(__AVX512F__)
static constexpr int kTileHeads = 12;
#else
static constexpr int kTileHeads = 4;
#endif

template <bool Half>
static inline f32x16 load_cached(const uint8_t* base, size_t index) {
    if constexpr (Half) return f32_load_f16(reinterpret_cast<const uint16_t*>(base) + index);
    else return f32_load(reinterpret_cast<const float*>(base) + index);
}

// scores[h][0..31] = scale * q_h . key of each slot of one block, for Heads heads; q is [head_dim][q_heads]. As many bytes
// as the block has are asked for at `next`.
template <bool Half, int Heads>
static void score_tile(const float* q, int q_heads, const uint8_t* keys, const uint8_t* next, int head_dim, f32x16 scale, float* scores) {
    f32x16 low[Heads], high[Heads];
    for (int h = 0; h < Heads; ++h) low[h] = high[h] = f32_zero();
    constexpr int kRowBytes = Half ? 64 : 128;
    for (int d = 0; d < head_dim; ++d, q += q_heads) {
        for (int line = 0; line < kRowBytes; line += 64) __builtin_prefetch(next + d * kRowBytes + line, 0, 3);
        const f32x16 k0 = load_cached<Half>(keys, size_t(d) * 32), k1 = load_cached<Half>(keys, size_t(d) * 32 + 16);
#pragma GCC unroll 12
        for (int h = 0; h < Heads; ++h) {
            const f32x16 qh = f32_set(q[h]);
            low[h] = f32_fma(qh, k0, low[h]);
            high[h] = f32_fma(qh, k1, high[h]);
        }
    }
    for (int h = 0; h < Heads; ++h) {
        f32_store(scores + 32 * h, f32_mul(low[h], scale));
        f32_store(scores + 32 * h + 16, f32_mul(high[h], scale));
    }
}

// sums[h] += sum over n positions of weights[h][i] * values[i], for 16 * Vectors of the head_dim columns from `column`. As
// many bytes as are read are asked for at `next`.
template <bool Half, int Heads, int Vectors>
static void value_tile(const float* weights, const uint8_t* values, const uint8_t* next, int n, int head_dim, int column, float* sums) {
    f32x16 acc[Heads][Vectors];
    for (int h = 0; h < Heads; ++h)
        for (int v = 0; v < Vectors; ++v) acc[h][v] = f32_load(sums + h * head_dim + column + 16 * v);
    constexpr size_t kElement = Half ? 2 : 4;
    for (int i = 0; i < n; ++i) {
        for (size_t byte = 0; byte < 16 * Vectors * kElement; byte += 64)
            __builtin_prefetch(next + (size_t(i) * head_dim + column) * kElement + byte, 0, 3);
        f32x16 value[Vectors];
        for (int v = 0; v < Vectors; ++v) value[v] = load_cached<Half>(values, size_t(i) * head_dim + column + 16 * v);
#pragma GCC unroll 12
        for (int h = 0; h < Heads; ++h) {
            const f32x16 w = f32_set(weights[32 * h + i]);
            for (int v = 0; v < Vectors; ++v) acc[h][v] = f32_fma(w, value[v], acc[h][v]);
        }
    }
    for (int h = 0; h < Heads; ++h)
        for (int v = 0; v < Vectors; ++v) f32_store(sums + h * head_dim + column + 16 * v, acc[h][v]);
}

template <bool Half, int Heads>
static void score_heads(int heads, const float* q, int q_heads, const uint8_t* keys, const uint8_t* next, int head_dim, f32x16 scale,
                        float* scores) {
    if (heads == Heads) score_tile<Half, Heads>(q, q_heads, keys, next, head_dim, scale, scores);
    else if constexpr (Heads > 1) score_heads<Half, Heads - 1>(heads, q, q_heads, keys, next, head_dim, scale, scores);
}

template <bool Half, int Heads>
static void value_heads(int heads, const float* weights, const uint8_t* values, const uint8_t* next, int n, int head_dim, float* sums) {
    if (heads == Heads) {
        int column = 0;
        for (; column + 32 <= head_dim; column += 32) value_tile<Half, Heads, 2>(weights, values, next, n, head_dim, column, sums);
        if (column < head_dim) value_tile<Half, Heads, 1>(weights, values, next, n, head_dim, column, sums);
    } else if constexpr (Heads > 1) {
        value_heads<Half, Heads - 1>(heads, weights, values, next, n, head_dim, sums);
    }
}

static inline int num_tiles(int heads) { return (heads + kTileHeads - 1) / kTileHeads; }

template <bool Half>
static void add_values(int heads, const float* weights, const uint8_t* values, const uint8_t* next, int n, int head_dim, float* sums) {
    const int tiles = num_tiles(heads);
    for (int t = 0; t < tiles; ++t) {
        const int begin = heads * t / tiles, end = heads * (t + 1) / tiles;
        value_heads<Half, kTileHeads>(end - begin, weights + 32 * begin, values, next, n, head_dim, sums + size_t(begin) * head_dim);
    }
}

// -inf in the lanes whose position, counted from `base`, is outside [first, last].
static inline f32x16 hide_outside(f32x16 v, int base, int first, int last) {
    alignas(64) static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 lane = f32_load(lanes), hidden = f32_set(-INFINITY);
    v = f32_blend(f32_lt(lane, f32_set(float(first - base))), v, hidden);
    return f32_blend(f32_lt(f32_set(float(last - base)), lane), v, hidden);
}

// One head's scores of positions first..last, in place, become softmax weights times their sum, which is returned;
// scores[(p / 32 - base_block) * stride + p % 32] is position p. Whole vectors are written, zero outside the range.
static float softmax_weights(float* scores, size_t stride, int base_block, int first, int last, float cap) {
    f32x16 maxima = f32_set(-INFINITY);
    for (int p = first / 16 * 16; p <= last; p += 16) {
        float* s = scores + size_t(p / 32 - base_block) * stride + p % 32;
        f32x16 v = f32_load(s);
        if (cap != 0.0f) v = f32_softcap(v, f32_set(cap));
        if (p < first || p + 15 > last) v = hide_outside(v, p, first, last);
        f32_store(s, v);
        maxima = f32_max(v, maxima);
    }
    const f32x16 maximum = f32_set(f32_reduce_max(maxima));
    f32x16 sums = f32_zero();
    for (int p = first / 16 * 16; p <= last; p += 16) {
        float* s = scores + size_t(p / 32 - base_block) * stride + p % 32;
        const f32x16 w = f32_exp(f32_sub(f32_load(s), maximum));
        f32_store(s, w);
        sums = f32_add(sums, w);
    }
    return f32_reduce_add(sums);
}

template <bool Half>
static void attend(const foredraft::AttentionTask& t) {
    constexpr size_t kElement = Half ? 2 : 4;
    const int heads = t.rows * t.group, head_dim = t.head_dim;
    float* queries = t.scratch;                        // [head_dim][heads]
    float* sums = queries + size_t(heads) * head_dim;  // [heads][head_dim]
    float* scores = sums + size_t(heads) * head_dim;   // [blocks][heads][32]
    const size_t stride = size_t(heads) * 32;

    int first = t.first[0], last_slot = 0;
    bool is_chain = true;
    for (int r = 0; r < t.rows; ++r) {
        const int32_t* path = t.path + size_t(r) * t.path_stride;
        const int depth = t.positions[r] - t.start;
        first = t.first[r] < first ? t.first[r] : first;
        last_slot = path[depth] > last_slot ? path[depth] : last_slot;
        is_chain = is_chain && path[depth] == t.start + depth;
        for (int h = r * t.group; h < (r + 1) * t.group; ++h) {
            const float* q = t.q + r * t.q_stride + size_t(h - r * t.group) * head_dim;
            for (int d = 0; d < head_dim; ++d) queries[size_t(d) * heads + h] = q[d];
        }
    }
    const int base_block = first / 32;

    const int tiles = num_tiles(heads);
    const f32x16 scale = f32_set(t.scale);
    for (int b = base_block; b <= last_slot / 32; ++b) {
        const uint8_t* keys = t.keys + t.block_table[b] * t.block_stride;
        const uint8_t* next =
            b < last_slot / 32 ? t.keys + t.block_table[b + 1] * t.block_stride : t.values + t.block_table[base_block] * t.block_stride;
        for (int i = 0; i < tiles; ++i) {
            const int begin = heads * i / tiles, end = heads * (i + 1) / tiles;
            score_heads<Half, kTileHeads>(end - begin, queries + begin, heads, keys, next, head_dim, scale,
                                          scores + (b - base_block) * stride + 32 * begin);
        }
    }

    for (int h = 0; h < heads; ++h) {
        const int r = h / t.group, last = t.positions[r];
        const int32_t* path = t.path + size_t(r) * t.path_stride;
        float* s = scores + 32 * h;
        // Paths ascend, so no score is overwritten before it is read.
        const int skipped = t.first[r] > t.start ? t.first[r] - t.start : 0;
        for (int d = skipped; !is_chain && d <= last - t.start; ++d) {
            const int to = t.start + d, from = path[d];
            s[(to / 32 - base_block) * stride + to % 32] = s[(from / 32 - base_block) * stride + from % 32];
        }
        const float sum = softmax_weights(s, stride, base_block, t.first[r], last, t.softcap);
        queries[h] = sum;
    }

    for (size_t i = 0; i < size_t(heads) * head_dim; ++i) sums[i] = 0.0f;
    int last_position = t.positions[0];
    for (int r = 1; r < t.rows; ++r) last_position = t.positions[r] > last_position ? t.positions[r] : last_position;
    for (int b = base_block; b <= last_position / 32; ++b) {
        const float* weights = scores + (b - base_block) * stride;
        const int from = 32 * b;
        // A block that every row sees whole, or over the same span, serves them all at once.
        bool shared = is_chain || from + 32 <= t.start;
        int begin = 0, end = 0;
        for (int r = 0; r < t.rows && shared; ++r) {
            const int lo = t.first[r] > from ? t.first[r] : from, hi = t.positions[r] < from + 31 ? t.positions[r] + 1 : from + 32;
            if (r == 0) begin = lo, end = hi;
            shared = lo == begin && hi == end;
        }
        if (shared) {
            if (begin >= end) continue;
            const uint8_t* values = t.values + t.block_table[b] * t.block_stride + kElement * (begin - from) * head_dim;
            const uint8_t* next = b < last_position / 32 ? t.values + t.block_table[b + 1] * t.block_stride : values;
            add_values<Half>(heads, weights + (begin - from), values, next, end - begin, head_dim, sums);
            continue;
        }
        for (int r = 0; r < t.rows; ++r) {
            const int32_t* path = t.path + size_t(r) * t.path_stride;
            const float* row_weights = weights + size_t(r) * t.group * 32;
            float* row_sums = sums + size_t(r) * t.group * head_dim;
            int p = t.first[r] > from ? t.first[r] : from;
            const int hi = t.positions[r] < from + 31 ? t.positions[r] + 1 : from + 32;
            while (p < hi) {
                // The longest run of positions in consecutive slots of one physical block.
                const int slot = p < t.start ? p : path[p - t.start];
                int n = 1;
                while (p + n < hi && (slot + n) % 32 != 0 && (p + n < t.start ? p + n : path[p + n - t.start]) == slot + n) ++n;
                const uint8_t* values = t.values + t.block_table[slot / 32] * t.block_stride + kElement * (slot % 32) * head_dim;
                add_values<Half>(t.group, row_weights + (p - from), values, values, n, head_dim, row_sums);
                p += n;
            }
        }
    }

    for (int h = 0; h < heads; ++h) {
        float* out = t.out + (h / t.group) * t.out_stride + size_t(h % t.group) * head_dim;
        const f32x16 sum = f32_set(queries[h]);
        for (int d = 0; d < head_dim; d += 16) f32_store(out + d, f32_div(f32_load(sums + size_t(h) * head_dim + d), sum));
    }
}

static void attention(const foredraft::AttentionTask& t) {
    if (t.half) attend<true>(t);
    else attend<false>(t);
}

// One position's key and value of one kv head into its slot of a block.
static void store_kv(const float* key, const float* value, int head_dim, bool half, int slot, uint8_t* keys, uint8_t* values) {
    if (!half) {
        float* k = reinterpret_cast<float*>(keys);
        for (int d = 0; d < head_dim; ++d) k[size_t(d) * 32 + slot] = key[d];
        std::memcpy(reinterpret_cast<float*>(values) + size_t(slot) * head_dim, value, sizeof(float) * head_dim);
        return;
    }
    uint16_t* k = reinterpret_cast<uint16_t*>(keys);
    uint16_t* v = reinterpret_cast<uint16_t*>(values) + size_t(slot) * head_dim;
    for (int d = 0; d < head_dim; d += 16) {
        uint16_t codes[16];
        f32_store_f16(codes, f32_load(key + d));
        for (int i = 0; i < 16; ++i) k[size_t(d + i) * 32 + slot] = codes[i];
        f32_store_f16(v + d, f32_load(value + d));
    }
}
