#include "kernels/timing.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "formats/packed.h"

namespace foredraft {
namespace {

// 64-aligned storage.
class Bytes {
  public:
    explicit Bytes(size_t size) : storage_(new uint8_t[size + 63]) {
        data_ = storage_.get() + (64 - reinterpret_cast<uintptr_t>(storage_.get()) % 64) % 64;
    }
    uint8_t* data() const { return data_; }

  private:
    std::unique_ptr<uint8_t[]> storage_;
    uint8_t* data_;
};

template <class Work>
std::vector<double> time_threads(int threads, int repeats, Work work) {
    std::vector<double> seconds;
    for (int r = 0; r < repeats; ++r) {
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::thread> team;
        for (int t = 1; t < threads; ++t) team.emplace_back(work, t);
        work(0);
        for (auto& thread : team) thread.join();
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return seconds;
}

}  // namespace

std::vector<double> time_matmul(const KernelSet& set, Format format, int n, int k, int rows, int threads, int copies, int repeats) {
    const size_t bytes = packed_bytes(format, n, k), groups = size_t(k) / kGroup + 1;
    const size_t stride = (bytes + 63) / 64 * 64;
    Bytes weights(stride * size_t(copies));
    // Small codes and scales: every half is 0x0f0f, about 4e-4.
    std::memset(weights.data(), 0x0f, stride * size_t(copies));
    const Bytes codes(groups * size_t(rows) * kGroup);
    std::vector<float> values(size_t(rows) * k), scales(2 * groups * size_t(rows)), sums(groups * size_t(rows));
    std::vector<int32_t> code_sums(2 * groups * size_t(rows));
    for (size_t i = 0; i < values.size(); ++i) values[i] = float(int(i * 37 % 255) - 127);
    const ActivationRows x{rows,          k,           values.data(),    reinterpret_cast<int8_t*>(codes.data()),
                           scales.data(), sums.data(), code_sums.data(), format < Format::Q4K};
    set.quantize_rows(x, 0, rows);
    const int blocks = (n + kChannels - 1) / kChannels;
    const size_t ldy = size_t(blocks) * kChannels;
    std::vector<float> y(ldy * size_t(rows));
    auto seconds = time_threads(threads, repeats, [&](int t) {
        for (int c = 0; c < copies; ++c) {
            const PackedMatrix w{format, n, k, weights.data() + size_t(c) * stride, packed_block_bytes(format, k)};
            set.matmul(w, x, y.data(), ldy, blocks * t / threads, blocks * (t + 1) / threads);
        }
    });
    for (double& s : seconds) s /= copies;
    return seconds;
}

std::vector<double> time_reading(size_t bytes, int threads, int repeats) {
    const Bytes buffer(bytes);
    std::memset(buffer.data(), 1, bytes);
    std::vector<uint64_t> totals(size_t(threads) * 8);
    auto rates = time_threads(threads, repeats, [&](int t) {
        const size_t share = bytes / size_t(threads) / 256 * 256;
        const uint8_t* p = buffer.data() + size_t(t) * share;
        uint64_t total[32] = {};
        for (size_t i = 0; i < share; i += 256) {
            for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + i + 8192 + line, 0, 3);
            uint64_t word[32];
            std::memcpy(word, p + i, 256);
            for (int j = 0; j < 32; ++j) total[j] += word[j];
        }
        for (const uint64_t sum : total) totals[size_t(t) * 8] += sum;
    });
    for (double& s : rates) s = double(bytes) / s;
    return rates;
}

}  // namespace foredraft
