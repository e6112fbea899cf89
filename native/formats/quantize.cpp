#include "formats/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace foredraft {
namespace {

#include "kernels/half.inl"

// One number a channel. Loops over lanes stay free of branches and calls, so that they become vector code.
struct Lanes {
    float at[kChannels];
};

template <class F>
Lanes each(F f) {
    Lanes r;
    for (int c = 0; c < kChannels; ++c) r.at[c] = f(c);
    return r;
}

constexpr float kTop = 15.0f;  // largest 4-bit code

// NaN counts as 0: std::max keeps its first argument when the comparison fails.
float nearest_code(float x, float minimum, float inverse) {
    return float(int(std::min(std::max(0.0f, (x - minimum) * inverse), kTop) + 0.5f));
}

// Scales and minima of 16 groups, and the squared error that they leave.
struct Fit {
    Lanes scale, minimum, error;
};

// 16 groups whose least number is 0.
struct Groups {
    float x[kGroup][kChannels];
    Lanes sum, squares;
};

// The best scale and minimum, in the least-squares sense, for the codes that `from` gives.
Fit refit(const Groups& groups, const Fit& from) {
    const Lanes inverse = each([&](int c) { return from.scale.at[c] > 0 ? 1.0f / from.scale.at[c] : 0.0f; });
    Lanes codes{}, squares{}, products{};
    for (int i = 0; i < kGroup; ++i) {
        for (int c = 0; c < kChannels; ++c) {
            const float code = nearest_code(groups.x[i][c], from.minimum.at[c], inverse.at[c]);
            codes.at[c] += code;
            squares.at[c] += code * code;
            products.at[c] += code * groups.x[i][c];
        }
    }
    Fit fit;
    for (int c = 0; c < kChannels; ++c) {
        const float n = float(kGroup);
        const float det = n * squares.at[c] - codes.at[c] * codes.at[c];
        const float slope = det > 0 ? (n * products.at[c] - codes.at[c] * groups.sum.at[c]) / det : 0.0f;
        fit.scale.at[c] = slope;
        fit.minimum.at[c] = (groups.sum.at[c] - slope * codes.at[c]) / n;
        fit.error.at[c] = groups.squares.at[c] - slope * products.at[c] - fit.minimum.at[c] * groups.sum.at[c];
    }
    return fit;
}

// 0 for a channel of numbers, NaN where one of them is not finite.
Lanes probe_finite(const float* x) {
    Lanes probe{};
    for (int i = 0; i < kGroup; ++i)
        for (int c = 0; c < kChannels; ++c) probe.at[c] += x[i * kChannels + c] - x[i * kChannels + c];
    return probe;
}

}  // namespace

void quantize_q4a(const float* x, QuantisedGroups& out) {
    const Lanes probe = probe_finite(x);
    Lanes lo = each([&](int c) { return x[c]; }), hi = lo;
    for (int i = 1; i < kGroup; ++i) {
        for (int c = 0; c < kChannels; ++c) {
            lo.at[c] = std::min(lo.at[c], x[i * kChannels + c]);
            hi.at[c] = std::max(hi.at[c], x[i * kChannels + c]);
        }
    }
    // Searched from the least number up, so that the sums of refit() do not cancel; what is not finite becomes 0.
    Groups groups{};
    for (int i = 0; i < kGroup; ++i) {
        for (int c = 0; c < kChannels; ++c) {
            const float above = probe.at[c] == 0 ? x[i * kChannels + c] - lo.at[c] : 0.0f;
            groups.x[i][c] = above;
            groups.sum.at[c] += above;
            groups.squares.at[c] += above * above;
        }
    }
    // Ranges a little wider and narrower than that of the numbers, since the extremes are few; each is refitted twice.
    Fit best{};
    for (float& e : best.error.at) e = INFINITY;
    for (const float shrink : {1.105f, 1.035f, 0.965f, 0.895f}) {
        Fit fit;
        fit.scale = each([&](int c) { return (hi.at[c] - lo.at[c]) * shrink / kTop; });
        fit.minimum = each([&](int c) { return 0.5f * (hi.at[c] - lo.at[c]) * (1.0f - shrink); });
        fit = refit(groups, refit(groups, fit));
        for (int c = 0; c < kChannels; ++c) {
            const bool better = fit.error.at[c] < best.error.at[c];
            best.scale.at[c] = better ? fit.scale.at[c] : best.scale.at[c];
            best.minimum.at[c] = better ? fit.minimum.at[c] : best.minimum.at[c];
            best.error.at[c] = better ? fit.error.at[c] : best.error.at[c];
        }
    }
    for (int c = 0; c < kChannels; ++c) {
        out.scale[c] = float_to_half(best.scale.at[c]);
        out.minimum[c] = float_to_half(best.minimum.at[c] + lo.at[c]);
        const float scale = half_to_float(out.scale[c]), minimum = half_to_float(out.minimum[c]);
        const bool usable = probe.at[c] == 0 && std::isfinite(scale) && std::isfinite(minimum);
        if (!usable) out.scale[c] = out.minimum[c] = float_to_half(NAN);
        const float inverse = usable && scale > 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < kGroup; ++i)
            out.codes[c][i] = usable ? uint8_t(nearest_code(x[i * kChannels + c], minimum, inverse)) : uint8_t(0);
    }
}

void quantize_q8s(const float* x, QuantisedGroups& out) {
    const Lanes probe = probe_finite(x);
    Lanes amax{};
    for (int i = 0; i < kGroup; ++i)
        for (int c = 0; c < kChannels; ++c) amax.at[c] = std::max(amax.at[c], std::fabs(x[i * kChannels + c]));
    for (int c = 0; c < kChannels; ++c) {
        out.scale[c] = float_to_half(amax.at[c] / 127.0f);
        out.minimum[c] = 0;
        const float scale = half_to_float(out.scale[c]);
        const bool usable = probe.at[c] == 0 && std::isfinite(scale);
        if (!usable) out.scale[c] = float_to_half(NAN);
        const float inverse = usable && scale > 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < kGroup; ++i) {
            const float code = usable ? x[i * kChannels + c] * inverse : 0.0f;
            out.codes[c][i] = uint8_t(int(std::min(std::max(code, -127.0f), 127.0f) + 128.5f));
        }
    }
}

}  // namespace foredraft
