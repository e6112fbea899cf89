#include "formats/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <system_error>

namespace foredraft {
namespace {

constexpr uint64_t kMaxEntries = 1 << 16;
constexpr uint64_t kMaxTensors = 1 << 20;
constexpr uint64_t kMaxItems = 1 << 26;  // of one array; the largest vocabularies have 2^18
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint32_t kMaxDims = 4;

struct TensorType {
    std::string_view name;    // empty: no such type
    uint32_t values, nbytes;  // of one block; nbytes 0: exists, not read here
};

// ggml's numbering; the gaps are types that ggml removed.
constexpr TensorType kTensorTypes[] = {
    {"F32", 1, 4},
    {"F16", 1, 2},
    {"Q4_0", 32, 18},
    {"Q4_1", 32, 20},
    {},
    {},
    {"Q5_0", 32, 22},
    {"Q5_1", 32, 24},
    {"Q8_0", 32, 34},
    {"Q8_1", 32, 0},
    {"Q2_K", 256, 0},
    {"Q3_K", 256, 0},
    {"Q4_K", 256, 144},
    {"Q5_K", 256, 176},
    {"Q6_K", 256, 210},
    {"Q8_K", 256, 0},
    {"IQ2_XXS", 256, 0},
    {"IQ2_XS", 256, 0},
    {"IQ3_XXS", 256, 0},
    {"IQ1_S", 256, 0},
    {"IQ4_NL", 32, 0},
    {"IQ3_S", 256, 0},
    {"IQ2_S", 256, 0},
    {"IQ4_XS", 256, 0},
    {"I8", 1, 0},
    {"I16", 1, 0},
    {"I32", 1, 0},
    {"I64", 1, 0},
    {"F64", 1, 0},
    {"IQ1_M", 256, 0},
    {"BF16", 1, 2},
    {},
    {},
    {},
    {"TQ1_0", 256, 0},
    {"TQ2_0", 256, 0},
    {},
    {},
    {},
    {"MXFP4", 32, 0},
};
constexpr size_t kNumTensorTypes = sizeof(kTensorTypes) / sizeof(kTensorTypes[0]);

constexpr size_t kTypeBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // by GgufType

// Names in messages come from the file: what could break a line or a terminal is shown as '?'.
std::string shown(std::string_view text) {
    std::string out(text.substr(0, 64));
    for (char& c : out)
        if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
    if (text.size() > 64) out.append("...");
    return out;
}

std::string shown(uint64_t number) { return std::to_string(number); }

using Parts = std::initializer_list<std::string_view>;

std::string joined(Parts parts) {
    std::string out;
    for (std::string_view part : parts) out.append(part);
    return out;
}

[[noreturn]] void malformed(Parts reason) { throw GgufMalformed(joined(reason)); }

// Every read is checked against what is left.
class Cursor {
  public:
    Cursor(const uint8_t* data, size_t size) : data_(data), size_(size) {}
    size_t position() const { return at_; }
    size_t left() const { return size_ - at_; }

    const uint8_t* take(uint64_t count, const char* what) {
        if (count > left()) malformed({"the file ends inside ", what});
        const uint8_t* p = data_ + at_;
        at_ += count;
        return p;
    }

    template <class T>
    T number(const char* what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what), sizeof(T));
        return value;
    }

    std::string_view string(uint64_t limit, const char* what) {
        uint64_t count = number<uint64_t>(what);
        if (count > limit) malformed({what, " claims ", shown(count), " bytes"});
        return {reinterpret_cast<const char*>(take(count, what)), static_cast<size_t>(count)};
    }

  private:
    const uint8_t* data_;
    size_t size_, at_ = 0;
};

GgufType read_type(Cursor& in, std::string_view key) {
    uint32_t type = in.number<uint32_t>("a value's type");
    if (type > static_cast<uint32_t>(GgufType::F64)) malformed({"'", shown(key), "' has the unknown value type ", shown(type)});
    return static_cast<GgufType>(type);
}

