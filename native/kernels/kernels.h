// The table of kernels that one instruction set fills. Every set gives the same bits; one is chosen at run time.
//
// Each kernels_<set>.cpp includes one vec_<set>.h and the shared *.inl files inside an anonymous namespace and exports one
// KernelSet. Those translation units include no other C++ headers with inline code, since the linker may keep
// their copy of an inline function for everybody.
#pragma once
#include <cstddef>
#include <cstdint>

namespace foredraft {

// How a weight matrix lies in memory (formats/packed.h has the layouts).
enum class Format : int32_t { F32, F16, BF16, Q4S, Q4A, Q5S, Q5A, Q8S, Q4K, Q5K, Q6K };

inline constexpr int kChannels = 16;  // output channels of one block, the lanes of a vector
inline constexpr int kGroup = 32;     // activations that share one scale

// Weights of y = W x, N output channels by K inputs, packed in blocks of 16 channels; the last block is zero-padded.
struct PackedMatrix {
    Format format;
    int n, k;
    const uint8_t* data;
    size_t block_bytes;  // bytes of one block of 16 channels
    int num_blocks() const { return (n + kChannels - 1) / kChannels; }
};

// Rows of activations, as floats and, for integer formats, quantised to int8 in groups of 32.
// A row's codes depend on that row alone. All pointers belong to the caller.
// Each half group may have a scale of its own, which halves the rounding error where few inputs are far larger than the
// others. K-quants read only the first of the two: what they read is quantised with equal ones.
struct ActivationRows {
    int rows, k;
    const float* values;  // [rows, k]
    int8_t* codes;        // [k/32, rows, 32]  in -127..127
    float* scales;        // [k/32, rows, 2]   amax / 127 of each half group, or of both
    float* sums;          // [k/32, rows]      sum of scale * code
    int32_t* code_sums;   // [k/32, rows, 2]   sums of the codes of each half group
    bool half_scales;     // whether the two scales may differ
};

// One sequence's keys or values for one layer and one kv head, in blocks of 32 slots reached through a block table.
// Keys lie transposed, [head_dim][32]; values [32][head_dim].
inline constexpr int kSlots = 32;

// Rows of one sequence that attend together: M queries of all the query heads of one kv head.
struct AttentionTask {
    int rows;                  // M
    int group;                 // query heads for this kv head
    int head_dim;              // multiple of 16
    const float* q;            // [M, group, head_dim], row stride q_stride
    size_t q_stride;           // floats between rows
    const int32_t* positions;  // [M] logical position of each row
    const int32_t* first;      // [M] first visible logical position (sliding window)
    int start;                 // cached positions: slots 0..start-1 hold positions 0..start-1
    // Path of each row through the tree: path[r * path_stride + d] is the slot of logical position start + d, for
    // d = 0 .. positions[r] - start. A chain has path[r][d] = start + d.
    const int32_t* path;
    int path_stride;
    const int32_t* block_table;  // logical block -> physical block
    const uint8_t* keys;         // of physical block 0, this layer and head
    const uint8_t* values;
    size_t block_stride;   // bytes between physical blocks
    bool half;             // fp16 cache, else f32
    float scale, softcap;  // softcap 0: none
    float* out;            // [M, group, head_dim], row stride out_stride
    size_t out_stride;
    float* scratch;  // attention_scratch_floats(...) floats
};

// What keyed noise depends on besides the token: Philox4x32-10 counter words 1 to 3, and the key (algo/noise.py).
struct NoiseKey {
    uint32_t counter[3];
    uint32_t key[2];
};

inline constexpr int kSumChunk = 1024;

struct KernelSet {
    const char* name;
    // values -> codes, scales, sums, code_sums, for rows [row_begin, row_end).
    void (*quantize_rows)(const ActivationRows& x, int row_begin, int row_end);
    // y[row * ldy + channel] for the channels of blocks [block_begin, block_end); y has room for whole blocks.
    void (*matmul)(const PackedMatrix& w, const ActivationRows& x, float* y, size_t ldy, int block_begin, int block_end);
    void (*attention)(const AttentionTask& task);
    // One position's key and value of one kv head [head_dim] into slot 0..31 of a block, rounded to fp16 if `half`.
    void (*store_kv)(const float* key, const float* value, int head_dim, bool half, int slot, uint8_t* keys, uint8_t* values);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
    // In place on one head: cos, sin [head_dim / 2]. interleaved: pairs (2i, 2i+1), else (i, i + head_dim / 2).
    void (*rope)(float* x, const float* cos, const float* sin, int head_dim, bool interleaved);
    void (*silu_mul)(const float* gate, const float* up, int n, float* y);
    void (*gelu_tanh_mul)(const float* gate, const float* up, int n, float* y);
    void (*add)(const float* a, const float* b, int n, float* y);
    void (*softcap)(float* x, int n, float cap);
    // Sampling (kernels/sampling.inl): see sampling.h for the operations built from these.
    int (*argmax)(const float* x, int n);       // lowest index among equals; -1 if a NaN is there or n is 0
    float (*max_value)(const float* x, int n);  // NaN if one is there, -inf if n is 0
    // p[i] = exp((x[i] - max) * inv_temperature); returns the sum, in double over 16 fixed lanes.
    double (*exp_sum)(const float* x, float max, float inv_temperature, int n, float* p);
    // Indices with x[i] >= cutoff, ascending; returns how many. ids has room for n.
    int (*gather)(const float* x, int n, float cutoff, int32_t* ids);
    // sums[c] = sum of max(0, p_scale * p[i] - q_scale * q[i]) over the c-th kSumChunk values; q null: of p_scale * p[i].
    void (*excess_sums)(const float* p, double p_scale, const float* q, double q_scale, int n, double* sums);
    // The index drawn in proportion to p >= 0 with the keyed noise of each index; -1 where p has no mass.
    int (*race)(const float* p, int n, const NoiseKey& key);
};

// num_slots: one past the last slot in sight of any row.
size_t attention_scratch_floats(int rows, int group, int head_dim, int num_slots);

// The best set that this processor runs, or the one named (FOREDRAFT_KERNELS: avx512, avxvnni, avx2, neon, portable).
// Throws std::invalid_argument, naming the sets that can run here, if that one cannot.
const KernelSet& select_kernels(const char* name_or_null);

}  // namespace foredraft
