#include "decoder.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace foredraft {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void require_multiple(const char* what, int value, int of) {
    if (value < of || value % of)
        refuse(std::string(what) + " must be a multiple of " + std::to_string(of) + ", got " + std::to_string(value));
}

void check(const DecoderConfig& c) {
    constexpr int kMaxLayers = 4096, kMaxSize = 1 << 24;
    if (c.num_layers < 1 || c.num_layers > kMaxLayers) refuse("num_layers must be in 1.." + std::to_string(kMaxLayers));
    for (const int size : {c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn_size, c.vocab_size})
        if (size < 1 || size > kMaxSize) refuse("sizes of a decoder must be in 1.." + std::to_string(kMaxSize));
    if (int64_t(c.num_heads) * c.head_dim > kMaxSize) refuse("num_heads * head_dim must be at most " + std::to_string(kMaxSize));
    require_multiple("hidden_size", c.hidden_size, kGroup);
    require_multiple("ffn_size", c.ffn_size, kGroup);
    require_multiple("head_dim", c.head_dim, 16);
    require_multiple("num_heads * head_dim", c.num_heads * c.head_dim, kGroup);
    require_multiple("num_heads", c.num_heads, c.num_kv_heads);
    if (c.layer_rope.size() != size_t(c.num_layers)) refuse("layer_rope needs a table for each layer");
    if (c.layer_window.size() != size_t(c.num_layers)) refuse("layer_window needs a window for each layer");
    for (const int table : c.layer_rope)
        if (table < 0 || size_t(table) >= c.rope_tables.size())
            refuse("layer_rope names table " + std::to_string(table) + ", which is not there");
    for (const int window : c.layer_window)
        if (window < 0) refuse("a window is 0 (none) or positive, got " + std::to_string(window));
    for (const RopeTable& table : c.rope_tables)
        if (table.num_pairs() != c.head_dim / 2) refuse("a rope table needs head_dim / 2 inverse frequencies");
    if (!(c.norm_eps >= 0)) refuse("norm_eps must not be negative");
    if (!(c.attention_softcap >= 0) || !(c.logit_softcap >= 0)) refuse("a soft-cap is 0 (none) or positive");
    if (!std::isfinite(c.attention_scale) || !std::isfinite(c.embedding_scale)) refuse("scales must be finite");
}

// "blk.12.attn_q.weight" -> 12 and "attn_q.weight"; -1 for names outside the layers.
std::pair<int, std::string_view> split_name(std::string_view name) {
    constexpr std::string_view kPrefix = "blk.";
    if (!name.starts_with(kPrefix)) return {-1, name};
    int layer = -1;
    const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
    if (error != std::errc() || end == name.data() + name.size() || *end != '.') return {-1, name};
    return {layer, name.substr(size_t(end - name.data()) + 1)};
}

struct NamedMatrix {
    std::string_view name;
    PackedMatrix DecoderLayer::* field;
    int n, k;
};

std::vector<NamedMatrix> layer_matrices(const DecoderConfig& c) {
    const int heads = c.num_heads * c.head_dim, kv_heads = c.num_kv_heads * c.head_dim;
    return {
        {"attn_q.weight", &DecoderLayer::query, heads, c.hidden_size},
        {"attn_k.weight", &DecoderLayer::key, kv_heads, c.hidden_size},
        {"attn_v.weight", &DecoderLayer::value, kv_heads, c.hidden_size},
        {"attn_output.weight", &DecoderLayer::output, c.hidden_size, heads},
        {"ffn_gate.weight", &DecoderLayer::gate, c.ffn_size, c.hidden_size},
        {"ffn_up.weight", &DecoderLayer::up, c.ffn_size, c.hidden_size},
        {"ffn_down.weight", &DecoderLayer::down, c.hidden_size, c.ffn_size},
    };
}

struct NamedVector {
    std::string_view name;
    std::vector<float> DecoderLayer::* field;
    int size;
    bool required;
};

