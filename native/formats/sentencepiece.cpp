#include "formats/sentencepiece.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace foredraft {

std::vector<Merge> sentencepiece_merges(const std::vector<std::string_view>& texts, const std::vector<float>& scores) {
    std::unordered_map<std::string_view, uint32_t> ids;
    ids.reserve(texts.size());
    for (uint32_t id = 0; id < texts.size(); ++id)
        if (!texts[id].empty()) ids.emplace(texts[id], id);

    std::vector<uint32_t> best_first(texts.size());
    std::iota(best_first.begin(), best_first.end(), 0u);
    // NaN has no place in an order: it counts as the worst score.
    auto rank = [&](uint32_t id) { return scores[id] == scores[id] ? -scores[id] : HUGE_VALF; };
    std::stable_sort(best_first.begin(), best_first.end(), [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });

    std::vector<Merge> merges;
    for (uint32_t id : best_first) {
        std::string_view text = texts[id];
        for (size_t middle = 1; middle < text.size(); ++middle) {
            if ((static_cast<unsigned char>(text[middle]) & 0xc0) == 0x80) continue;  // inside a character
            auto left = ids.find(text.substr(0, middle));
            if (left == ids.end()) continue;
            auto right = ids.find(text.substr(middle));
            if (right != ids.end()) merges.push_back({left->second, right->second});
        }
    }
    return merges;
}

}  // namespace foredraft
