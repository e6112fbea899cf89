// Every kernel of every set that runs here against the portable set, bit for bit (all NaN are one). Prints a digest of all
// results, which must be the same on every processor.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "formats/packed.h"
#include "kernels/select.h"

namespace foredraft {
namespace {

struct Random {
    uint64_t state;
    uint32_t bits() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return uint32_t(state >> 33) ^ uint32_t(state >> 20);
    }
    float uniform() { return float(int32_t(bits())) * 0x1p-31f; }  // [-1, 1]
    std::vector<float> floats(int n, float scale) {
        std::vector<float> x(n);
        for (float& v : x) v = uniform() * uniform() * scale;
        return x;
    }
};

// Results of one kernel, as bits.
class Bits {
  public:
    template <class T>
    void add(const T* values, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            T value = values[i];
            if constexpr (std::is_floating_point_v<T>)
                if (std::isnan(value)) value = std::copysign(T(NAN), T(1));
            const size_t at = bytes_.size();
            bytes_.resize(at + sizeof(T));
            std::memcpy(&bytes_[at], &value, sizeof(T));
        }
    }
    template <class T>
    void add(const std::vector<T>& values) {
        add(values.data(), values.size());
    }
    bool operator==(const Bits&) const = default;
    uint64_t digest(uint64_t h) const {
        for (const uint8_t b : bytes_) h = (h ^ b) * 1099511628211ull;
        return h;
    }

  private:
    std::vector<uint8_t> bytes_;
};

struct Rows {
    std::vector<float> values, scales, sums;
    std::vector<int8_t> codes;
    std::vector<int32_t> code_sums;
    ActivationRows view;

    Rows(int rows, int k, Random& random, bool half_scales) : values(random.floats(rows * k, 3.0f)) {
        const size_t groups = size_t(k / kGroup) * rows;
        scales.resize(2 * groups);
        sums.resize(groups);
        codes.resize(groups * kGroup);
        code_sums.resize(2 * groups);
        values[0] = 250.0f;
        if (rows > 2) values[size_t(2) * k + 1] = NAN;
        view = {rows, k, values.data(), codes.data(), scales.data(), sums.data(), code_sums.data(), half_scales};
    }
};

Bits quantise(const KernelSet& set) {
    Bits bits;
    for (const bool half_scales : {false, true}) {
        Random random{1};
        Rows x(5, 256, random, half_scales);
        set.quantize_rows(x.view, 0, 5);
        bits.add(x.codes);
        bits.add(x.scales);
        bits.add(x.sums);
        bits.add(x.code_sums);
    }
    return bits;
}

Bits multiply(const KernelSet& set, GgmlType type, int rows) {
    const int n = 56, k = 512;
    Random random{uint64_t(type) + 10};
    std::vector<uint8_t> stored(size_t(n) * stored_bytes(type, k));
    if (type == GgmlType::F32) {
        const auto values = random.floats(n * k, 1.0f);
        std::memcpy(stored.data(), values.data(), stored.size());
    } else {
        for (uint8_t& b : stored) b = uint8_t(random.bits());
        // Exponents of halves and bfloats are kept below the largest, and near the middle, so that sums stay finite.
        for (size_t i = 1; i < stored.size(); i += 2) stored[i] &= type == GgmlType::BF16 ? 0xbf : 0xb7;
    }
    const Format format = packed_format(type);
    std::vector<uint8_t> packed(packed_bytes(format, n, k));
    const PackedMatrix w{format, n, k, packed.data(), packed_block_bytes(format, k)};
    pack(format, type, n, k, stored.data(), packed.data(), 0, w.num_blocks());
    Rows x(rows, k, random, packed_format(type) < Format::Q4K);
    set.quantize_rows(x.view, 0, rows);
    std::vector<float> y(size_t(rows) * w.num_blocks() * kChannels);
    set.matmul(w, x.view, y.data(), size_t(w.num_blocks()) * kChannels, 0, w.num_blocks());
    Bits bits;
    bits.add(y);
    return bits;
}

Bits elementwise(const KernelSet& set) {
    Random random{2};
    const int n = 144;
    auto x = random.floats(n, 40.0f), y = random.floats(n, 4.0f), weight = random.floats(n, 2.0f);
    x[3] = NAN;
    x[4] = INFINITY;
    x[5] = -INFINITY;
    x[6] = -0.0f;
    std::vector<float> out(n);
    Bits bits;
    for (const auto& function : {set.silu_mul, set.gelu_tanh_mul, set.add}) {
        function(x.data(), y.data(), n, out.data());
        bits.add(out);
    }
    set.rms_norm(y.data(), weight.data(), 1e-6f, n, out.data());
    bits.add(out);
    for (const bool interleaved : {false, true}) {
        auto head = random.floats(64, 1.0f);
        const auto cos = random.floats(32, 1.0f), sin = random.floats(32, 1.0f);
        set.rope(head.data(), cos.data(), sin.data(), 64, interleaved);
        bits.add(head);
    }
    set.softcap(y.data(), n, 3.0f);
    bits.add(y);
    return bits;
}