std::vector<NamedVector> layer_vectors(const DecoderConfig& c) {
    const int heads = c.num_heads * c.head_dim, kv_heads = c.num_kv_heads * c.head_dim;
    return {
        {"attn_norm.weight", &DecoderLayer::attention_norm, c.hidden_size, true},
        {"ffn_norm.weight", &DecoderLayer::ffn_norm, c.hidden_size, true},
        {"attn_q.bias", &DecoderLayer::query_bias, heads, false},
        {"attn_k.bias", &DecoderLayer::key_bias, kv_heads, false},
        {"attn_v.bias", &DecoderLayer::value_bias, kv_heads, false},
        {"attn_output.bias", &DecoderLayer::output_bias, c.hidden_size, false},
        {"attn_q_norm.weight", &DecoderLayer::query_norm, c.head_dim, false},
        {"attn_k_norm.weight", &DecoderLayer::key_norm, c.head_dim, false},
        {"post_attention_norm.weight", &DecoderLayer::post_attention_norm, c.hidden_size, false},
        {"post_ffw_norm.weight", &DecoderLayer::post_ffn_norm, c.hidden_size, false},
    };
}

}  // namespace

Decoder::Decoder(DecoderConfig config, ThreadPool& pool, const KernelSet& kernels)
    : config_(std::move(config)), pool_(pool), kernels_(kernels), scratch_(size_t(pool.num_threads())) {
    check(config_);
    layers_.resize(size_t(config_.num_layers));
}

Decoder::Exclusive::Exclusive(Decoder& decoder) : in_use_(decoder.in_use_) {
    if (in_use_.exchange(true, std::memory_order_acquire)) throw std::runtime_error("a decoder runs one pass at a time");
}

void Decoder::set_weight(const std::string& name, Format format, int n, int k, std::span<const uint8_t> packed) {
    const Exclusive exclusive(*this);
    const auto [layer, rest] = split_name(name);
    PackedMatrix* target = nullptr;
    int want_n = 0, want_k = 0;
    if (name == "output.weight") {
        target = &head_;
        want_n = config_.vocab_size;
        want_k = config_.hidden_size;
    }
    if (layer >= 0 && layer < config_.num_layers) {
        for (const NamedMatrix& matrix : layer_matrices(config_)) {
            if (matrix.name != rest) continue;
            target = &(layers_[size_t(layer)].*matrix.field);
            want_n = matrix.n;
            want_k = matrix.k;
        }
    }
    if (!target) refuse("no matrix '" + name + "' in this decoder");
    if (n != want_n || k != want_k)
        refuse(name + " must be [" + std::to_string(want_n) + ", " + std::to_string(want_k) + "], got [" + std::to_string(n) + ", " +
               std::to_string(k) + "]");
    const size_t bytes = packed_bytes(format, n, k);
    if (packed.size() != bytes) refuse(name + " has " + std::to_string(packed.size()) + " bytes, " + std::to_string(bytes) + " are needed");
    if (target->data) weight_bytes_ -= packed_bytes(target->format, target->n, target->k);
    *target = {format, n, k, packed.data(), packed_block_bytes(format, k)};
    weight_bytes_ += bytes;
}

void Decoder::set_vector(const std::string& name, std::span<const float> values) {
    const Exclusive exclusive(*this);
    const auto [layer, rest] = split_name(name);
    std::vector<float>* target = nullptr;
    int want = 0;
    if (name == "output_norm.weight") {
        target = &output_norm_;
        want = config_.hidden_size;
    }
    if (layer >= 0 && layer < config_.num_layers) {
        for (const NamedVector& vector : layer_vectors(config_)) {
            if (vector.name != rest) continue;
            target = &(layers_[size_t(layer)].*vector.field);
            want = vector.size;
        }
    }
    if (!target) refuse("no vector '" + name + "' in this decoder");
    if (values.size() != size_t(want))
        refuse(name + " must have " + std::to_string(want) + " values, got " + std::to_string(values.size()));
    target->assign(values.begin(), values.end());
}

