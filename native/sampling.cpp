#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "masses.h"

namespace foredraft {
namespace {
#include "kernels/noise.inl"

bool likelier(const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

void keep_top_k(std::vector<Candidate>& candidates, int k) {
    if (int(candidates.size()) <= k) return;
    std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), likelier);
    candidates.resize(k);
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

// The fewest likeliest candidates whose weights reach `mass`, one at least; their order stays. A histogram over the leading
// bits of the weights leaves one bucket to sort.
void keep_mass(std::vector<Candidate>& candidates, double mass) {
    auto bucket = [](const Candidate& c) {
        uint32_t bits;
        std::memcpy(&bits, &c.p, 4);
        return bits >> 20;
    };
    std::vector<double> sums(2048);
    uint32_t lowest = 2047;
    for (const Candidate& c : candidates) {
        sums[bucket(c)] += c.p;
        lowest = std::min(lowest, bucket(c));
    }
    uint32_t split = 2047;
    double before = 0;  // the weight of everything above the bucket
    while (split > lowest && before + sums[split] < mass) before += sums[split--];

    std::vector<Candidate> within;
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(within), [&](const Candidate& c) { return bucket(c) == split; });
    std::sort(within.begin(), within.end(), likelier);
    size_t last = 0;
    for (before += within[0].p; before < mass && last + 1 < within.size(); before += within[last].p) ++last;
    std::erase_if(candidates, [&](const Candidate& c) { return bucket(c) < split || (bucket(c) == split && likelier(within[last], c)); });
}

void check_numbers(float best) {
    if (std::isnan(best) || best == INFINITY)
        throw NumericalFault("the model produced logits that are not finite; its weights or its input are damaged");
}

void check_best(float best) {
    check_numbers(best);
    if (best == -INFINITY) throw NoToken("no token is left to choose: every logit is -inf");
}

// -inf where the mask's bit is not set.
void exclude(std::vector<float>& x, const uint32_t* mask) {
    const int n = int(x.size());
    for (int begin = 0; begin < n; begin += 32) {
        const uint32_t word = mask[begin / 32];
        if (word == UINT32_MAX) continue;
        const int end = std::min(n, begin + 32);
        for (int i = begin; i < end; ++i) x[i] = word >> (i - begin) & 1 ? x[i] : -INFINITY;
    }
}

}  // namespace

int Law::find(int token) const {
    if (ids.empty()) return token < size() ? token : -1;
    const auto place = std::lower_bound(ids.begin(), ids.end(), token);
    return place != ids.end() && *place == token ? int(place - ids.begin()) : -1;
}

Sampler::Sampler(const KernelSet& kernels, SamplingFields fields, std::vector<int32_t> eos_ids, int vocab_size, int vocab_limit,
                 uint64_t seed, int choice, bool block)
    : kernels_(kernels),
      fields_(std::move(fields)),
      vocab_size_(vocab_size),
      vocab_limit_(std::min(vocab_limit, vocab_size)),
      seed_(seed),
      choice_(uint32_t(choice)),
      block_(block) {
    if (vocab_size < 1 || vocab_limit < 1) throw std::invalid_argument("a vocabulary needs at least one token");
    for (const auto& [token, bias] : fields_.logit_bias) check_token(token, "logit_bias");
    for (int32_t id : eos_ids) {
        if (id >= 0 && id < vocab_size) eos_ids_.push_back(id);
    }
    has_penalties_ = fields_.presence_penalty != 0 || fields_.frequency_penalty != 0 || fields_.repetition_penalty != 1;
}

void Sampler::check_token(int token, const char* what) const {
    if (token < 0 || token >= vocab_size_)
        throw std::invalid_argument(std::string(what) + ": token id " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(vocab_size_));
}

void Sampler::count(int token, int by, bool in_prompt) {
    const auto [place, is_new] = occurrence_of_.try_emplace(token, int32_t(occurrences_.size()));
    if (is_new) occurrences_.push_back({token, 0, false});
    Occurrence& occurrence = occurrences_[place->second];
    occurrence.in_output += by;
    occurrence.in_prompt |= in_prompt;
}

