#include "pass_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "kernels/kernels.h"

namespace foredraft {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// One number of the input against its range, for an error that says which it was.
void require_in(const char* what, size_t index, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(std::string(what) + " " + std::to_string(index) + ": " + std::to_string(value) + " is not in " + std::to_string(low) + ".." +
               std::to_string(high));
}

struct SequenceShape {
    int start, num_rows, num_logits, num_blocks;
};

// Paths of the rows of a tree: [rows, depth of the deepest row + 1].
void append_tree(const SequenceShape& s, std::span<const int32_t> parents, PassPlan& plan) {
    const size_t base = plan.paths.size(), stride = size_t(s.num_rows);
    plan.paths.resize(base + stride * stride);
    for (int r = 0; r < s.num_rows; ++r) {
        const int parent = parents[size_t(r)];
        const int depth = parent < 0 ? 0 : plan.positions[plan.positions.size() - size_t(r) + size_t(parent)] - s.start + 1;
        int32_t* path = &plan.paths[base + size_t(r) * stride];
        if (parent >= 0) std::copy_n(&plan.paths[base + size_t(parent) * stride], depth, path);
        path[depth] = s.start + r;
        plan.positions.push_back(s.start + depth);
    }
}

void append_sequence(const SequenceShape& s, size_t table, std::span<const int32_t> block_table, std::span<const int32_t> parents,
                     int max_tile_rows, PassPlan& plan) {
    bool is_chain = true;
    for (size_t i = 0; i < parents.size(); ++i) is_chain = is_chain && parents[i] == int32_t(i) - 1;
    const size_t path = plan.paths.size();
    if (is_chain) {
        for (int d = 0; d < s.num_rows; ++d) {
            plan.paths.push_back(s.start + d);
            plan.positions.push_back(s.start + d);
        }
    } else {
        append_tree(s, parents, plan);
    }
    const int path_stride = is_chain ? 0 : s.num_rows;
    for (int r = 0; r < s.num_rows; r += max_tile_rows) {
        const int rows = std::min(max_tile_rows, s.num_rows - r);
        plan.tiles.push_back(
            {plan.num_rows + r, rows, s.start, table, path + size_t(r) * size_t(path_stride), path_stride, s.start + r + rows});
    }
    for (int r = 0; r < s.num_rows; ++r) {
        plan.blocks.push_back(block_table[size_t(s.start + r) / kSlots]);
        plan.slots.push_back((s.start + r) % kSlots);
        if (r >= s.num_rows - s.num_logits) plan.logit_rows.push_back(plan.num_rows + r);
        plan.num_positions = std::max(plan.num_positions, plan.positions[size_t(plan.num_rows + r)] + 1);
    }
    plan.num_rows += s.num_rows;
}

}  // namespace

PassPlan plan_pass(const PassInput& in, const PassLimits& limits) {
    PassPlan plan;
    if (in.sequences.size() % 4) refuse("sequences must have 4 numbers each: start, rows, logits, table blocks");
    if (in.sequences.empty()) refuse("a pass needs at least one sequence");
    if (!in.parents.empty() && in.parents.size() != in.tokens.size()) refuse("parents must be empty or one for each token");
    const int64_t num_slots = int64_t(limits.num_blocks) * kSlots;
    std::unordered_set<int32_t> written;
    size_t table = 0, row = 0;
    for (size_t i = 0; i < in.sequences.size() / 4; ++i) {
        const SequenceShape s{in.sequences[4 * i], in.sequences[4 * i + 1], in.sequences[4 * i + 2], in.sequences[4 * i + 3]};
        require_in("rows of sequence", i, s.num_rows, 1, int64_t(in.tokens.size() - row));
        require_in("logits of sequence", i, s.num_logits, 0, s.num_rows);
        require_in("table blocks of sequence", i, s.num_blocks, 1, int64_t(in.block_tables.size() - table));
        require_in("start of sequence", i, s.start, 0, std::min(num_slots, int64_t(s.num_blocks) * kSlots) - s.num_rows);
        const auto block_table = in.block_tables.subspan(table, size_t(s.num_blocks));
        const int last = (s.start + s.num_rows - 1) / kSlots;
        for (int b = 0; b <= last; ++b) require_in("block of sequence", i, block_table[size_t(b)], 0, limits.num_blocks - 1);
        for (int b = s.start / kSlots; b <= last; ++b)
            if (!written.insert(block_table[size_t(b)]).second)
                refuse("block " + std::to_string(block_table[size_t(b)]) + " would be written twice");
        const auto parents = in.parents.empty() ? in.parents : in.parents.subspan(row, size_t(s.num_rows));
        for (size_t r = 0; r < parents.size(); ++r) require_in("parent of row", row + r, parents[r], -1, int64_t(r) - 1);
        append_sequence(s, table, block_table, parents, limits.max_tile_rows, plan);
        table += size_t(s.num_blocks);
        row += size_t(s.num_rows);
    }
    if (row != in.tokens.size()) refuse(std::to_string(in.tokens.size()) + " tokens for " + std::to_string(row) + " rows");
    for (size_t r = 0; r < in.tokens.size(); ++r) require_in("token of row", r, in.tokens[r], 0, limits.vocab_size - 1);
    for (size_t i = 0; i < in.hidden_layers.size(); ++i) require_in("hidden layer", i, in.hidden_layers[i], 0, limits.num_layers);
    if (in.embeddings.size() != in.embedding_rows.size() * size_t(limits.hidden_size))
        refuse("embeddings must be [embedding_rows, hidden]");
    for (size_t i = 0; i < in.embedding_rows.size(); ++i) require_in("embedding row", i, in.embedding_rows[i], 0, plan.num_rows - 1);
    return plan;
}

}  // namespace foredraft
