// RMS norm, rotary embedding, gated activations: one row at a time.

template <class Op>
static inline void map_pairs(const float* a, const float* b, int n, float* y, Op op) {
    int i = 0;
    for (; i + 16 <= n; i += 16) f32_store(y + i, op(f32_load(a + i), f32_load(b + i)));
    if (i < n) f32_store_n(y + i, op(f32_load_n(a + i, n - i), f32_load_n(b + i, n - i)), n - i);
}

static inline f32x16 f32_sigmoid(f32x16 x) {
    const f32x16 one = f32_set(1.0f);
    return f32_div(one, f32_add(one, f32_exp(f32_sub(f32_zero(), x))));
}

// 1 - 2 / (e^2x + 1), within 1.2e-7 absolutely.
static inline f32x16 f32_tanh(f32x16 x) {
    const f32x16 one = f32_set(1.0f);
    return f32_sub(one, f32_div(f32_set(2.0f), f32_add(f32_exp(f32_add(x, x)), one)));
}

static inline f32x16 f32_softcap(f32x16 x, f32x16 cap) { return f32_mul(cap, f32_tanh(f32_div(x, cap))); }

static void add(const float* a, const float* b, int n, float* y) {
    map_pairs(a, b, n, y, [](f32x16 p, f32x16 q) { return f32_add(p, q); });
}

static void silu_mul(const float* gate, const float* up, int n, float* y) {
    map_pairs(gate, up, n, y, [](f32x16 g, f32x16 u) { return f32_mul(f32_mul(g, f32_sigmoid(g)), u); });
}

// x/2 (1 + tanh(v)) = x sigmoid(2v), v = sqrt(2/pi) (x + 0.044715 x^3)
static void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) {
    map_pairs(gate, up, n, y, [](f32x16 g, f32x16 u) {
        const f32x16 cubic = f32_fma(f32_mul(f32_mul(g, g), f32_set(0.044715f)), g, g);
        return f32_mul(f32_mul(g, f32_sigmoid(f32_mul(f32_set(1.5957691216f), cubic))), u);
    });
}

static void softcap(float* x, int n, float cap) {
    map_pairs(x, x, n, x, [cap](f32x16 v, f32x16) { return f32_softcap(v, f32_set(cap)); });
}

// y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
static void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
    f32x16 squares = f32_zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) squares = f32_fma(f32_load(x + i), f32_load(x + i), squares);
    if (i < n) squares = f32_fma(f32_load_n(x + i, n - i), f32_load_n(x + i, n - i), squares);
    const f32x16 inverse = f32_set(1.0f / __builtin_sqrtf(f32_reduce_add(squares) / float(n) + eps));
    map_pairs(x, weight, n, y, [inverse](f32x16 v, f32x16 w) { return f32_mul(f32_mul(v, inverse), w); });
}

static void rope(float* x, const float* cos, const float* sin, int head_dim, bool interleaved) {
    const int half = head_dim / 2;
    if (interleaved) {
        for (int i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const f32x16 a = f32_load_n(x + i, n), b = f32_load_n(x + half + i, n);
        const f32x16 c = f32_load_n(cos + i, n), s = f32_load_n(sin + i, n);
        f32_store_n(x + i, f32_sub(f32_mul(a, c), f32_mul(b, s)), n);
        f32_store_n(x + half + i, f32_add(f32_mul(b, c), f32_mul(a, s)), n);
    }
}