void Sampler::add_prompt(const std::vector<int32_t>& tokens) {
    for (int32_t token : tokens) check_token(token, "prompt");
    position_ += uint32_t(tokens.size());
    if (fields_.repetition_penalty == 1) return;
    for (int32_t token : tokens) count(token, 0, true);
}

void Sampler::extend(const std::vector<int32_t>& tokens) {
    for (int32_t token : tokens) check_token(token, "a committed token");
    position_ += uint32_t(tokens.size());
    num_output_ += int(tokens.size());
    if (!has_penalties_) return;
    for (int32_t token : tokens) count(token, 1, false);
}

NoiseKey Sampler::noise_key(Stream stream, int depth, uint32_t pass) const {
    return {{position_ + uint32_t(depth), choice_ << 8 | stream, pass}, {uint32_t(seed_), uint32_t(seed_ >> 32)}};
}

double Sampler::uniform(Stream stream, int depth, int index) const {
    const PhiloxWords words = philox(uint32_t(index), noise_key(stream, depth, num_passes_));
    return (double(words.word[0] >> 5) * 0x1p26 + double(words.word[1] >> 6)) * 0x1p-53;
}

LogitRow Sampler::row_of(const TargetRows& rows, int row) const {
    const size_t words = size_t(vocab_size_ + 31) / 32;
    return {rows.logits + size_t(row) * vocab_size_, vocab_limit_, rows.masks ? rows.masks + row * words : nullptr};
}

// The row after bias, the end-of-text mask, penalties and the grammar's mask, as they stand after `path`.
const float* Sampler::adjust(const LogitRow& row, const std::vector<int32_t>& path) {
    const int width = row.width;
    const bool too_short = num_output_ + int(path.size()) < fields_.min_tokens && !eos_ids_.empty();
    if (fields_.logit_bias.empty() && !too_short && !has_penalties_ && !row.mask) return row.values;
    adjusted_.assign(row.values, row.values + width);
    for (const auto& [token, bias] : fields_.logit_bias) {
        if (token < width) adjusted_[token] += bias;
    }
    if (too_short) {
        for (int32_t token : eos_ids_) {
            if (token < width) adjusted_[token] = -INFINITY;
        }
    }
    if (has_penalties_) {
        for (int32_t token : path) count(token, 1, false);
        for (const Occurrence& occurrence : occurrences_) {
            if (occurrence.token >= width || (occurrence.in_output == 0 && !occurrence.in_prompt)) continue;
            double x = adjusted_[occurrence.token];
            x = x > 0 ? x / fields_.repetition_penalty : x * fields_.repetition_penalty;
            x -= fields_.frequency_penalty * occurrence.in_output;
            if (occurrence.in_output > 0) x -= fields_.presence_penalty;
            adjusted_[occurrence.token] = float(x);
        }
        for (int32_t token : path) count(token, -1, false);
    }
    if (row.mask) {
        check_numbers(kernels_.max_value(adjusted_.data(), width));  // a NaN may not hide behind the mask
        exclude(adjusted_, row.mask);
    }
    return adjusted_.data();
}

int Sampler::best_token(const float* adjusted, int width) const {
    const int best = kernels_.argmax(adjusted, width);
    check_best(best < 0 ? NAN : adjusted[best]);
    return best;
}

// law_ becomes the law after `path`; greedy puts all on the argmax.
void Sampler::process(const LogitRow& row, const std::vector<int32_t>& path) {
    const float* x = adjust(row, path);
    const int width = row.width;
    if (is_greedy()) {
        law_.ids = {best_token(x, width)};
        law_.p = {1.0f};
        law_.sum = 1.0;
        return;
    }
    const float max = kernels_.max_value(x, width);
    check_best(max);
    // A smaller temperature than this separates any two different floats already.
    const float inv_temperature = float(std::min(1.0 / fields_.temperature, 1e30));
    const bool cuts_k = fields_.top_k > 0 && fields_.top_k < width;
    if (fields_.min_p > 0 || cuts_k || fields_.top_p < 1) {
        filter(x, width, max, inv_temperature);
        return;
    }
    law_.ids.clear();
    law_.p.resize(width);
    law_.sum = kernels_.exp_sum(x, max, inv_temperature, width, law_.p.data());
}

