#include "formats/packed.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/quantize.h"

namespace foredraft {
namespace {

#include "kernels/half.inl"

constexpr int kLine = 64;               // bytes: 16 channels x 4 inputs
constexpr int kLines = 8;               // lines of one group of 8-bit codes
constexpr int kSuper = 256;             // inputs of a K-quant piece
constexpr int kHalves = kChannels * 2;  // bytes of one half per channel

// What the packer must know of a format; float formats have no groups.
struct FormatShape {
    int bits;             // per code; of a float format per value
    int groups_per_unit;  // 0: a float format, whose unit is one input
    int unit_bytes;
};

FormatShape format_shape(Format format) {
    switch (format) {
        case Format::F32:
            return {32, 0, kChannels * 4};
        case Format::F16:
            return {16, 0, kChannels * 2};
        case Format::BF16:
            return {16, 0, kChannels * 2};
        case Format::Q4S:
            return {4, 2, 2 * (kHalves + 256)};
        case Format::Q4A:
            return {4, 1, 2 * kHalves + 256};
        case Format::Q5S:
            return {5, 2, 2 * (kHalves + 320)};
        case Format::Q5A:
            return {5, 1, 2 * kHalves + 320};
        case Format::Q8S:
            return {8, 2, 2 * (kHalves + 512)};
        case Format::Q4K:
            return {4, 8, 8 * (256 + 2 * kChannels) + 2 * kHalves};
        case Format::Q5K:
            return {5, 8, 8 * (320 + 2 * kChannels) + 2 * kHalves};
        case Format::Q6K:
            return {6, 8, 8 * (384 + 2 * kChannels) + kHalves};
    }
    throw std::invalid_argument("unknown packed format " + std::to_string(int(format)));
}

bool is_float(Format format) { return format_shape(format).groups_per_unit == 0; }
bool is_superblock(Format format) { return format_shape(format).groups_per_unit == 8; }
bool is_symmetric(Format format) { return format_shape(format).groups_per_unit == 2; }

int code_bytes(int bits) { return kLine * bits; }

// One piece of a quantised GGUF tensor, or one group of freshly quantised numbers, taken apart.
struct Piece {
    uint16_t d = 0, m = 0;  // halves
    uint8_t sc[16] = {};    // of K-quants: per group; signed and per half group for Q6_K
    uint8_t mn[8] = {};
    uint8_t codes[kSuper];  // unsigned: zero is 8, 16, 32 or 128 in symmetric types
};

uint16_t load_u16(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

void take_nibbles(const uint8_t* qs, int bytes, uint8_t* codes) {
    for (int i = 0; i < bytes; ++i) {
        codes[i] = qs[i] & 15;
        codes[i + bytes] = qs[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* qh, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((qh[i / 8] >> (i % 8) & 1) << 4);
}

// Twelve bytes hold eight 6-bit scales and eight 6-bit minima.
void take_scales(const uint8_t* s, Piece& piece) {
    for (int i = 0; i < 4; ++i) {
        piece.sc[i] = s[i] & 63;
        piece.mn[i] = s[i + 4] & 63;
        piece.sc[i + 4] = uint8_t((s[i + 8] & 15) | (s[i] >> 6 << 4));
        piece.mn[i + 4] = uint8_t((s[i + 8] >> 4) | (s[i + 4] >> 6 << 4));
    }
}

void take_apart(GgmlType type, const uint8_t* p, Piece& piece) {
    piece.d = load_u16(p);
    switch (type) {
        case GgmlType::Q4_0:
            take_nibbles(p + 2, 16, piece.codes);
            return;
        case GgmlType::Q4_1:
            piece.m = load_u16(p + 2);
            take_nibbles(p + 4, 16, piece.codes);
            return;
        case GgmlType::Q5_0:
            take_nibbles(p + 6, 16, piece.codes);
            add_fifth_bits(p + 2, piece.codes);
            return;
        case GgmlType::Q5_1:
            piece.m = load_u16(p + 2);
            take_nibbles(p + 8, 16, piece.codes);
            add_fifth_bits(p + 4, piece.codes);
            return;
        case GgmlType::Q8_0:
            for (int i = 0; i < 32; ++i) piece.codes[i] = p[2 + i] ^ 128;
            return;
        case GgmlType::Q4_K:
            piece.m = load_u16(p + 2);
            take_scales(p + 4, piece);
            for (int i = 0; i < 4; ++i) take_nibbles(p + 16 + 32 * i, 32, piece.codes + 64 * i);
            return;
        case GgmlType::Q5_K:
            piece.m = load_u16(p + 2);
            take_scales(p + 4, piece);
            for (int i = 0; i < 4; ++i) take_nibbles(p + 48 + 32 * i, 32, piece.codes + 64 * i);
            for (int g = 0; g < 8; ++g)
                for (int i = 0; i < 32; ++i) piece.codes[32 * g + i] |= uint8_t((p[16 + i] >> g & 1) << 4);
            return;
        case GgmlType::Q6_K:
            piece.d = load_u16(p + 208);
            std::memcpy(piece.sc, p + 192, 16);
            for (int h = 0; h < 2; ++h) {
                uint8_t* codes = piece.codes + 128 * h;
                take_nibbles(p + 64 * h, 64, codes);
                for (int g = 0; g < 4; ++g)
                    for (int i = 0; i < 32; ++i) codes[32 * g + i] |= uint8_t((p[128 + 32 * h + i] >> (2 * g) & 3) << 4);
            }
            return;
        default:
            throw std::invalid_argument("not a quantised type");
    }
}

// lines: [8][64] codes of one group -> code_bytes(bits) bytes.
void join_lines(int bits, const uint8_t* lines, uint8_t* out) {
    if (bits == 8) {
        std::memcpy(out, lines, kLine * kLines);
        return;
    }
    const int half = kLine * kLines / 2;
    for (int i = 0; i < half; ++i) out[i] = uint8_t((lines[i] & 15) | lines[i + half] << 4);
    out += half;
    if (bits == 5) {
        for (int i = 0; i < kLine; ++i) {
            int tops = 0;
            for (int j = 0; j < kLines; ++j) tops |= (lines[kLine * j + i] >> 4) << j;
            out[i] = uint8_t(tops);
        }
    }
    if (bits == 6) {
        for (int i = 0; i < 2 * kLine; ++i) {
            const uint8_t* l = lines + i / kLine * half + i % kLine;
            out[i] = uint8_t(l[0] >> 4 | l[kLine] >> 4 << 2 | l[2 * kLine] >> 4 << 4 | l[3 * kLine] >> 4 << 6);
        }
    }
}

void store_half(uint8_t* at, int channel, uint16_t half) { std::memcpy(at + 2 * channel, &half, 2); }

// The pieces of one channel each, for the same inputs, into group `first` of a block and those that follow.
void put_pieces(Format format, const Piece* pieces, int first, uint8_t* block) {
    const FormatShape shape = format_shape(format);
    const int groups = is_superblock(format) ? 8 : 1;
    const int bytes = code_bytes(shape.bits);
    uint8_t* unit = block + size_t(first / shape.groups_per_unit) * shape.unit_bytes;
    const int within = first % shape.groups_per_unit;

    uint8_t* codes = unit;
    if (is_symmetric(format)) codes = unit + 2 * kHalves + within * bytes;
    if (shape.groups_per_unit == 1) codes = unit + 2 * kHalves;
    for (int g = 0; g < groups; ++g) {
        uint8_t lines[kLine * kLines];
        for (int c = 0; c < kChannels; ++c)
            for (int j = 0; j < kLines; ++j) std::memcpy(lines + kLine * j + 4 * c, pieces[c].codes + kGroup * g + 4 * j, 4);
        join_lines(shape.bits, lines, codes + g * bytes);
    }

    for (int c = 0; c < kChannels; ++c) {
        const Piece& piece = pieces[c];
        if (is_symmetric(format)) {
            store_half(unit + within * kHalves, c, piece.d);
        } else if (groups == 1) {
            store_half(unit, c, piece.d);
            store_half(unit + kHalves, c, piece.m);
        } else if (format == Format::Q6K) {
            uint8_t* scales = unit + 8 * bytes;
            for (int h = 0; h < 16; ++h) scales[kChannels * h + c] = piece.sc[h];
            store_half(scales + 16 * kChannels, c, piece.d);
        } else {
            uint8_t* scales = unit + 8 * bytes;
            for (int g = 0; g < 8; ++g) {
                scales[kChannels * g + c] = piece.sc[g];
                scales[kChannels * (8 + g) + c] = piece.mn[g];
            }
            store_half(scales + 16 * kChannels, c, piece.d);
            store_half(scales + 16 * kChannels + kHalves, c, piece.m);
        }
    }
}

void pack_quantised(Format format, GgmlType type, int n, int k, const uint8_t* src, uint8_t* block, int channel) {
    const PieceShape shape = piece_shape(type);
    const size_t row_bytes = stored_bytes(type, size_t(k));
    std::vector<Piece> pieces(kChannels);
    const int channels = std::min(kChannels, n - channel);
    for (int at = 0; at < k / shape.elements; ++at) {
        for (int c = 0; c < channels; ++c) take_apart(type, src + size_t(channel + c) * row_bytes + size_t(at) * shape.bytes, pieces[c]);
        put_pieces(format, pieces.data(), at * (shape.elements / kGroup), block);
    }
}

void pack_rounded(Format format, GgmlType type, int n, int k, const uint8_t* src, uint8_t* block, int channel) {
    const size_t row_bytes = stored_bytes(type, size_t(k));
    const int channels = std::min(kChannels, n - channel);
    std::vector<float> rows(size_t(channels) * k);
    for (int c = 0; c < channels; ++c) dequantize(type, src + size_t(channel + c) * row_bytes, size_t(k), &rows[size_t(c) * k]);
    if (format == Format::F32) {
        for (int i = 0; i < k; ++i)
            for (int c = 0; c < channels; ++c) std::memcpy(block + (size_t(i) * kChannels + c) * 4, &rows[size_t(c) * k + i], 4);
        return;
    }
    std::vector<Piece> pieces(kChannels);
    QuantisedGroups quantised;
    float group[kGroup * kChannels] = {};
    for (int g = 0; g < k / kGroup; ++g) {
        for (int c = 0; c < channels; ++c)
            for (int i = 0; i < kGroup; ++i) group[i * kChannels + c] = rows[size_t(c) * k + g * kGroup + i];
        if (format == Format::Q4A) quantize_q4a(group, quantised);
        else quantize_q8s(group, quantised);
        for (int c = 0; c < channels; ++c) {
            pieces[c].d = quantised.scale[c];
            pieces[c].m = quantised.minimum[c];
            std::memcpy(pieces[c].codes, quantised.codes[c], kGroup);
        }
        put_pieces(format, pieces.data(), g, block);
    }
}

// F16 and BF16 as they are.
void pack_halves(int n, int k, const uint8_t* src, uint8_t* block, int channel) {
    for (int c = 0; c < std::min(kChannels, n - channel); ++c)
        for (int i = 0; i < k; ++i) std::memcpy(block + (size_t(i) * kChannels + c) * 2, src + (size_t(channel + c) * k + i) * 2, 2);
}

}  // namespace

PieceShape piece_shape(GgmlType type) {
    switch (type) {
        case GgmlType::F32:
            return {1, 4};
        case GgmlType::F16:
            return {1, 2};
        case GgmlType::BF16:
            return {1, 2};
        case GgmlType::Q4_0:
            return {32, 18};
        case GgmlType::Q4_1:
            return {32, 20};
        case GgmlType::Q5_0:
            return {32, 22};
        case GgmlType::Q5_1:
            return {32, 24};
        case GgmlType::Q8_0:
            return {32, 34};
        case GgmlType::Q4_K:
            return {kSuper, 144};
        case GgmlType::Q5_K:
            return {kSuper, 176};
        case GgmlType::Q6_K:
            return {kSuper, 210};
    }
    throw std::invalid_argument("tensor type " + std::to_string(int(type)) + " is not supported");
}

size_t stored_bytes(GgmlType type, size_t count) {
    const PieceShape shape = piece_shape(type);
    if (count % size_t(shape.elements))
        throw std::invalid_argument(std::to_string(count) + " elements are no multiple of the type's " + std::to_string(shape.elements));
    return count / size_t(shape.elements) * size_t(shape.bytes);
}

Format packed_format(GgmlType type) {
    switch (type) {
        case GgmlType::F32:
            return Format::F32;
        case GgmlType::F16:
            return Format::F16;
        case GgmlType::BF16:
            return Format::BF16;
        case GgmlType::Q4_0:
            return Format::Q4S;
        case GgmlType::Q4_1:
            return Format::Q4A;
        case GgmlType::Q5_0:
            return Format::Q5S;
        case GgmlType::Q5_1:
            return Format::Q5A;
        case GgmlType::Q8_0:
            return Format::Q8S;
        case GgmlType::Q4_K:
            return Format::Q4K;
        case GgmlType::Q5_K:
            return Format::Q5K;
        case GgmlType::Q6_K:
            return Format::Q6K;
    }
    throw std::invalid_argument("tensor type " + std::to_string(int(type)) + " is not supported");
}

size_t packed_block_bytes(Format format, int k) {
    const FormatShape shape = format_shape(format);
    const int multiple = is_float(format) ? 1 : is_superblock(format) ? kSuper : kGroup;
    if (k < 1 || k % multiple)
        throw std::invalid_argument("rows of " + std::to_string(k) + " inputs; this format needs a multiple of " +
                                    std::to_string(multiple));
    const size_t inputs = is_float(format) ? 1 : size_t(shape.groups_per_unit) * kGroup;
    return (size_t(k) + inputs - 1) / inputs * size_t(shape.unit_bytes);
}

size_t packed_bytes(Format format, int n, int k) {
    if (n < 1) throw std::invalid_argument("a matrix needs at least one row");
    return (size_t(n) + kChannels - 1) / kChannels * packed_block_bytes(format, k);
}

void pack(Format format, GgmlType type, int n, int k, const uint8_t* src, uint8_t* dst, int block_begin, int block_end) {
    const bool exact = format == packed_format(type);
    if (!exact && format != Format::Q4A && format != Format::Q8S && format != Format::F32)
        throw std::invalid_argument("no conversion from this tensor type to this packed format");
    const size_t block_bytes = packed_block_bytes(format, k);
    for (int b = block_begin; b < block_end; ++b) {
        uint8_t* block = dst + size_t(b) * block_bytes;
        std::memset(block, 0, block_bytes);
        const int channel = b * kChannels;
        if (!exact || format == Format::F32) pack_rounded(format, type, n, k, src, block, channel);
        else if (is_float(format)) pack_halves(n, k, src, block, channel);
        else pack_quantised(format, type, n, k, src, block, channel);
    }
}

void dequantize(GgmlType type, const uint8_t* src, size_t count, float* out) {
    stored_bytes(type, count);
    if (type == GgmlType::F32) {
        std::memcpy(out, src, count * 4);
        return;
    }
    if (type == GgmlType::F16) {
        for (size_t i = 0; i < count; ++i) out[i] = half_to_float(load_u16(src + 2 * i));
        return;
    }
    if (type == GgmlType::BF16) {
        for (size_t i = 0; i < count; ++i) {
            const uint32_t bits = uint32_t(load_u16(src + 2 * i)) << 16;
            std::memcpy(out + i, &bits, 4);
        }
        return;
    }
    const PieceShape shape = piece_shape(type);
    const Format format = packed_format(type);
    const int bits = format_shape(format).bits;
    Piece piece;
    for (size_t at = 0; at < count; at += size_t(shape.elements), src += shape.bytes, out += shape.elements) {
        take_apart(type, src, piece);
        const float d = half_to_float(piece.d), m = half_to_float(piece.m);
        if (is_symmetric(format)) {
            for (int i = 0; i < kGroup; ++i) out[i] = d * float(piece.codes[i] - (1 << (bits - 1)));
        } else if (!is_superblock(format)) {
            for (int i = 0; i < kGroup; ++i) out[i] = d * float(piece.codes[i]) + m;
        } else if (format == Format::Q6K) {
            for (int i = 0; i < kSuper; ++i) out[i] = d * float(int8_t(piece.sc[i / 16])) * float(piece.codes[i] - 32);
        } else {
            for (int i = 0; i < kSuper; ++i) {
                const int g = i / kGroup;
                out[i] = d * float(piece.sc[g]) * float(piece.codes[i]) - m * float(piece.mn[g]);
            }
        }
    }
}

}  // namespace foredraft
