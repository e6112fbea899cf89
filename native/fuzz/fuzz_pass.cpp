// Passes with arbitrary numbers for starts, rows, tables, parents and tokens: refused or computed, never out of bounds.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.h"

namespace {

using namespace foredraft;

constexpr int kHidden = 32, kHeads = 2, kHeadDim = 16, kVocab = 20, kLayers = 2, kBlocks = 3;

// A decoder whose weights are all the same small number.
struct Tiny {
    ThreadPool pool{2};
    std::vector<float> weights = std::vector<float>(kHidden * kHidden, 0.1f);
    Decoder decoder;

    explicit Tiny(const char* kernels)
        : decoder({.num_layers = kLayers,
                   .hidden_size = kHidden,
                   .num_heads = kHeads,
                   .num_kv_heads = 1,
                   .head_dim = kHeadDim,
                   .ffn_size = kHidden,
                   .vocab_size = kVocab,
                   .norm_eps = 1e-5f,
                   .attention_scale = 0.25f,
                   .rope_tables = {RopeTable(std::vector<double>(kHeadDim / 2, 0.5), 1.0)},
                   .layer_rope = {0, 0},
                   .layer_window = {0, 7},
                   .rope_interleaved = false,
                   .activation = Activation::Silu,
                   .attention_softcap = 0.0f,
                   .logit_softcap = 0.0f,
                   .embedding_scale = 1.0f},
                  pool, select_kernels(kernels)) {
        set("output.weight", kVocab);
        decoder.set_embedding(GgmlType::F32, kVocab, kHidden, bytes(kVocab));
        decoder.set_vector("output_norm.weight", {weights.data(), kHidden});
        for (int i = 0; i < kLayers; ++i) {
            const std::string blk = "blk." + std::to_string(i) + ".";
            for (const char* name : {"attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) set(blk + name + ".weight", kHidden);
            for (const char* name : {"attn_k", "attn_v"}) set(blk + name + ".weight", kHeadDim);
            for (const char* name : {"attn_norm", "ffn_norm"}) decoder.set_vector(blk + name + ".weight", {weights.data(), kHidden});
        }
    }

    std::span<const uint8_t> bytes(int n) const {
        const int channels = (n + kChannels - 1) / kChannels * kChannels;
        return {reinterpret_cast<const uint8_t*>(weights.data()), size_t(n == kVocab ? n : channels) * kHidden * sizeof(float)};
    }
    void set(const std::string& name, int n) {
        decoder.set_weight(name, Format::F32, n, kHidden,
                           {reinterpret_cast<const uint8_t*>(weights.data()), packed_bytes(Format::F32, n, kHidden)});
    }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tiny tinies[] = {Tiny(nullptr), Tiny("portable")};
    if (size < 8) return 0;
    // Most numbers are small, so that passes are often sound; 0x80 introduces any 32-bit number.
    std::vector<int32_t> numbers;
    for (size_t i = 1; i < size; ++i) {
        int32_t n = int8_t(data[i]);
        if (data[i] == 0x80 && size - i > 4) {
            std::memcpy(&n, data + i + 1, 4);
            i += 4;
        }
        numbers.push_back(n);
    }
    size_t at = 0;
    const auto take = [&](size_t n) {
        n = std::min(n, numbers.size() - at);
        const std::span<const int32_t> part(numbers.data() + at, n);
        at += n;
        return part;
    };
    const auto take_counted = [&](size_t factor) {
        const auto count = take(1);
        return take(count.empty() ? 0 : size_t(count[0] & 63) * factor);
    };
    PassInput input{};
    input.sequences = take_counted(4);
    input.block_tables = take_counted(1);
    if (data[0] & 1) input.hidden_layers = take_counted(1);
    input.tokens = take_counted(1);
    if (data[0] & 2) input.parents = take(input.tokens.size());
    Tiny& tiny = tinies[data[0] >> 2 & 1];
    const auto cache = tiny.decoder.make_cache(kBlocks, data[0] & 8);
    for (int pass = 0; pass < 2; ++pass) {
        try {
            tiny.decoder.forward(*cache, input);
        } catch (const std::invalid_argument&) {
        }
    }
    try {
        const auto source = take_counted(1);
        tiny.decoder.move_slots(*cache, input.block_tables, source, take(source.size()));
    } catch (const std::invalid_argument&) {
    }
    return 0;
}