GgufValue read_value(Cursor& in, std::string_view key) {
    GgufValue value{read_type(in, key), false, 1, nullptr, {}};
    if (value.type == GgufType::Array) {
        value.is_array = true;
        value.type = read_type(in, key);
        if (value.type == GgufType::Array) malformed({"'", shown(key), "' is an array of arrays"});
        value.count = in.number<uint64_t>("an array's length");
        // A string takes at least its 8 bytes of length, so the count bounds what may be reserved.
        size_t item = value.type == GgufType::String ? sizeof(uint64_t) : kTypeBytes[static_cast<uint32_t>(value.type)];
        if (value.count > kMaxItems || value.count > in.left() / item)
            malformed({"'", shown(key), "' claims ", shown(value.count), " items, more than the file holds"});
    }
    if (value.type == GgufType::String) {
        value.strings.reserve(value.count);
        for (uint64_t i = 0; i < value.count; ++i) value.strings.push_back(in.string(in.left(), "a string"));
    } else {
        value.data = in.take(value.count * kTypeBytes[static_cast<uint32_t>(value.type)], "a value");
    }
    return value;
}

GgufTensor read_tensor(Cursor& in) {
    GgufTensor tensor;
    tensor.name = in.string(kMaxKeyBytes, "a tensor's name");
    auto fail = [&](std::string_view reason, const std::string& number = "") {
        malformed({"tensor '", shown(tensor.name), "' ", reason, number});
    };

    uint32_t num_dims = in.number<uint32_t>("a tensor's shape");
    if (num_dims < 1 || num_dims > kMaxDims) fail("has an impossible number of dimensions: ", shown(num_dims));
    uint64_t values = 1;
    for (uint32_t i = 0; i < num_dims; ++i) {
        uint64_t n = in.number<uint64_t>("a tensor's shape");
        if (n == 0 || n > INT32_MAX || __builtin_mul_overflow(values, n, &values)) fail("has an impossible shape");
        tensor.shape.push_back(n);
    }

    uint32_t code = in.number<uint32_t>("a tensor's type");
    if (code >= kNumTensorTypes || kTensorTypes[code].name.empty()) fail("has the unknown type ", shown(code));
    const TensorType& type = kTensorTypes[code];
    tensor.type = type.name;
    tensor.offset = in.number<uint64_t>("a tensor's offset");
    if (type.nbytes == 0)
        throw GgufUnsupported(
            joined({"tensor '", shown(tensor.name), "' is ", type.name,
                    ", which is not read here; take a file quantised to Q4_K_M, Q5_K_M, Q6_K, Q8_0, Q4_0, Q4_1, F16 or BF16"}));
    if (tensor.shape[0] % type.values != 0) fail("has rows that are no multiple of ", shown(type.values));
    if (__builtin_mul_overflow(values / type.values, static_cast<uint64_t>(type.nbytes), &tensor.nbytes)) fail("has an impossible shape");
    return tensor;
}

void refuse_duplicates(std::vector<std::string_view> names, const char* what) {
    std::sort(names.begin(), names.end());
    auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) malformed({what, " '", shown(*twice), "' occurs twice"});
}

uint64_t read_alignment(const std::vector<GgufEntry>& entries) {
    for (const GgufEntry& entry : entries) {
        if (entry.key != "general.alignment") continue;
        uint32_t alignment = 0;
        if (entry.value.type == GgufType::U32 && !entry.value.is_array) std::memcpy(&alignment, entry.value.data, sizeof(alignment));
        if (alignment < 8 || alignment > 1 << 20 || (alignment & (alignment - 1)) != 0)
            malformed({"'general.alignment' is no power of two from 8 on"});
        return alignment;
    }
    return 32;
}