// Min-p, top-k and top-p on the few tokens that can pass them: first all within a distance of the best, more if these do
// not suffice.
void Sampler::filter(const float* x, int width, float max, float inv_temperature) {
    const bool cuts_k = fields_.top_k > 0 && fields_.top_k < width;
    double total = 0;  // what top-p is a share of, where neither min-p nor top-k came before
    if (!(fields_.min_p > 0) && !cuts_k) {
        law_.p.resize(width);
        total = kernels_.exp_sum(x, max, inv_temperature, width, law_.p.data());
    }
    std::vector<double> distances;  // in units of the temperature
    if (fields_.min_p > 0) distances = {1e-3 - log_double(std::max(fields_.min_p, DBL_MIN))};
    else distances = {8.0, 12.0, 16.0, 24.0, INFINITY};

    auto& [ids, values, weights, candidates] = filtering_;
    candidates.clear();
    for (const double distance : distances) {
        const double lowest = std::max(max - distance / inv_temperature, -double(FLT_MAX));
        ids.resize(width);
        const int count = kernels_.gather(x, width, std::nextafterf(float(lowest), -FLT_MAX), ids.data());
        values.resize(count);
        weights.resize(count);
        for (int i = 0; i < count; ++i) values[i] = x[ids[i]];
        const double mass = kernels_.exp_sum(values.data(), max, inv_temperature, count, weights.data());
        if (distance != distances.back() && (cuts_k ? count < fields_.top_k : mass < fields_.top_p * total)) continue;
        for (int i = 0; i < count; ++i) {
            if (weights[i] >= fields_.min_p) candidates.push_back({ids[i], values[i], weights[i]});
        }
        break;
    }
    if (cuts_k) keep_top_k(candidates, fields_.top_k);
    if (fields_.top_p < 1) {
        if (!(total > 0)) {
            for (const Candidate& c : candidates) total += c.p;
        }
        keep_mass(candidates, fields_.top_p * total);
    }
    law_.ids.clear();
    law_.p.clear();
    law_.sum = 0;
    if (candidates.size() * 16 > size_t(width)) {  // many: keep them in their places
        law_.p.assign(width, 0.0f);
        for (const Candidate& c : candidates) law_.p[c.id] = c.p;
    } else {
        for (const Candidate& c : candidates) {
            law_.ids.push_back(c.id);
            law_.p.push_back(c.p);
        }
    }
    for (const Candidate& c : candidates) law_.sum += c.p;
}

int Sampler::race(const Law& law, const NoiseKey& key) const {
    if (law.ids.empty()) return kernels_.race(law.p.data(), law.size(), key);
    double best = INFINITY;
    int winner = -1;
    for (int i = 0; i < law.size(); ++i) {
        if (!(law.p[i] > 0)) continue;
        const double time = exponential(token_word(law.ids[i], key)) / law.p[i];
        if (time < best) {
            best = time;
            winner = law.ids[i];
        }
    }
    return winner;
}

// The target's own choice after `path`: what plain decoding takes at that position. Leaves the law in law_ unless greedy.
int Sampler::sample_target(const LogitRow& row, const std::vector<int32_t>& path) {
    if (is_greedy()) return best_token(adjust(row, path), row.width);
    process(row, path);
    return race(law_, noise_key(kTarget, int(path.size()), 0));
}

// A draft's row may be wider than the target's.
void Sampler::check_draw(LogitRow& row, const std::vector<int32_t>& path) const {
    for (int32_t token : path) check_token(token, "path");
    if (row.width < 1) throw std::invalid_argument("logits are empty");
    row.width = std::min(row.width, vocab_limit_);
}

