// Keyed noise: Philox4x32-10 (Salmon et al., SC 2011) and what is made of its words. algo/noise.py is the reference.
//
// The noise of token t is word (t / 16) % 4 of counter (t / 64) * 16 + t % 16, so that 16 neighbours need one word each of
// 16 consecutive counters.

struct PhiloxWords {
    uint32_t word[4];
};

static inline PhiloxWords philox(uint32_t index, const foredraft::NoiseKey& key) {
    uint32_t c0 = index, c1 = key.counter[0], c2 = key.counter[1], c3 = key.counter[2];
    uint32_t k0 = key.key[0], k1 = key.key[1];
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0;
        c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1;
        c3 = uint32_t(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

static inline uint32_t token_word(int token, const foredraft::NoiseKey& key) {
    const uint32_t t = uint32_t(token);
    return philox(t / 64 * 16 + t % 16, key).word[t / 16 % 4];
}

// Natural logarithm of a positive normal number, to about 1 ulp, in plain double steps: 2 atanh(s), s = (m - 1) / (m + 1).
static inline double log_double(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    int exponent = int(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    std::memcpy(&m, &bits, 8);  // [1, 2)
    if (m > 1.4142135623730951) {
        m = m * 0.5;
        ++exponent;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double series = 1.0 / 23;
    for (int odd = 21; odd >= 3; odd -= 2) series = series * z + 1.0 / odd;
    return 2.0 * s + (2.0 * s * z * series + exponent * 0.6931471805599453);
}

// Standard exponential noise, -log(1 - v), v = (word + 1/2) / 2^32; 1 - v is exact. The least E / p wins a race.
static inline double exponential(uint32_t word) { return -log_double(1.0 - (word + 0.5) * 0x1p-32); }
