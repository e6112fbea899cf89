// The sampler on awkward widths, parameters and drafts, for the sanitizers: tokens stay in range, forbidden ones never come,
// and every kernel set tells the same story.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/select.h"
#include "sampling.h"

namespace foredraft {
namespace {

struct Random {
    uint64_t state;
    uint32_t below(uint32_t n) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return uint32_t(state >> 33) % n;
    }
    float value() { return float(below(2001)) * 0.01f - 10.0f; }
    std::vector<float> row(int n) {
        std::vector<float> x(n);
        for (float& v : x) v = below(9) ? value() : below(2) ? 3.0f : -INFINITY;
        x[below(n)] = 1.0f;
        return x;
    }
    // Whole words of one kind, as grammars have them, or scattered bits; the first token is always allowed.
    const uint32_t* mask(std::vector<uint32_t>& words, int vocab) {
        words.resize((vocab + 31) / 32);
        for (uint32_t& word : words) word = below(2) ? below(2) * UINT32_MAX : below(UINT32_MAX);
        words[0] |= 1;
        return words.data();
    }
};

SamplingFields random_fields(Random& random, int vocab) {
    const double temperatures[] = {0, 1, 1e-30, 0.3, 40}, shares[] = {1, 1, 0.5, 1e-6, 0.999};
    SamplingFields fields{};
    fields.temperature = temperatures[random.below(5)];
    fields.top_p = shares[random.below(5)];
    fields.min_p = random.below(3) ? 0 : shares[random.below(5)];
    fields.top_k = random.below(2) ? 0 : int(random.below(vocab + 2));
    fields.min_tokens = int(random.below(4));
    fields.presence_penalty = random.below(2);
    fields.frequency_penalty = random.below(2) * 0.5;
    fields.repetition_penalty = random.below(2) ? 1 : 1.5;
    if (random.below(2)) fields.logit_bias = {{int32_t(random.below(vocab)), 2.0f}};
    return fields;
}

// Tokens chosen in a few passes; throws where one is out of range.
std::vector<int32_t> decode(const KernelSet& kernels, uint64_t seed) {
    Random random{seed};
    const int widths[] = {1, 2, 15, 16, 17, 63, 64, 65, 130, 1025};
    const int vocab = widths[random.below(10)], limit = random.below(3) ? vocab : 1 + int(random.below(vocab));
    Sampler sampler(kernels, random_fields(random, vocab), {0, vocab - 1, vocab + 5}, vocab, limit, seed, int(random.below(9)),
                    random.below(2));
    sampler.add_prompt({0, int32_t(random.below(vocab))});
    std::vector<int32_t> text;
    for (int pass = 0; pass < 4; ++pass) {
        const int n = int(random.below(5));
        const int width = random.below(2) ? vocab : vocab + 7;
        const bool masked = random.below(2);
        std::vector<uint32_t> mask;
        std::vector<float> probs(size_t(n) * width), logits;
        DraftArrays draft{{}, {}, n && random.below(2) ? probs.data() : nullptr, width};
        for (int i = 0; i < n; ++i) {
            draft.parents.push_back(draft.probs || random.below(2) ? i - 1 : int(random.below(i + 1)) - 1);
            std::vector<int32_t> path;
            for (int node = draft.parents[i]; node >= 0; node = draft.parents[node]) path.insert(path.begin(), draft.tokens[node]);
            const std::vector<float> row = random.row(vocab);
            const Drawn drawn = sampler.draw({row.data(), vocab, masked ? random.mask(mask, vocab) : nullptr}, path,
                                             draft.probs ? &probs[size_t(i) * width] : nullptr, width);
            if (!(drawn.probability > 0 && drawn.probability <= 1.0001)) throw std::runtime_error("a probability out of range");
            draft.tokens.push_back(drawn.token);
        }
        for (int row = 0; row <= n; ++row) {
            const std::vector<float> values = random.row(vocab);
            logits.insert(logits.end(), values.begin(), values.end());
        }
        const size_t words = size_t(vocab + 31) / 32;
        std::vector<uint32_t> masks;
        for (int row = 0; row <= n; ++row) {
            random.mask(mask, vocab);
            masks.insert(masks.end(), mask.begin(), mask.begin() + words);
        }
        const Outcome outcome = sampler.verify({logits.data(), masked ? masks.data() : nullptr}, draft);
        const uint32_t* last = masks.data() + words * (outcome.accepted.empty() ? 0 : 1 + outcome.accepted.back());
        if (masked && !(last[outcome.token / 32] >> outcome.token % 32 & 1)) throw std::runtime_error("a token that its mask excludes");
        std::vector<int32_t> emitted;
        for (int32_t node : outcome.accepted) emitted.push_back(draft.tokens.at(node));
        emitted.push_back(outcome.token);
        for (int32_t token : emitted)
            if (token < 0 || token >= limit) throw std::runtime_error("a token out of range");
        sampler.extend(emitted);
        text.insert(text.end(), emitted.begin(), emitted.end());
        text.push_back(sampler.logprobs(logits.data(), emitted[0], 5).top[0].first);
    }
    return text;
}

int run() {
    int refused = 0;
    for (uint64_t seed = 0; seed < 3000; ++seed) {
        std::vector<std::vector<int32_t>> texts;
        for (const KernelSet* set : runnable_kernel_sets()) {
            try {
                texts.push_back(decode(*set, seed));
            } catch (const NumericalFault&) {  // nothing was left to choose: all else was -inf
                texts.push_back({});
                ++refused;
            }
            if (texts.back() != texts.front()) {
                std::printf("seed %llu: %s differs\n", (unsigned long long)seed, set->name);
                return 1;
            }
        }
    }
    std::printf("3000 sequences, %d without a choice\n", refused);
    return 0;
}

}  // namespace
}  // namespace foredraft

int main() { return foredraft::run(); }
