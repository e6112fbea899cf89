// One decoder-only transformer, driven by a description.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/packed.h"
#include "kernels/kernels.h"
#include "kv_cache.h"
#include "pass_plan.h"
#include "pool.h"
#include "rope_table.h"

namespace foredraft {

enum class Activation { Silu, GeluTanh };

struct DecoderConfig {
    int num_layers, hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, vocab_size;
    float norm_eps, attention_scale;
    std::vector<RopeTable> rope_tables;
    std::vector<int> layer_rope;    // [num_layers] index into rope_tables
    std::vector<int> layer_window;  // [num_layers] positions in sight, the row's own included; 0: all
    bool rope_interleaved;
    Activation activation;
    float attention_softcap, logit_softcap;  // 0: none
    float embedding_scale;
};

// Matrices refer to the caller's memory. Empty vectors are steps that this layer does not have.
struct DecoderLayer {
    PackedMatrix query, key, value, output, gate, up, down;
    std::vector<float> attention_norm, ffn_norm;
    std::vector<float> query_bias, key_bias, value_bias, output_bias;
    std::vector<float> query_norm, key_norm;
    std::vector<float> post_attention_norm, post_ffn_norm;
};

// How rows are quantised for the matrices that read them: not at all, with a scale for each group, for each half of one.
enum class Codes { None, Groups, HalfGroups };

// Rows of floats and their int8 codes, room for `rows` rows of k.
class ActivationBuffer {
  public:
    void resize(int rows, int k);
    ActivationRows rows(int num_rows, int k, Codes codes);
    float* values() { return values_.data(); }

  private:
    std::vector<float> values_, scales_, sums_;
    std::vector<int8_t> codes_;
    std::vector<int32_t> code_sums_;
};

// [rows, width] floats that an older view may outlive: growing makes a new array.
class SharedRows {
  public:
    float* resize(size_t rows, size_t width);
    const std::shared_ptr<float[]>& data() const { return data_; }
    size_t capacity() const { return capacity_; }

  private:
    std::shared_ptr<float[]> data_;
    size_t capacity_ = 0;
};

// A view that keeps its array alive. [rows, width], row after row.
struct FloatRows {
    std::shared_ptr<float[]> data;
    size_t rows, width;
};

// The stages of a pass, summed over layers.
enum class Stage { Embed, Norm, Projections, Rotate, Attention, Output, GateUp, Down, Head, Count };
inline constexpr size_t kNumStages = size_t(Stage::Count);
const char* stage_name(Stage stage);

// [layers, rows, hidden], layer after layer.
struct HiddenStates {
    size_t num_layers;
    FloatRows values;
};

class Decoder {
  public:
    // Throws std::invalid_argument if the sizes do not fit together.
    Decoder(DecoderConfig config, ThreadPool& pool, const KernelSet& kernels);

    const DecoderConfig& config() const { return config_; }
    const KernelSet& kernels() const { return kernels_; }
    size_t weight_bytes() const { return weight_bytes_; }

    // GGUF's tensor names. The bytes must outlive the decoder. Throw std::invalid_argument for unknown names and wrong shapes.
    void set_weight(const std::string& name, Format format, int n, int k, std::span<const uint8_t> packed);
    void set_vector(const std::string& name, std::span<const float> values);
    void set_embedding(GgmlType type, int vocab, int hidden, std::span<const uint8_t> rows);

    std::unique_ptr<KVCache> make_cache(int num_blocks, bool half) const;

    // One pass: logits [rows that want them, vocab], valid until the next. Throws std::invalid_argument, with nothing
    // changed, if the input or the cache does not fit or a tensor is missing.
    FloatRows forward(KVCache& cache, const PassInput& input);
    // Of the layers that the last pass was asked for.
    const HiddenStates& hidden_states() const { return hidden_states_; }
    // Seconds of the last pass, by Stage.
    const std::array<double, kNumStages>& seconds() const { return seconds_; }

    void move_slots(KVCache& cache, std::span<const int32_t> block_table, std::span<const int32_t> source, std::span<const int32_t> target);

    // Only these blocks of 16 tokens, ascending; -inf elsewhere. Empty: all.
    void limit_head(std::span<const int32_t> blocks);

  private:
    struct Product {
        const PackedMatrix& weights;
        float* out;
        size_t stride;
    };

    // Held by whatever reads or changes the decoder's state: a second thread is refused, not let in.
    class Exclusive {
      public:
        explicit Exclusive(Decoder& decoder);
        ~Exclusive() { in_use_.store(false, std::memory_order_release); }
        Exclusive(const Exclusive&) = delete;
        Exclusive& operator=(const Exclusive&) = delete;

      private:
        std::atomic<bool>& in_use_;
    };

    void require_complete() const;
    void require_own(const KVCache& cache) const;
    void resize(int rows, int num_slots);
    void embed(const PassInput& input, int rows);
    ActivationRows normalise(std::span<const int32_t> rows, const std::vector<float>& norm, Codes codes);
    void multiply(std::initializer_list<Product> products, const ActivationRows& x);
    void finish_projections(int layer, KVCache& cache, const PassPlan& plan);
    ActivationRows attend(int layer, KVCache& cache, const PassPlan& plan, std::span<const int32_t> block_tables);
    ActivationRows gate_and_up(const DecoderLayer& layer, const ActivationRows& x);
    void add_to_residual(const std::vector<float>& bias, const std::vector<float>& norm, int rows);
    void keep_hidden(const PassInput& input, int layer, int rows);
    FloatRows compute_logits(const PassPlan& plan);

    DecoderConfig config_;
    ThreadPool& pool_;
    const KernelSet& kernels_;
    std::vector<DecoderLayer> layers_;
    PackedMatrix head_{};
    std::vector<float> output_norm_;
    GgmlType embedding_type_{};
    const uint8_t* embedding_ = nullptr;
    size_t embedding_row_bytes_ = 0;
    size_t weight_bytes_ = 0;
    std::atomic<bool> in_use_{false};
    std::vector<int32_t> head_blocks_;

    // Room for one pass.
    std::vector<int32_t> all_rows_;   // 0, 1, 2 ...
    std::vector<float> residual_;     // [rows, hidden]
    std::vector<float> query_;        // [rows, heads * head_dim]
    std::vector<float> key_, value_;  // [rows, kv heads * head_dim]
    std::vector<float> projected_;    // [rows, hidden] what attention or feed-forward adds
    ActivationBuffer normed_, attended_, gated_;
    std::vector<std::vector<float>> scratch_;  // per thread
    SharedRows logits_, hidden_;
    HiddenStates hidden_states_{};
    std::array<double, kNumStages> seconds_{};
};

}  // namespace foredraft
