// Rounding floats to the codes of a packed format, 16 channels at a time.
#pragma once
#include <cstdint>

#include "kernels/kernels.h"

namespace foredraft {

// The same 32 inputs of 16 channels. A group with a NaN or an infinity, or too large for halves, gets a NaN scale.
struct QuantisedGroups {
    uint16_t scale[kChannels], minimum[kChannels];  // halves
    uint8_t codes[kChannels][kGroup];
};

// x [32][16]. w = scale * code + minimum, codes 0..15; searches scale and minimum for the least squared error.
void quantize_q4a(const float* x, QuantisedGroups& out);

// x [32][16]. w = scale * (code - 128), codes 1..255; no minimum.
void quantize_q8s(const float* x, QuantisedGroups& out);

}  // namespace foredraft
