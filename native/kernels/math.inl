// exp and log over 16 lanes, built from explicit fused steps only: the same bits on every instruction set.
// Cody-Waite reduction and minimax polynomials of the degree that single precision needs.

// e^x, within 2 ulp on [-87.3, 88.7]; 0 below (so no subnormals arise), +inf above. NaN stays NaN.
static inline f32x16 f32_exp(f32x16 x) {
    const f32x16 lo = f32_set(-87.33654f), hi = f32_set(88.72283f);
    const mask16 under = f32_lt(x, lo), over = f32_lt(hi, x), is_number = f32_eq(x, x);
    const f32x16 c = f32_min(f32_max(x, lo), hi);
    const i32x16 n = i32_round(f32_mul(c, f32_set(1.44269504f)));
    const f32x16 nf = f32_from_i32(n);
    f32x16 r = f32_fnma(nf, f32_set(0.693359375f), c);
    r = f32_fnma(nf, f32_set(-2.12194440e-4f), r);
    f32x16 p = f32_set(1.9875691500e-4f);
    p = f32_fma(p, r, f32_set(1.3981999507e-3f));
    p = f32_fma(p, r, f32_set(8.3334519073e-3f));
    p = f32_fma(p, r, f32_set(4.1665795894e-2f));
    p = f32_fma(p, r, f32_set(1.6666665459e-1f));
    p = f32_fma(p, r, f32_set(5.0000001201e-1f));
    p = f32_fma(p, f32_mul(r, r), f32_add(r, f32_set(1.0f)));
    // 2^n in two halves, since n reaches 128.
    const i32x16 half_n = i32_sub(i32_shr<1>(i32_add(n, i32_set(256))), i32_set(128));
    const f32x16 s0 = f32_from_bits(i32_shl<23>(i32_add(half_n, i32_set(127))));
    const f32x16 s1 = f32_from_bits(i32_shl<23>(i32_add(i32_sub(n, half_n), i32_set(127))));
    f32x16 y = f32_mul(f32_mul(p, s0), s1);
    y = f32_blend(under, y, f32_zero());
    y = f32_blend(over, y, f32_set(INFINITY));
    return f32_blend(is_number, x, y);
}

// Natural logarithm of positive normal numbers, within 2 ulp; other inputs are the caller's duty.
static inline f32x16 f32_log(f32x16 x) {
    const i32x16 bits = f32_to_bits(x);
    i32x16 e = i32_sub(i32_shr<23>(bits), i32_set(126));
    f32x16 m = f32_from_bits(i32_or(i32_and(bits, i32_set(0x007fffff)), i32_set(0x3f000000)));  // [0.5, 1)
    const mask16 small = f32_lt(m, f32_set(0.707106781f));
    e = i32_blend(small, e, i32_sub(e, i32_set(1)));
    m = f32_sub(f32_blend(small, m, f32_add(m, m)), f32_set(1.0f));
    const f32x16 z = f32_mul(m, m), ef = f32_from_i32(e);
    f32x16 p = f32_set(7.0376836292e-2f);
    p = f32_fma(p, m, f32_set(-1.1514610310e-1f));
    p = f32_fma(p, m, f32_set(1.1676998740e-1f));
    p = f32_fma(p, m, f32_set(-1.2420140846e-1f));
    p = f32_fma(p, m, f32_set(1.4249322787e-1f));
    p = f32_fma(p, m, f32_set(-1.6668057665e-1f));
    p = f32_fma(p, m, f32_set(2.0000714765e-1f));
    p = f32_fma(p, m, f32_set(-2.4999993993e-1f));
    p = f32_fma(p, m, f32_set(3.3333331174e-1f));
    f32x16 y = f32_mul(f32_mul(p, m), z);
    y = f32_fma(ef, f32_set(-2.12194440e-4f), y);
    y = f32_fma(f32_set(-0.5f), z, y);
    return f32_fma(ef, f32_set(0.693359375f), f32_add(m, y));
}
