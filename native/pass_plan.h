// What one pass computes, worked out and checked before anything is touched.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace foredraft {

// As the caller gives it; nothing is trusted.
struct PassInput {
    std::span<const int32_t> sequences;       // [num_sequences, 4]: start, num_rows, num_logits, num_table_blocks
    std::span<const int32_t> block_tables;    // the sequences' tables, one after another
    std::span<const int32_t> tokens;          // [rows]
    std::span<const int32_t> parents;         // [rows], or empty: chains
    std::span<const int32_t> embedding_rows;  // [e]
    std::span<const float> embeddings;        // [e, hidden]
    std::span<const int32_t> hidden_layers;   // each in 0..num_layers
};

struct PassLimits {
    int vocab_size, num_blocks, num_layers, hidden_size;
    int max_tile_rows;  // rows that attend together
};

// Rows of one sequence that attend together.
struct AttentionTile {
    int first_row, num_rows;  // within the pass
    int start;                // the sequence's cached positions
    size_t block_table;       // index into PassInput::block_tables
    size_t path;              // index into PassPlan::paths of the first row's path
    int path_stride;
    int num_slots;  // one past the last slot in sight
};

struct PassPlan {
    int num_rows = 0;
    int num_positions = 0;           // one past the largest logical position
    std::vector<int32_t> positions;  // [rows] logical
    std::vector<int32_t> blocks;     // [rows] physical block and ...
    std::vector<int32_t> slots;      // [rows] ... slot in it, where the row's key and value go
    std::vector<int32_t> logit_rows;
    // paths[tile.path + r * tile.path_stride + d] is the slot of logical position start + d on the path to row r.
    std::vector<int32_t> paths;
    std::vector<AttentionTile> tiles;
};

// Throws std::invalid_argument, saying what is wrong with which sequence or row.
PassPlan plan_pass(const PassInput& input, const PassLimits& limits);

}  // namespace foredraft
