// One sequence's sampling on the CPU core: processed laws, keyed noise and verification, over rows of float logits.
// src/foredraft/algo/sampler.py says what each method means; ArraySampler there is the reference.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace foredraft {

// The model's numbers leave nothing to choose from.
struct NumericalFault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct SamplingFields {
    double temperature, top_p, min_p;
    int top_k, min_tokens;
    double presence_penalty, frequency_penalty, repetition_penalty;
    std::vector<std::pair<int32_t, float>> logit_bias;
};

// The tokens that a grammar allows left none with a finite logit.
struct NoToken : NumericalFault {
    using NumericalFault::NumericalFault;
};

// One row of logits. mask: bit i % 32 of word i / 32 says whether token i may be chosen; null: all may.
struct LogitRow {
    const float* values;
    int width;
    const uint32_t* mask;
};

// The target's rows: logits [rows, vocab]; masks [rows, (vocab + 31) / 32] or null.
struct TargetRows {
    const float* logits;
    const uint32_t* masks;
};

// A draft as arrays. probs [n, width] or null; row i is the law that token i was drawn from, up to a factor.
struct DraftArrays {
    std::vector<int32_t> tokens, parents;
    const float* probs;
    int width;
};

struct Outcome {
    std::vector<int32_t> accepted;  // draft nodes, root first
    int token;
};

struct Drawn {
    int token;
    double probability;
};

// A token, and its probability in units of the best one's.
struct Odds {
    int32_t token;
    double odds;
};

struct TokenScores {
    double logprob;
    std::vector<std::pair<int32_t, double>> top;
};

// A token that a filter has to judge: its logit and its weight.
struct Candidate {
    int32_t id;
    float x, p;
};

// A processed law: p[i] / sum is the probability of ids[i], or of i where ids is empty.
struct Law {
    std::vector<int32_t> ids;  // ascending
    std::vector<float> p;
    double sum;

    int size() const { return int(p.size()); }
    int id(int i) const { return ids.empty() ? i : ids[i]; }
    int find(int token) const;  // place of a token, or -1
};

class Sampler {
  public:
    // vocab_size: width of the target's rows; ids from vocab_limit on are never chosen.
    Sampler(const KernelSet& kernels, SamplingFields fields, std::vector<int32_t> eos_ids, int vocab_size, int vocab_limit, uint64_t seed,
            int choice, bool block);

    // Committed tokens: of the prompt first, then of the output. Throws std::invalid_argument for ids outside the vocabulary.
    void add_prompt(const std::vector<int32_t>& tokens);
    void extend(const std::vector<int32_t>& tokens);

    // probs [probs_width] or null.
    Drawn draw(LogitRow row, const std::vector<int32_t>& path, float* probs, int probs_width);
    std::vector<Odds> runners_up(LogitRow row, const std::vector<int32_t>& path, int count, double least_odds);
    // 1 + n rows.
    Outcome verify(const TargetRows& rows, const DraftArrays& draft);
    TokenScores logprobs(const float* logits, int token, int num_top);

    int vocab_size() const { return vocab_size_; }

  private:
    enum Stream : uint32_t { kTarget, kDraft, kAccept, kResidual };

    void check_token(int token, const char* what) const;
    bool is_greedy() const { return fields_.temperature == 0; }
    NoiseKey noise_key(Stream stream, int depth, uint32_t pass) const;
    double uniform(Stream stream, int depth, int index) const;

    LogitRow row_of(const TargetRows& rows, int row) const;
    void check_draw(LogitRow& row, const std::vector<int32_t>& path) const;
    const float* adjust(const LogitRow& row, const std::vector<int32_t>& path);
    void count(int token, int by, bool in_prompt);
    int best_token(const float* adjusted, int width) const;
    void process(const LogitRow& row, const std::vector<int32_t>& path);
    void filter(const float* x, int width, float max, float inv_temperature);
    int sample_target(const LogitRow& row, const std::vector<int32_t>& path);
    int race(const Law& law, const NoiseKey& key) const;

    // A draft's law: q(token) = values[token] * scale, at the target's width.
    struct DraftLaw {
        const float* values;
        double scale;
        double operator()(int token) const { return values[token] * scale; }
    };
    DraftLaw draft_law(const DraftArrays& draft, int row);
    std::vector<double> excess_sums(const float* p, double p_scale, const float* q, double q_scale, int n) const;
    std::vector<double> excess_sums(double p_scale, const DraftLaw* q) const;

    Outcome walk(const TargetRows& rows, const DraftArrays& draft);
    Outcome ratio_test(const TargetRows& rows, const DraftArrays& draft);
    Outcome block_test(const TargetRows& rows, const DraftArrays& draft);

    struct Occurrence {
        int32_t token;
        int32_t in_output;
        bool in_prompt;
    };

    const KernelSet& kernels_;
    const SamplingFields fields_;
    std::vector<int32_t> eos_ids_;
    const int vocab_size_, vocab_limit_;
    const uint64_t seed_;
    const uint32_t choice_;
    const bool block_;
    bool has_penalties_;
    uint32_t position_ = 0, num_passes_ = 0;
    int num_output_ = 0;
    // Tokens that occur, each once; filled only where penalties ask for it.
    std::vector<Occurrence> occurrences_;
    std::unordered_map<int32_t, int32_t> occurrence_of_;
    // Scratch, kept because fresh pages for a vocabulary cost more than the work on it: the row after bias and penalties, a
    // draft's law at full width, what the filters look at, the law of the row last processed.
    std::vector<float> adjusted_, padded_;
    struct {
        std::vector<int32_t> ids;
        std::vector<float> values, weights;
        std::vector<Candidate> candidates;
    } filtering_;
    Law law_;
};

}  // namespace foredraft