Bits vocabulary(const KernelSet& set) {
    Random random{3};
    const int n = 5003;
    auto x = random.floats(n, 30.0f);
    x[100] = x[4000] = 40.0f;
    std::vector<float> p(n), q = random.floats(n, 1.0f);
    Bits bits;
    const int32_t best = set.argmax(x.data(), n);
    const float top = set.max_value(x.data(), n);
    const double sum = set.exp_sum(x.data(), top, 1.25f, n, p.data());
    bits.add(&best, 1);
    bits.add(&top, 1);
    bits.add(&sum, 1);
    bits.add(p);
    std::vector<int32_t> ids(n);
    const int32_t count = set.gather(x.data(), n, 10.0f, ids.data());
    bits.add(ids.data(), size_t(count));
    std::vector<double> sums((n + kSumChunk - 1) / kSumChunk);
    set.excess_sums(p.data(), 0.5, q.data(), 0.25, n, sums.data());
    bits.add(sums);
    for (uint32_t i = 0; i < 20; ++i) {
        const int32_t drawn = set.race(p.data(), n, NoiseKey{{i, 1, 2}, {3, 4}});
        bits.add(&drawn, 1);
    }
    return bits;
}

// Five rows, a small tree after 70 cached positions, three physical blocks in another order.
Bits attend(const KernelSet& set, bool half, float softcap) {
    const int rows = 5, group = 3, head_dim = 64, start = 70;
    Random random{4};
    const size_t block_bytes = size_t(kSlots) * head_dim * (half ? 2 : 4);
    std::vector<uint8_t> keys(3 * block_bytes), values(3 * block_bytes);
    const int32_t table[] = {2, 0, 1};
    for (int slot = 0; slot < start + rows; ++slot) {
        const auto key = random.floats(head_dim, 2.0f), value = random.floats(head_dim, 2.0f);
        const size_t at = size_t(table[slot / kSlots]) * block_bytes;
        set.store_kv(key.data(), value.data(), head_dim, half, slot % kSlots, &keys[at], &values[at]);
    }
    const auto q = random.floats(rows * group * head_dim, 2.0f);
    const int32_t positions[] = {70, 71, 71, 72, 72}, first[] = {0, 0, 30, 0, 40};
    const int32_t path[] = {70, 0, 0, 70, 71, 0, 70, 72, 0, 70, 71, 73, 70, 72, 74};
    std::vector<float> out(q.size()), scratch(attention_scratch_floats(rows, group, head_dim, start + rows));
    AttentionTask task{};
    task.rows = rows;
    task.group = group;
    task.head_dim = head_dim;
    task.q = q.data();
    task.q_stride = task.out_stride = size_t(group) * head_dim;
    task.positions = positions;
    task.first = first;
    task.start = start;
    task.path = path;
    task.path_stride = 3;
    task.block_table = table;
    task.keys = keys.data();
    task.values = values.data();
    task.block_stride = block_bytes;
    task.half = half;
    task.scale = 0.125f;
    task.softcap = softcap;
    task.out = out.data();
    task.scratch = scratch.data();
    set.attention(task);
    Bits bits;
    bits.add(keys);
    bits.add(out);
    return bits;
}

struct Case {
    std::string name;
    std::function<Bits(const KernelSet&)> run;
};

std::vector<Case> cases() {
    std::vector<Case> all = {
        {"quantize_rows", quantise},
        {"elementwise", elementwise},
        {"vocabulary", vocabulary},
        {"attention f16", [](const KernelSet& set) { return attend(set, true, 0.0f); }},
        {"attention f32 softcap", [](const KernelSet& set) { return attend(set, false, 20.0f); }},
    };
    for (const GgmlType type : {GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q4_K,
                                GgmlType::Q5_0, GgmlType::Q5_1, GgmlType::Q5_K, GgmlType::Q6_K, GgmlType::Q8_0})
        for (const int rows : {1, 2, 7, 66}) {
            std::string name = "matmul type ";
            name.append(std::to_string(int(type))).append(" rows ").append(std::to_string(rows));
            all.push_back({name, [=](const KernelSet& set) { return multiply(set, type, rows); }});
        }
    return all;
}

int run() {
    const KernelSet& portable = select_kernels("portable");
    uint64_t digest = 14695981039346656037ull;
    int failures = 0;
    for (const Case& c : cases()) {
        const Bits want = c.run(portable);
        digest = want.digest(digest);
        for (const KernelSet* set : runnable_kernel_sets()) {
            if (c.run(*set) == want) continue;
            std::printf("%s: %s differs from portable\n", c.name.c_str(), set->name);
            ++failures;
        }
    }
    std::printf("sets:");
    for (const KernelSet* set : runnable_kernel_sets()) std::printf(" %s", set->name);
    std::printf("\ndigest: %016llx\n", (unsigned long long)digest);
    return failures ? 1 : 0;
}

}  // namespace
}  // namespace foredraft

int main() { return foredraft::run(); }
