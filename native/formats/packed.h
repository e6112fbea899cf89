// Weights as the kernels read them.
//
// A matrix of N output channels by K inputs is cut into blocks of 16 channels (the lanes of a vector) and, along K, into
// groups of 32 inputs. The codes of one group lie in lines of 64 bytes: line j holds inputs 4j..4j+3 of each channel,
//
//     byte 4c + i of line j   =   code of channel c, input 4j + i          (c 0..15, j 0..7, i 0..3)
//
// which is the operand of an integer dot product. Below 8 bits, lines share bytes:
//
//     4 bits   4 lines: line j in the low nibbles of line j, line j + 4 in the high ones
//     5 bits   the same, then one line whose bit j is the fifth bit of line j
//     6 bits   the same as 4 bits, then two lines of 2-bit tops: bits 2j..2j+1 of the first for lines 0..3, of the second
//              for lines 4..7
//
// A block is a run of units; n is padded to 16 channels with zero scales. h16 is an IEEE half per channel, 32 bytes:
//
//     Q4S Q5S Q8S   two groups  [h16 d][h16 d][codes][codes]                     w = d (code - 8 | 16 | 128)
//     Q4A Q5A       one group   [h16 d][h16 m][codes]                            w = d code + m
//     Q4K Q5K       8 groups    [codes x 8][u8 sc x 8][u8 mn x 8][h16 d][h16 m]  w = d sc code - m mn
//     Q6K           8 groups    [codes x 8][i8 sc x 8 x 2 halves][h16 d]         w = d sc (code - 32)
//     F32 F16 BF16  one input   [16 values]
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace foredraft {

// GGUF's tensor types that we read, by their number in the file.
enum class GgmlType : int32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30
};

// Elements and bytes of the type's smallest piece. Throws std::invalid_argument for a type that we do not read.
struct PieceShape {
    int elements, bytes;
};
PieceShape piece_shape(GgmlType type);

// Bytes of `count` consecutive elements; throws std::invalid_argument if they are no whole number of pieces.
size_t stored_bytes(GgmlType type, size_t count);

// The format that holds this type's own numbers.
Format packed_format(GgmlType type);

// Bytes of a block of 16 channels, and of all blocks. Throw std::invalid_argument for sizes below 1 or a k that the
// format cannot hold (a multiple of 32 for integer formats, of 256 for K-quants).
size_t packed_block_bytes(Format format, int k);
size_t packed_bytes(Format format, int n, int k);

// Packs rows of a stored [n, k] matrix: blocks [block_begin, block_end) of dst, which begins at block 0 (so threads can
// share a matrix). With packed_format(type) the numbers are kept exactly; Q4A, Q8S and F32 are also reached from every
// other type by dequantising and rounding. Throws std::invalid_argument for other pairs.
void pack(Format format, GgmlType type, int n, int k, const uint8_t* src, uint8_t* dst, int block_begin, int block_end);

// `count` consecutive elements to floats, the numbers that the `gguf` package gives.
void dequantize(GgmlType type, const uint8_t* src, size_t count, float* out);

}  // namespace foredraft
