// IEEE half <-> float, round to nearest even, subnormals and infinities kept; NaN becomes or stays quiet.
static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0);
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {
        const float f = float(rest) * 0x1p-24f;
        std::memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t float_to_half(float f) {
    uint32_t x;
    std::memcpy(&x, &f, 4);
    const uint32_t sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return uint16_t(sign | 0x7e00 | (x >> 13 & 0x3ff));
    if (x >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (x >= 0x38800000) return uint16_t(sign | ((x + 0xfff + (x >> 13 & 1)) - (112u << 23)) >> 13);
    float scaled;
    std::memcpy(&scaled, &x, 4);
    scaled = scaled * 0x1p24f + 0x1p23f;  // the product is exact; the sum rounds it to an integer
    std::memcpy(&x, &scaled, 4);
    return uint16_t(sign | (x & 0x7fffff));
}
