// Fuzzes the GGUF header and tensor table.
//
//   clang++ -fsanitize=fuzzer,address,undefined ...                libFuzzer drives LLVMFuzzerTestOneInput
//   g++ -DFOREDRAFT_FUZZ_MAIN -fsanitize=address,undefined ...     fuzz_gguf SECONDS [SEED]: the loop below does
//
// Both keep to one property: whatever parse_gguf accepts lies inside the bytes it was given.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "formats/gguf.h"

namespace {

using foredraft::GgufHeader;
using foredraft::GgufType;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "fuzz_gguf: %s\n", what);
    std::abort();
}

bool inside(const void* begin, size_t count, const uint8_t* data, size_t size) {
    const uint8_t* p = static_cast<const uint8_t*>(begin);
    return p >= data && p <= data + size && count <= static_cast<size_t>(data + size - p);
}

void check(const GgufHeader& header, const uint8_t* data, size_t size) {
    for (const auto& entry : header.entries) {
        require(inside(entry.key.data(), entry.key.size(), data, size), "a key lies outside the file");
        if (entry.value.type == GgufType::String) {
            require(entry.value.strings.size() == entry.value.count, "a string is missing");
            for (auto text : entry.value.strings) require(inside(text.data(), text.size(), data, size), "a string lies outside the file");
        } else {
            require(inside(entry.value.data, entry.value.count, data, size), "a value lies outside the file");
        }
    }
    for (const auto& tensor : header.tensors) {
        require(tensor.nbytes > 0, "a tensor is empty");
        require(tensor.offset <= size && tensor.nbytes <= size - tensor.offset, "a tensor lies outside the file");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        check(foredraft::parse_gguf(data, size), data, size);
    } catch (const foredraft::GgufMalformed& error) {
        require(std::strchr(error.what(), '\n') == nullptr, "a reason has two lines");
    } catch (const foredraft::GgufUnsupported& error) {
        require(std::strchr(error.what(), '\n') == nullptr, "a reason has two lines");
    }
    return 0;
}

namespace {

class Writer {
  public:
    template <class T>
    Writer& number(T value) {
        const uint8_t* p = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), p, p + sizeof(T));
        return *this;
    }
    Writer& string(const std::string& text) {
        number<uint64_t>(text.size());
        bytes.insert(bytes.end(), text.begin(), text.end());
        return *this;
    }
    std::vector<uint8_t> bytes;
};

// A sound file with several kinds of value and two tensors, to start from.
std::vector<uint8_t> sound_file() {
    Writer w;
    w.bytes = {'G', 'G', 'U', 'F'};
    w.number<uint32_t>(3).number<uint64_t>(2).number<uint64_t>(5);
    w.string("general.architecture").number<uint32_t>(8).string("llama");
    w.string("general.alignment").number<uint32_t>(4).number<uint32_t>(32);
    w.string("tokens").number<uint32_t>(9).number<uint32_t>(8).number<uint64_t>(3).string("a").string("").string("\xff");
    w.string("scores").number<uint32_t>(9).number<uint32_t>(6).number<uint64_t>(2).number<float>(1).number<float>(2);
    w.string("flag").number<uint32_t>(7).number<uint8_t>(1);
    w.string("a.weight").number<uint32_t>(2).number<uint64_t>(32).number<uint64_t>(2).number<uint32_t>(2).number<uint64_t>(0);
    w.string("b.weight").number<uint32_t>(1).number<uint64_t>(4).number<uint32_t>(0).number<uint64_t>(64);
    w.bytes.resize((w.bytes.size() + 31) / 32 * 32 + 64 + 16);
    return w.bytes;
}

// A few edits of the kinds that header parsers fall over: bits, counts at the edges of their types, cuts, repeats.
void mutate(std::vector<uint8_t>& bytes, std::mt19937_64& random) {
    constexpr uint64_t kEdges[] = {0, 1, 2, 8, 9, 31, 255, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 61, 1ull << 63, ~0ull};
    for (uint64_t edits = 1 + random() % 4; edits > 0 && !bytes.empty(); --edits) {
        size_t at = random() % bytes.size();
        switch (random() % 5) {
            case 0:
                bytes[at] ^= static_cast<uint8_t>(1u << random() % 8);
                break;
            case 1:
                bytes[at] = static_cast<uint8_t>(random());
                break;
            case 2: {
                uint64_t edge = kEdges[random() % std::size(kEdges)];
                std::memcpy(bytes.data() + at, &edge, std::min(sizeof(edge) >> random() % 2, bytes.size() - at));
                break;
            }
            case 3:
                bytes.resize(at);
                break;
            default: {
                size_t end = std::min<size_t>(bytes.size(), at + 1 + random() % 64);
                std::vector<uint8_t> piece(&bytes[at], &bytes[at] + (end - at));
                bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size()), piece.begin(), piece.end());
            }
        }
    }
}

}  // namespace

#ifdef FOREDRAFT_FUZZ_MAIN
int main(int argc, char** argv) {
    double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    const std::vector<uint8_t> sound = sound_file();
    foredraft::parse_gguf(sound.data(), sound.size());  // throws if the starting point is no good

    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    unsigned long long runs = 0;
    for (; std::chrono::steady_clock::now() < end; ++runs) {
        std::vector<uint8_t> bytes = sound;
        mutate(bytes, random);
        bytes.shrink_to_fit();  // so that a read past the end is a read past the allocation
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("fuzz_gguf: %llu runs\n", runs);
}
#else
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Without a sound file to start from now and then, most inputs would die at the magic number.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
    std::mt19937_64 random(seed);
    if (random() % 2 != 0) return LLVMFuzzerMutate(data, size, max_size);
    std::vector<uint8_t> bytes = random() % 8 == 0 ? sound_file() : std::vector<uint8_t>(data, data + size);
    mutate(bytes, random);
    size = std::min(bytes.size(), max_size);
    std::copy_n(bytes.begin(), size, data);
    return size;
}
#endif