// Offsets in the file count from the start of the data; they must be aligned, inside the file and apart from each other.
void place_tensors(GgufHeader& header, uint64_t header_end, uint64_t size) {
    uint64_t data_start = (header_end + header.alignment - 1) / header.alignment * header.alignment;
    uint64_t data_size = size > data_start ? size - data_start : 0;
    for (GgufTensor& tensor : header.tensors) {
        if (tensor.offset % header.alignment != 0) malformed({"tensor '", shown(tensor.name), "' lies at an unaligned offset"});
        if (tensor.offset > data_size || tensor.nbytes > data_size - tensor.offset)
            malformed({"tensor '", shown(tensor.name), "' reaches past the end of the file: it is truncated or was not fully downloaded"});
        tensor.offset += data_start;
    }
    std::vector<const GgufTensor*> by_offset;
    for (const GgufTensor& tensor : header.tensors) by_offset.push_back(&tensor);
    std::sort(by_offset.begin(), by_offset.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
    for (size_t i = 1; i < by_offset.size(); ++i)
        if (by_offset[i]->offset - by_offset[i - 1]->offset < by_offset[i - 1]->nbytes)
            malformed({"tensors '", shown(by_offset[i - 1]->name), "' and '", shown(by_offset[i]->name), "' overlap"});
}

uint32_t read_version(Cursor& in) {
    if (std::memcmp(in.take(4, "the magic number"), "GGUF", 4) != 0) malformed({"it does not begin with 'GGUF'"});
    uint32_t version = in.number<uint32_t>("the version");
    if (version != 0 && version % (1u << 24) == 0) throw GgufUnsupported("it is a big-endian GGUF file; convert it to little-endian");
    if (version < 2 || version > 3) throw GgufUnsupported(joined({"it is GGUF version ", shown(version), "; versions 2 and 3 are read"}));
    return version;
}

}  // namespace

GgufHeader parse_gguf(const uint8_t* data, size_t size) {
    Cursor in(data, size);
    GgufHeader header;
    header.version = read_version(in);
    uint64_t num_tensors = in.number<uint64_t>("the tensor count");
    uint64_t num_entries = in.number<uint64_t>("the entry count");
    if (num_tensors > kMaxTensors) malformed({"it claims ", shown(num_tensors), " tensors"});
    if (num_entries > kMaxEntries) malformed({"it claims ", shown(num_entries), " metadata entries"});

    std::vector<std::string_view> names;
    for (uint64_t i = 0; i < num_entries; ++i) {
        std::string_view key = in.string(kMaxKeyBytes, "a metadata key");
        header.entries.push_back({key, read_value(in, key)});
        names.push_back(key);
    }
    refuse_duplicates(std::move(names), "the metadata key");
    header.alignment = read_alignment(header.entries);

    names.clear();
    for (uint64_t i = 0; i < num_tensors; ++i) {
        header.tensors.push_back(read_tensor(in));
        names.push_back(header.tensors.back().name);
    }
    refuse_duplicates(std::move(names), "the tensor");
    place_tensors(header, in.position(), size);
    return header;
}

MappedFile::MappedFile(const std::string& path) {
    auto fail = [](int fd, int code) {
        if (fd >= 0) ::close(fd);
        throw std::system_error(code, std::generic_category());
    };
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: a fifo must not hang
    if (fd < 0) fail(fd, errno);
    struct stat info;
    if (::fstat(fd, &info) != 0) fail(fd, errno);
    if (S_ISDIR(info.st_mode)) fail(fd, EISDIR);
    if (!S_ISREG(info.st_mode)) fail(fd, EINVAL);
    size_ = static_cast<size_t>(info.st_size);
    if (size_ > 0) {
        void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
        if (mapped == MAP_FAILED) fail(fd, errno);
        data_ = static_cast<const uint8_t*>(mapped);
    }
    ::close(fd);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::drop_pages(size_t offset, size_t count) const {
    if (offset > size_ || count > size_ - offset) throw std::out_of_range("the range is outside the file");
    size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    size_t begin = (offset + page - 1) / page * page, end = (offset + count) / page * page;
    if (end > begin) ::madvise(const_cast<uint8_t*>(data_) + begin, end - begin, MADV_DONTNEED);
}

}  // namespace foredraft