void Decoder::set_embedding(GgmlType type, int vocab, int hidden, std::span<const uint8_t> rows) {
    const Exclusive exclusive(*this);
    if (vocab != config_.vocab_size || hidden != config_.hidden_size)
        refuse("token_embd.weight must be [" + std::to_string(config_.vocab_size) + ", " + std::to_string(config_.hidden_size) + "]");
    const size_t row_bytes = stored_bytes(type, size_t(hidden));
    if (rows.size() != row_bytes * size_t(vocab))
        refuse("token_embd.weight has " + std::to_string(rows.size()) + " bytes, " + std::to_string(row_bytes * size_t(vocab)) +
               " are needed");
    embedding_type_ = type;
    embedding_ = rows.data();
    embedding_row_bytes_ = row_bytes;
}

void Decoder::limit_head(std::span<const int32_t> blocks) {
    const Exclusive exclusive(*this);
    const int num_blocks = (config_.vocab_size + kChannels - 1) / kChannels;
    int32_t previous = -1;
    for (const int32_t block : blocks) {
        if (block <= previous || block >= num_blocks) refuse("blocks of the head must ascend within 0.." + std::to_string(num_blocks - 1));
        previous = block;
    }
    head_blocks_.assign(blocks.begin(), blocks.end());
}

std::unique_ptr<KVCache> Decoder::make_cache(int num_blocks, bool half) const {
    return std::make_unique<KVCache>(config_.num_layers, config_.num_kv_heads, config_.head_dim, num_blocks, half);
}

void Decoder::require_complete() const {
    if (!embedding_) refuse("token_embd.weight is missing");
    if (!head_.data) refuse("output.weight is missing");
    if (output_norm_.empty()) refuse("output_norm.weight is missing");
    const auto matrices = layer_matrices(config_);
    const auto vectors = layer_vectors(config_);
    for (size_t i = 0; i < layers_.size(); ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        for (const NamedMatrix& matrix : matrices)
            if (!(layers_[i].*matrix.field).data) refuse(prefix + std::string(matrix.name) + " is missing");
        for (const NamedVector& vector : vectors)
            if (vector.required && (layers_[i].*vector.field).empty()) refuse(prefix + std::string(vector.name) + " is missing");
    }
}

void Decoder::require_own(const KVCache& cache) const {
    if (cache.num_layers() != config_.num_layers || cache.num_kv_heads() != config_.num_kv_heads || cache.head_dim() != config_.head_dim)
        refuse("the cache was made for another decoder");
}

void Decoder::move_slots(KVCache& cache, std::span<const int32_t> block_table, std::span<const int32_t> source,
                         std::span<const int32_t> target) {
    const Exclusive exclusive(*this);
    require_own(cache);
    if (source.size() != target.size()) refuse("source and target must be equally many");
    const int64_t num_slots = int64_t(block_table.size()) * kSlots;
    for (const int32_t block : block_table)
        if (block < 0 || block >= cache.num_blocks()) refuse("block " + std::to_string(block) + " is not in the cache");
    for (size_t i = 0; i < source.size(); ++i) {
        if (target[i] < 0 || source[i] < target[i] || source[i] >= num_slots)
            refuse("slots must have 0 <= target <= source < the table's slots");
        if (i > 0 && (source[i] <= source[i - 1] || target[i] <= target[i - 1])) refuse("source and target must ascend");
    }
    pool_.parallel_for(config_.num_layers, 4, [&](int begin, int end, int) {
        for (int layer = begin; layer < end; ++layer)
            for (size_t i = 0; i < source.size(); ++i)
                if (source[i] != target[i])
                    cache.copy_slot(layer, block_table[size_t(source[i] / kSlots)], source[i] % kSlots,
                                    block_table[size_t(target[i] / kSlots)], target[i] % kSlots);
    });
}

}  // namespace foredraft
