// One pass of the decoder.
//
// Regions of a layer: query-key-value products | attention | output product | gate and up products | down product.
// What lies between costs a fraction of a microsecond a row; a few rows are done on the calling thread, more in a region.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "decoder.h"

namespace foredraft {

size_t attention_scratch_floats(int rows, int group, int head_dim, int num_slots) {
    const size_t heads = size_t(rows) * size_t(group), blocks = size_t(num_slots + kSlots - 1) / kSlots;
    return heads * (2 * size_t(head_dim) + blocks * kSlots);
}

namespace {

constexpr int kRowGrain = 16;             // rows of small work that one thread does: fewer cost less than moving them to another core
constexpr int kMaxTileRows = 8;           // rows that attend together, if their heads are at most
constexpr int kMaxTileHeads = 48;         // so many
constexpr int kGatedGroups = 10;          // groups of 32 feed-forward channels whose activations lie in scratch together
constexpr size_t kGrainBytes = 64 << 10;  // weights that one thread takes

Codes codes_for(const PackedMatrix& matrix) {
    switch (matrix.format) {
        case Format::F32:
        case Format::F16:
        case Format::BF16:
            return Codes::None;
        case Format::Q4K:
        case Format::Q5K:
        case Format::Q6K:
            return Codes::Groups;
        default:
            return Codes::HalfGroups;
    }
}

// What serves all of them.
Codes codes_for(std::initializer_list<const PackedMatrix*> matrices) {
    Codes codes = Codes::None;
    for (const PackedMatrix* matrix : matrices) {
        const Codes own = codes_for(*matrix);
        if (codes == Codes::None || own == Codes::Groups) codes = own == Codes::None ? codes : own;
    }
    return codes;
}

int tile_rows(const DecoderConfig& c) { return std::clamp(kMaxTileHeads / (c.num_heads / c.num_kv_heads), 1, kMaxTileRows); }

// Adds the time since the last mark to a stage.
class Stopwatch {
  public:
    explicit Stopwatch(std::array<double, kNumStages>& seconds) : seconds_(seconds), last_(Clock::now()) { seconds_.fill(0); }
    void mark(Stage stage) {
        const auto now = Clock::now();
        seconds_[size_t(stage)] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

  private:
    using Clock = std::chrono::steady_clock;
    std::array<double, kNumStages>& seconds_;
    Clock::time_point last_;
};

// The groups of `x` from `group` on as rows of k floats of their own, which lie at `values`.
ActivationRows part_of(const ActivationRows& x, int group, int k, const float* values) {
    const size_t at = size_t(group) * size_t(x.rows);
    return {x.rows, k, values, x.codes + at * kGroup, x.scales + 2 * at, x.sums + at, x.code_sums + 2 * at, x.half_scales};
}

// The channels of `w` from block `begin` to `end`, as a matrix of their own.
PackedMatrix blocks_of(const PackedMatrix& w, int begin, int end) {
    return {w.format, (end - begin) * kChannels, w.k, w.data + size_t(begin) * w.block_bytes, w.block_bytes};
}

}  // namespace

const char* stage_name(Stage stage) {
    static constexpr const char* kNames[kNumStages] = {"embed",  "norm",    "projections", "rotate", "attention",
                                                       "output", "gate_up", "down",        "head"};
    return kNames[size_t(stage)];
}

void ActivationBuffer::resize(int rows, int k) {
    const size_t n = size_t(rows) * size_t(k), groups = n / kGroup;
    if (values_.size() >= n) return;
    values_.resize(n);
    codes_.resize(n);
    scales_.resize(2 * groups);
    sums_.resize(groups);
    code_sums_.resize(2 * groups);
}

ActivationRows ActivationBuffer::rows(int num_rows, int k, Codes codes) {
    return {num_rows, k, values_.data(), codes_.data(), scales_.data(), sums_.data(), code_sums_.data(), codes == Codes::HalfGroups};
}

float* SharedRows::resize(size_t rows, size_t width) {
    if (capacity_ < rows * width) {
        data_ = std::shared_ptr<float[]>(new float[rows * width]);
        capacity_ = rows * width;
    }
    return data_.get();
}

FloatRows Decoder::forward(KVCache& cache, const PassInput& input) {
    const Exclusive exclusive(*this);
    const FloatEnvironment environment;
    Stopwatch watch(seconds_);
    require_complete();
    require_own(cache);
    const PassPlan plan =
        plan_pass(input, {config_.vocab_size, cache.num_blocks(), config_.num_layers, config_.hidden_size, tile_rows(config_)});
    int num_slots = 0;
    for (const AttentionTile& tile : plan.tiles) num_slots = std::max(num_slots, tile.num_slots);
    const int rows = plan.num_rows;
    resize(rows, num_slots);
    for (RopeTable& table : config_.rope_tables) table.grow(plan.num_positions);
    const size_t num_kept = input.hidden_layers.size();
    hidden_.resize(num_kept * size_t(rows), size_t(config_.hidden_size));
    hidden_states_ = {num_kept, {hidden_.data(), num_kept * size_t(rows), size_t(config_.hidden_size)}};

    const std::span all_rows(all_rows_.data(), size_t(rows));
    const size_t hidden = size_t(config_.hidden_size), queries = size_t(config_.num_heads * config_.head_dim),
                 keys = size_t(config_.num_kv_heads * config_.head_dim);
    embed(input, rows);
    watch.mark(Stage::Embed);
    for (int i = 0; i < config_.num_layers; ++i) {
        const DecoderLayer& layer = layers_[size_t(i)];
        keep_hidden(input, i, rows);
        const ActivationRows x = normalise(all_rows, layer.attention_norm, codes_for({&layer.query, &layer.key, &layer.value}));
        watch.mark(Stage::Norm);
        multiply({{layer.query, query_.data(), queries}, {layer.key, key_.data(), keys}, {layer.value, value_.data(), keys}}, x);
        watch.mark(Stage::Projections);
        finish_projections(i, cache, plan);
        watch.mark(Stage::Rotate);
        const ActivationRows attended = attend(i, cache, plan, input.block_tables);
        watch.mark(Stage::Attention);
        multiply({{layer.output, projected_.data(), hidden}}, attended);
        watch.mark(Stage::Output);
        add_to_residual(layer.output_bias, layer.post_attention_norm, rows);
        const ActivationRows y = normalise(all_rows, layer.ffn_norm, codes_for({&layer.gate, &layer.up}));
        watch.mark(Stage::Norm);
        const ActivationRows gated = gate_and_up(layer, y);
        watch.mark(Stage::GateUp);
        multiply({{layer.down, projected_.data(), hidden}}, gated);
        watch.mark(Stage::Down);
        add_to_residual({}, layer.post_ffn_norm, rows);
        watch.mark(Stage::Norm);
    }
    keep_hidden(input, config_.num_layers, rows);
    const FloatRows logits = compute_logits(plan);
    watch.mark(Stage::Head);
    return logits;
}

void Decoder::resize(int rows, int num_slots) {
    const size_t n = size_t(rows), group = size_t(config_.num_heads / config_.num_kv_heads);
    if (all_rows_.size() < n) {
        for (size_t r = all_rows_.size(); r < n; ++r) all_rows_.push_back(int32_t(r));
        residual_.resize(n * size_t(config_.hidden_size));
        projected_.resize(n * size_t(config_.hidden_size));
        query_.resize(n * size_t(config_.num_heads) * size_t(config_.head_dim));
        key_.resize(n * size_t(config_.num_kv_heads) * size_t(config_.head_dim));
        value_.resize(key_.size());
        normed_.resize(rows, config_.hidden_size);
        attended_.resize(rows, config_.num_heads * config_.head_dim);
        gated_.resize(rows, config_.ffn_size);
    }
    const size_t attention = attention_scratch_floats(std::min(rows, tile_rows(config_)), int(group), config_.head_dim, num_slots);
    const size_t gate = 2 * n * kGatedGroups * kGroup;
    for (auto& scratch : scratch_)
        if (scratch.size() < std::max(attention, gate)) scratch.resize(std::max(attention, gate));
}

void Decoder::embed(const PassInput& input, int rows) {
    const size_t hidden = size_t(config_.hidden_size);
    pool_.parallel_for(rows, kRowGrain, [&](int begin, int end, int) {
        for (int r = begin; r < end; ++r) {
            float* x = &residual_[size_t(r) * hidden];
            dequantize(embedding_type_, embedding_ + size_t(input.tokens[size_t(r)]) * embedding_row_bytes_, hidden, x);
            if (config_.embedding_scale != 1.0f)
                for (size_t i = 0; i < hidden; ++i) x[i] *= config_.embedding_scale;
        }
    });
    for (size_t i = 0; i < input.embedding_rows.size(); ++i)
        std::copy_n(&input.embeddings[i * hidden], hidden, &residual_[size_t(input.embedding_rows[i]) * hidden]);
}

void Decoder::keep_hidden(const PassInput& input, int layer, int rows) {
    const size_t n = size_t(rows) * size_t(config_.hidden_size);
    for (size_t i = 0; i < input.hidden_layers.size(); ++i)
        if (input.hidden_layers[i] == layer) std::copy_n(residual_.data(), n, hidden_states_.values.data.get() + i * n);
}

// Row i of the result is the normalised residual of rows[i].
ActivationRows Decoder::normalise(std::span<const int32_t> rows, const std::vector<float>& norm, Codes codes) {
    const size_t hidden = size_t(config_.hidden_size);
    const ActivationRows out = normed_.rows(int(rows.size()), config_.hidden_size, codes);
    pool_.parallel_for(int(rows.size()), kRowGrain, [&](int begin, int end, int) {
        for (int i = begin; i < end; ++i)
            kernels_.rms_norm(&residual_[size_t(rows[size_t(i)]) * hidden], norm.data(), config_.norm_eps, config_.hidden_size,
                              normed_.values() + size_t(i) * hidden);
        if (codes != Codes::None) kernels_.quantize_rows(out, begin, end);
    });
    return out;
}

// Products that read the same rows, in one region.
void Decoder::multiply(std::initializer_list<Product> products, const ActivationRows& x) {
    int num_blocks = 0;
    for (const Product& p : products) num_blocks += p.weights.num_blocks();
    const int grain = int(std::max<size_t>(1, kGrainBytes / products.begin()->weights.block_bytes));
    pool_.parallel_for(num_blocks, grain, [&](int begin, int end, int) {
        for (const Product& p : products) {
            const int blocks = p.weights.num_blocks();
            if (begin < std::min(end, blocks)) kernels_.matmul(p.weights, x, p.out, p.stride, std::max(begin, 0), std::min(end, blocks));
            begin -= blocks;
            end -= blocks;
        }
    });
}

// Biases, norms and rotation of queries and keys; keys and values go into the cache.
void Decoder::finish_projections(int layer_index, KVCache& cache, const PassPlan& plan) {
    const DecoderLayer& layer = layers_[size_t(layer_index)];
    const RopeTable& table = config_.rope_tables[size_t(config_.layer_rope[size_t(layer_index)])];
    const int head_dim = config_.head_dim;
    const auto finish_heads = [&](float* x, int heads, const std::vector<float>& bias, const std::vector<float>& norm, int position) {
        if (!bias.empty()) kernels_.add(x, bias.data(), heads * head_dim, x);
        for (int h = 0; h < heads; ++h) {
            float* head = x + size_t(h) * size_t(head_dim);
            if (!norm.empty()) kernels_.rms_norm(head, norm.data(), config_.norm_eps, head_dim, head);
            kernels_.rope(head, table.cos(position), table.sin(position), head_dim, config_.rope_interleaved);
        }
    };
    pool_.parallel_for(plan.num_rows, kRowGrain, [&](int begin, int end, int) {
        for (size_t r = size_t(begin); r < size_t(end); ++r) {
            float* query = &query_[r * size_t(config_.num_heads) * size_t(head_dim)];
            float* key = &key_[r * size_t(config_.num_kv_heads) * size_t(head_dim)];
            float* value = &value_[r * size_t(config_.num_kv_heads) * size_t(head_dim)];
            finish_heads(query, config_.num_heads, layer.query_bias, layer.query_norm, plan.positions[r]);
            finish_heads(key, config_.num_kv_heads, layer.key_bias, layer.key_norm, plan.positions[r]);
            if (!layer.value_bias.empty()) kernels_.add(value, layer.value_bias.data(), config_.num_kv_heads * head_dim, value);
            const size_t at = size_t(plan.blocks[r]) * cache.block_stride();
            for (int h = 0; h < config_.num_kv_heads; ++h)
                kernels_.store_kv(key + h * head_dim, value + h * head_dim, head_dim, cache.half(), plan.slots[r],
                                  cache.keys(layer_index, h) + at, cache.values(layer_index, h) + at);
        }
    });
}

ActivationRows Decoder::attend(int layer_index, KVCache& cache, const PassPlan& plan, std::span<const int32_t> block_tables) {
    const int group = config_.num_heads / config_.num_kv_heads, head_dim = config_.head_dim, num_heads = config_.num_heads;
    const int window = config_.layer_window[size_t(layer_index)];
    const Codes codes = codes_for(layers_[size_t(layer_index)].output);
    const bool quantise = codes != Codes::None;
    const ActivationRows out = attended_.rows(plan.num_rows, num_heads * head_dim, codes);
    // Threads that would idle share the query heads of a kv head.
    const int num_tasks = int(plan.tiles.size()) * config_.num_kv_heads;
    const int parts = head_dim % kGroup ? 1 : std::min(group, (pool_.num_threads() + num_tasks - 1) / num_tasks);
    // Where a task's outputs are whole groups, its rows lie together and it quantises them itself.
    const bool by_task = quantise && (head_dim % kGroup == 0 || group * head_dim % kGroup == 0);
    pool_.parallel_for(num_tasks * parts, 1, [&](int begin, int end, int thread) {
        for (int i = begin; i < end; ++i) {
            const AttentionTile& tile = plan.tiles[size_t(i / parts / config_.num_kv_heads)];
            const int kv_head = i / parts % config_.num_kv_heads, part = i % parts;
            const int head = kv_head * group + group * part / parts, heads = group * (part + 1) / parts - group * part / parts;
            const int width = heads * head_dim;
            const size_t row = size_t(tile.first_row);
            int32_t first[kMaxTileRows];
            for (int r = 0; r < tile.num_rows; ++r) first[r] = window ? std::max(0, plan.positions[row + size_t(r)] - window + 1) : 0;
            float* head_out = attended_.values() + size_t(head) * size_t(head_dim) * (by_task ? size_t(plan.num_rows) : 1);
            AttentionTask task{};
            task.rows = tile.num_rows;
            task.group = heads;
            task.head_dim = head_dim;
            task.q_stride = size_t(num_heads) * size_t(head_dim);
            task.q = &query_[row * task.q_stride + size_t(head) * size_t(head_dim)];
            task.positions = &plan.positions[row];
            task.first = first;
            task.start = tile.start;
            task.path = &plan.paths[tile.path];
            task.path_stride = tile.path_stride;
            task.block_table = &block_tables[tile.block_table];
            task.keys = cache.keys(layer_index, kv_head);
            task.values = cache.values(layer_index, kv_head);
            task.block_stride = cache.block_stride();
            task.half = cache.half();
            task.scale = config_.attention_scale;
            task.softcap = config_.attention_softcap;
            task.out_stride = size_t(by_task ? width : num_heads * head_dim);
            task.out = head_out + row * task.out_stride;
            task.scratch = scratch_[size_t(thread)].data();
            kernels_.attention(task);
            if (by_task)
                kernels_.quantize_rows(part_of(out, head * head_dim / kGroup, width, head_out), tile.first_row,
                                       tile.first_row + tile.num_rows);
        }
    });
    if (quantise && !by_task)
        pool_.parallel_for(plan.num_rows, kRowGrain, [&](int begin, int end, int) { kernels_.quantize_rows(out, begin, end); });
    return out;
}

// Whoever has a group of gate and up channels applies the activation and quantises it: codes depend on their group only.
ActivationRows Decoder::gate_and_up(const DecoderLayer& layer, const ActivationRows& x) {
    const ActivationRows out = gated_.rows(x.rows, config_.ffn_size, codes_for(layer.down));
    const auto activate = config_.activation == Activation::Silu ? kernels_.silu_mul : kernels_.gelu_tanh_mul;
    const bool quantise = codes_for(layer.down) != Codes::None;
    constexpr int kBlocks = kGroup / kChannels;
    pool_.parallel_for(config_.ffn_size / kGroup, 2, [&](int first, int last, int thread) {
        // A region that runs on its caller alone comes as one chunk.
        for (int begin = first; begin < last; begin += kGatedGroups) {
            const int end = std::min(begin + kGatedGroups, last), width = (end - begin) * kGroup;
            float* gate = scratch_[size_t(thread)].data();
            float* up = gate + size_t(x.rows) * size_t(width);
            kernels_.matmul(blocks_of(layer.gate, begin * kBlocks, end * kBlocks), x, gate, size_t(width), 0, (end - begin) * kBlocks);
            kernels_.matmul(blocks_of(layer.up, begin * kBlocks, end * kBlocks), x, up, size_t(width), 0, (end - begin) * kBlocks);
            for (int r = 0; r < x.rows; ++r) {
                float* g = gate + size_t(r) * size_t(width);
                float* y = quantise ? g : gated_.values() + size_t(r) * size_t(config_.ffn_size) + size_t(begin) * kGroup;
                activate(g, up + size_t(r) * size_t(width), width, y);
            }
            if (quantise) kernels_.quantize_rows(part_of(out, begin, width, gate), 0, x.rows);
        }
    });
    return out;
}

// residual += norm(projected + bias), each where it is there.
void Decoder::add_to_residual(const std::vector<float>& bias, const std::vector<float>& norm, int rows) {
    const int hidden = config_.hidden_size;
    pool_.parallel_for(rows, kRowGrain, [&](int begin, int end, int) {
        for (int r = begin; r < end; ++r) {
            float* y = &projected_[size_t(r) * size_t(hidden)];
            float* x = &residual_[size_t(r) * size_t(hidden)];
            if (!bias.empty()) kernels_.add(y, bias.data(), hidden, y);
            if (!norm.empty()) kernels_.rms_norm(y, norm.data(), config_.norm_eps, hidden, y);
            kernels_.add(x, y, hidden, x);
        }
    });
}

FloatRows Decoder::compute_logits(const PassPlan& plan) {
    const size_t rows = plan.logit_rows.size(), vocab = size_t(config_.vocab_size);
    const size_t stride = size_t(head_.num_blocks()) * kChannels;
    float* logits = logits_.resize(rows, stride);
    const FloatRows result{logits_.data(), rows, vocab};
    if (rows == 0) return result;
    const ActivationRows x = normalise(plan.logit_rows, output_norm_, codes_for(head_));
    const auto compute_blocks = [&](int begin, int end) {
        kernels_.matmul(head_, x, logits, stride, begin, end);
        for (size_t r = 0; r < rows && config_.logit_softcap != 0.0f; ++r)
            kernels_.softcap(logits + r * stride + size_t(begin) * kChannels, (end - begin) * kChannels, config_.logit_softcap);
    };
    const int grain = int(std::max<size_t>(1, kGrainBytes / head_.block_bytes));
    if (head_blocks_.empty()) {
        pool_.parallel_for(head_.num_blocks(), grain, [&](int begin, int end, int) { compute_blocks(begin, end); });
    } else {
        std::fill_n(logits, rows * stride, -INFINITY);
        pool_.parallel_for(int(head_blocks_.size()), grain, [&](int begin, int end, int) {
            for (int i = begin, next; i < end; i = next) {
                for (next = i + 1; next < end && head_blocks_[size_t(next)] == head_blocks_[size_t(next - 1)] + 1;) ++next;
                compute_blocks(head_blocks_[size_t(i)], head_blocks_[size_t(next - 1)] + 1);
            }
        });
    }
    // Rows end with whole blocks of 16; close the gaps.
    for (size_t r = 1; r < rows && stride != vocab; ++r) std::memmove(logits + r * vocab, logits + r * stride, vocab * sizeof(float));
    return result;
}

}  // namespace foredraft
