// The sampler's verification rules: the walk, the ratio test, block verification. src/foredraft/algo/verify.py is the reference.
#include <algorithm>
#include <cfloat>
#include <stdexcept>
#include <string>

#include "masses.h"
#include "sampling.h"

namespace foredraft {
namespace {

double positive(double x) { return x > 0 ? x : 0; }

std::vector<std::vector<int32_t>> children_of(const std::vector<int32_t>& parents) {
    std::vector<std::vector<int32_t>> children(1 + parents.size());
    for (size_t i = 0; i < parents.size(); ++i) children[1 + parents[i]].push_back(int32_t(i));
    return children;
}

}  // namespace

Outcome Sampler::verify(const TargetRows& rows, const DraftArrays& draft) {
    const int n = int(draft.tokens.size());
    if (draft.parents.size() != draft.tokens.size()) throw std::invalid_argument("a draft needs one parent a token");
    bool is_chain = true;
    for (int i = 0; i < n; ++i) {
        check_token(draft.tokens[i], "draft");
        if (draft.parents[i] < -1 || draft.parents[i] >= i)
            throw std::invalid_argument("parents[" + std::to_string(i) + "] is " + std::to_string(draft.parents[i]) +
                                        "; a parent comes before its child, and -1 is the root");
        is_chain &= draft.parents[i] == i - 1;
    }
    Outcome outcome = !draft.probs || n == 0 ? walk(rows, draft) : block_ && is_chain ? block_test(rows, draft) : ratio_test(rows, draft);
    ++num_passes_;
    return outcome;
}

// Sample the target at the node, step to the child that equals the sample.
Outcome Sampler::walk(const TargetRows& rows, const DraftArrays& draft) {
    const auto children = children_of(draft.parents);
    Outcome outcome{{}, 0};
    std::vector<int32_t> path;
    for (int row = 0;;) {
        outcome.token = sample_target(row_of(rows, row), path);
        int next = -1;
        for (int child : children[row]) {
            if (draft.tokens[child] == outcome.token && next < 0) next = child;
        }
        if (next < 0) return outcome;
        outcome.accepted.push_back(next);
        path.push_back(outcome.token);
        row = 1 + next;
    }
}

// Row `row` of the draft's laws, scaled to sum 1 over the target's vocabulary.
Sampler::DraftLaw Sampler::draft_law(const DraftArrays& draft, int row) {
    const float* q = draft.probs + size_t(row) * draft.width;
    const int width = std::min(draft.width, vocab_size_);
    const double sum = sum_of(excess_sums(q, 1.0, nullptr, 0.0, width));
    if (!(sum > 0) || sum > DBL_MAX) throw std::invalid_argument("the draft's probabilities do not sum to a positive number");
    if (width < vocab_size_) {
        padded_.assign(q, q + width);
        padded_.resize(vocab_size_);
        q = padded_.data();
    }
    return {q, 1.0 / sum};
}

// Sums of [p_scale * law - q]+ by chunks; without q, of the law.
std::vector<double> Sampler::excess_sums(double p_scale, const DraftLaw* q) const {
    if (law_.ids.empty()) return excess_sums(law_.p.data(), p_scale, q ? q->values : nullptr, q ? q->scale : 0.0, law_.size());
    return chunk_sums(law_.size(), [&](int i) { return positive(p_scale * law_.p[i] - (q ? (*q)(law_.ids[i]) : 0.0)); });
}

// Leviathan et al. 2023; several children of a node are tested in turn (recursive rejection).
Outcome Sampler::ratio_test(const TargetRows& rows, const DraftArrays& draft) {
    const auto children = children_of(draft.parents);
    Outcome outcome{{}, 0};
    std::vector<int32_t> path;
    std::vector<double> left, excess;  // what is left of the law after the rejections at this node; empty: all
    for (int row = 0;;) {
        process(row_of(rows, row), path);
        const int depth = int(path.size());
        left.clear();
        double sum = law_.sum;
        auto weight = [&](int i) { return left.empty() ? double(law_.p[i]) : left[i]; };
        int next = -1;
        for (int child : children[row]) {
            const DraftLaw q = draft_law(draft, child);
            const int token = draft.tokens[child], place = law_.find(token);
            const double p = place < 0 ? 0.0 : weight(place) / sum;
            if (uniform(kAccept, depth, child) * q(token) < p) {
                next = child;
                break;
            }
            excess.resize(law_.size());
            for (int i = 0; i < law_.size(); ++i) excess[i] = positive(weight(i) / sum - q(law_.id(i)));
            const double rest = sum_of(excess);
            if (!(rest > 0)) continue;  // only rounding leaves no mass: go on with the law as it is
            left.swap(excess);
            sum = rest;
        }
        if (next < 0) {
            const int place = find_place(law_.size(), chunk_sums(law_.size(), weight), weight, uniform(kResidual, 0, 0));
            outcome.token = law_.id(place);
            return outcome;
        }
        outcome.accepted.push_back(next);
        path.push_back(draft.tokens[next]);
        row = 1 + next;
    }
}

// Sun et al. 2025: the longest prefix that passes, not the first failure.
Outcome Sampler::block_test(const TargetRows& rows, const DraftArrays& draft) {
    const int n = int(draft.tokens.size());
    std::vector<int32_t> path;
    int num_accepted = 0;
    double rho = 1.0, rho_accepted = 1.0;
    for (int i = 0; i < n; ++i) {
        const int token = draft.tokens[i];
        process(row_of(rows, i), path);
        const DraftLaw q = draft_law(draft, i);
        if (i > 0) {  // does the prefix of i tokens pass?
            const double mass = sum_of(excess_sums(rho / law_.sum, &q)), all = mass + 1.0 - rho;
            if (uniform(kAccept, i - 1, i - 1) < (all > 0 ? mass / all : 1.0)) {
                num_accepted = i;
                rho_accepted = rho;
            }
        }
        const int place = law_.find(token);
        const double p = place < 0 ? 0.0 : law_.p[place] / law_.sum, drafted = q(token);
        if (p == 0) rho = 0;
        else if (rho > 0) rho = drafted > 0 ? std::min(1.0, rho * (p / drafted)) : 1.0;
        path.push_back(token);
    }
    if (uniform(kAccept, n - 1, n - 1) < rho) num_accepted = n;

    Outcome outcome{{}, 0};
    for (int i = 0; i < num_accepted; ++i) outcome.accepted.push_back(i);
    path.resize(num_accepted);
    process(row_of(rows, num_accepted), path);
    const double u = uniform(kResidual, 0, 0), p_scale = rho_accepted / law_.sum;
    int place = -1;
    if (num_accepted < n) {
        const DraftLaw q = draft_law(draft, num_accepted);
        auto weight = [&](int i) { return positive(p_scale * law_.p[i] - q(law_.id(i))); };
        place = find_place(law_.size(), excess_sums(p_scale, &q), weight, u);
    }
    if (place < 0) place = find_place(law_.size(), excess_sums(1.0, nullptr), [&](int i) { return double(law_.p[i]); }, u);
    outcome.token = law_.id(place);
    return outcome;
}

}  // namespace foredraft
