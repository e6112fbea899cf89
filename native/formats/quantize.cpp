#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/packed.h"

namespace foredraft {
namespace {

#include "kernels/half.inl"

constexpr float kTop = 15.0f;  // largest 4-bit code

// Codes of x under a scale and minimum, as floats, and the squared error that they leave.
float round_codes(const float* x, float scale, float minimum, float* codes) {
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    float error = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float t = (x[i] - minimum) * inverse;
        const float c = float(int(std::min(std::max(t, 0.0f), kTop) + 0.5f));
        const float off = c * scale + minimum - x[i];
        codes[i] = c;
        error += off * off;
    }
    return error;
}

// The scale and minimum that fit x best in the least-squares sense while its codes stay.
void refit(const float* x, const float* codes, float& scale, float& minimum) {
    float sc = 0, scc = 0, sx = 0, scx = 0;
    for (int i = 0; i < kGroup; ++i) {
        sc += codes[i];
        scc += codes[i] * codes[i];
        sx += x[i];
        scx += codes[i] * x[i];
    }
    const float det = float(kGroup) * scc - sc * sc;
    if (!(det > 0)) return;
    const float slope = (float(kGroup) * scx - sc * sx) / det;
    if (!(slope > 0)) return;
    scale = slope;
    minimum = (sx - slope * sc) / float(kGroup);
}

}  // namespace

GroupQ4A quantize_group_q4a(const float* x) {
    float lo = x[0], hi = x[0], probe = 0;
    for (int i = 0; i < kGroup; ++i) {
        lo = std::min(lo, x[i]);
        hi = std::max(hi, x[i]);
        probe += x[i] - x[i];  // 0, or NaN as soon as one number is not finite
    }
    GroupQ4A best{};
    best.scale = best.minimum = float_to_half(NAN);  // stays where no halves can hold the numbers
    if (!(probe == 0)) return best;
    // Shrinking the range a little clips the extremes and serves the many numbers between; each start is refitted, then
    // judged with the halves that will be stored.
    float best_error = INFINITY;
    for (int step = -1; step <= 6; ++step) {
        const float spread = (hi - lo) * (1.0f - 0.035f * float(step));
        float scale = spread / kTop, minimum = 0.5f * (hi + lo - spread), codes[kGroup];
        for (int round = 0; round < 2; ++round) {
            round_codes(x, scale, minimum, codes);
            refit(x, codes, scale, minimum);
        }
        const uint16_t scale_half = float_to_half(scale), minimum_half = float_to_half(minimum);
        const float error = round_codes(x, half_to_float(scale_half), half_to_float(minimum_half), codes);
        if (!(error < best_error)) continue;
        best_error = error;
        best.scale = scale_half;
        best.minimum = minimum_half;
        for (int i = 0; i < kGroup; ++i) best.codes[i] = uint8_t(codes[i]);
    }
    return best;
}

}  // namespace foredraft
