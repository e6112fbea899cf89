// SentencePiece's BPE merges whichever neighbours make the token with the best score. As a list of merges, which
// byte-pair encoders want, that is every way to put a token together from two, best score first.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace foredraft {

struct Merge {
    uint32_t left, right;  // ids
};

// texts: distinct UTF-8 [n]; scores [n]. Of equal scores the lower id comes first, then the shorter left part.
std::vector<Merge> sentencepiece_merges(const std::vector<std::string_view>& texts, const std::vector<float>& scores);

}  // namespace foredraft