Drawn Sampler::draw(LogitRow row, const std::vector<int32_t>& path, float* probs, int probs_width) {
    check_draw(row, path);
    const int width = row.width;
    if (probs && probs_width < width)
        throw std::invalid_argument("a buffer of " + std::to_string(probs_width) + " probabilities is too narrow for " +
                                    std::to_string(width) + " logits");
    if (is_greedy()) {
        const float* x = adjust(row, path);
        const int token = best_token(x, width);
        law_.p.resize(width);
        const double sum = kernels_.exp_sum(x, x[token], 1.0f, width, law_.p.data());
        if (probs) {
            std::fill(probs, probs + probs_width, 0.0f);
            probs[token] = 1.0f;
        }
        return {token, 1.0 / sum};
    }
    if (!probs) {
        const int token = sample_target(row, path);
        return {token, law_.p[law_.find(token)] / law_.sum};
    }
    process(row, path);
    std::fill(probs, probs + probs_width, 0.0f);
    const double scale = 1.0 / law_.sum;
    const double u = uniform(kDraft, int(path.size()), 0);
    // Drawn from what the buffer holds, after rounding.
    if (law_.ids.empty()) {
        for (int i = 0; i < width; ++i) probs[i] = float(law_.p[i] * scale);
        const int token = find_place(width, excess_sums(probs, 1.0, nullptr, 0.0, width), [&](int i) { return double(probs[i]); }, u);
        return {token, law_.p[token] * scale};
    }
    for (int i = 0; i < law_.size(); ++i) probs[law_.ids[i]] = law_.p[i] = float(law_.p[i] * scale);
    auto weight = [&](int i) { return double(law_.p[i]); };
    const int place = find_place(law_.size(), chunk_sums(law_.size(), weight), weight, u);
    return {law_.ids[place], double(law_.p[place])};
}

std::vector<Odds> Sampler::runners_up(LogitRow row, const std::vector<int32_t>& path, int count, double least_odds) {
    check_draw(row, path);
    const float* x = adjust(row, path);
    const int best = best_token(x, row.width);
    const double lowest = std::max(x[best] + log_double(std::max(least_odds, DBL_MIN)), -double(FLT_MAX));
    auto& ids = filtering_.ids;
    ids.resize(row.width);
    ids.resize(kernels_.gather(x, row.width, std::nextafterf(float(lowest), -FLT_MAX), ids.data()));
    std::erase(ids, best);
    const auto last = ids.begin() + std::clamp(count, 0, int(ids.size()));
    std::partial_sort(ids.begin(), last, ids.end(), [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    std::vector<Odds> found;
    for (auto id = ids.begin(); id != last; ++id) {
        const double odds = std::exp(double(x[*id]) - x[best]);
        if (odds > 0 && odds >= least_odds) found.push_back({*id, odds});
    }
    return found;
}

std::vector<double> Sampler::excess_sums(const float* p, double p_scale, const float* q, double q_scale, int n) const {
    std::vector<double> sums((n + kSumChunk - 1) / kSumChunk);
    kernels_.excess_sums(p, p_scale, q, q_scale, n, sums.data());
    return sums;
}

TokenScores Sampler::logprobs(const float* logits, int token, int num_top) {
    check_token(token, "token");
    const float max = kernels_.max_value(logits, vocab_size_);
    check_best(max);
    law_.p.resize(vocab_size_);
    const double log_sum = log_double(kernels_.exp_sum(logits, max, 1.0f, vocab_size_, law_.p.data()));
    auto logprob = [&](int id) { return double(logits[id]) - max - log_sum; };
    std::vector<int32_t> best;  // sorted, greatest first
    num_top = std::min(num_top, vocab_size_);
    for (int id = 0; id < vocab_size_ && num_top > 0; ++id) {
        if (int(best.size()) == num_top && !(logits[id] > logits[best.back()])) continue;
        if (int(best.size()) == num_top) best.pop_back();
        best.insert(std::upper_bound(best.begin(), best.end(), id, [&](int a, int b) { return logits[a] > logits[b]; }), id);
    }
    TokenScores scores{logprob(token), {}};
    for (int32_t id : best) scores.top.emplace_back(id, logprob(id));
    return scores;
}

}  // namespace foredraft
