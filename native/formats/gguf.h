// Reads the header of a GGUF file (ggml's model format, versions 2 and 3, little-endian) and trusts none of it.
//
//   "GGUF" version  tensor count  entry count | entries: key, type, value ... | tensors: name, shape, type, offset ... | pad | data
//
// parse_gguf() is a function over bytes, so that it can be fuzzed. Whatever it returns lies inside those bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace foredraft {

enum class GgufType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };

// A metadata value; `data` points into the file.
struct GgufValue {
    GgufType type;  // never Array: an array is `is_array` with the type of its items
    bool is_array;
    uint64_t count;                         // items; 1 for a scalar
    const uint8_t* data;                    // first item; unused for strings
    std::vector<std::string_view> strings;  // one per item, for strings
};

struct GgufEntry {
    std::string_view key;
    GgufValue value;
};

struct GgufTensor {
    std::string_view name;
    std::string_view type;        // ggml's name: "Q4_K"
    std::vector<uint64_t> shape;  // fastest axis first, as in the file
    uint64_t offset, nbytes;      // from the start of the file
};

struct GgufHeader {
    uint32_t version;
    uint64_t alignment;
    std::vector<GgufEntry> entries;
    std::vector<GgufTensor> tensors;
};

// Not a well-formed file. what() is one line.
struct GgufMalformed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Well-formed, but of a version or with a tensor type that is not read here. what() is one line.
struct GgufUnsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws GgufMalformed or GgufUnsupported. The result points into `data`. Memory used is bounded by `size`, not by counts in the file.
GgufHeader parse_gguf(const uint8_t* data, size_t size);

// A whole file, mapped read-only.
class MappedFile {
  public:
    explicit MappedFile(const std::string& path);  // throws std::system_error
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    void drop_pages(size_t offset, size_t count) const;  // they are read again when touched

  private:
    const uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace foredraft
