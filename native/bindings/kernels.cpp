#include "bindings/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "formats/packed.h"
#include "kernels/select.h"
#include "kernels/timing.h"

namespace nb = nanobind;

namespace foredraft {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;
using Floats = nb::ndarray<nb::numpy, float, nb::ndim<1>, nb::c_contig>;

struct NamedFormat {
    const char* name;
    Format format;
};
constexpr NamedFormat kFormats[] = {{"F32", Format::F32}, {"F16", Format::F16}, {"BF16", Format::BF16}, {"Q4S", Format::Q4S},
                                    {"Q4A", Format::Q4A}, {"Q5S", Format::Q5S}, {"Q5A", Format::Q5A},   {"Q8S", Format::Q8S},
                                    {"Q4K", Format::Q4K}, {"Q5K", Format::Q5K}, {"Q6K", Format::Q6K}};

const char* format_name(Format format) {
    for (const auto& known : kFormats)
        if (format == known.format) return known.name;
    throw std::invalid_argument("unknown packed format");
}

void require_bytes(const char* what, size_t have, size_t need) {
    if (have < need)
        throw std::invalid_argument(std::string(what) + " has " + std::to_string(have) + " bytes, " + std::to_string(need) + " are needed");
}

template <class Array>
Array owned(float* data, std::initializer_list<size_t> shape) {
    return Array(data, shape, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
}

void pack_blocks(const std::string& format, int type, int n, int k, const Bytes& src, const WritableBytes& dst, int begin, int end) {
    const Format to = format_by_name(format);
    const GgmlType from = GgmlType(type);
    require_bytes("dst", dst.size(), packed_bytes(to, n, k));
    require_bytes("src", src.size(), size_t(n) * stored_bytes(from, size_t(k)));
    const int blocks = (n + kChannels - 1) / kChannels;
    if (end < 0) end = blocks;
    if (begin < 0 || begin > end || end > blocks) throw std::invalid_argument("blocks out of range");
    nb::gil_scoped_release release;
    pack(to, from, n, k, src.data(), dst.data(), begin, end);
}

Floats dequantize_bytes(int type, const Bytes& src) {
    const GgmlType from = GgmlType(type);
    const PieceShape shape = piece_shape(from);
    if (src.size() % size_t(shape.bytes)) throw std::invalid_argument("src is no whole number of the type's pieces");
    const size_t count = src.size() / size_t(shape.bytes) * size_t(shape.elements);
    float* out = new float[count];
    Floats result = owned<Floats>(out, {count});
    nb::gil_scoped_release release;
    dequantize(from, src.data(), count, out);
    return result;
}

FloatRows matmul_rows(const std::string& set_name, const std::string& format, int n, int k, const Bytes& packed, const Rows& x) {
    const KernelSet& set = select_kernels(set_name.c_str());
    const Format from = format_by_name(format);
    require_bytes("packed", packed.size(), packed_bytes(from, n, k));
    if (x.shape(1) != size_t(k)) throw std::invalid_argument("x has rows of " + std::to_string(x.shape(1)) + ", k is " + std::to_string(k));
    const size_t rows = x.shape(0), groups = size_t(k) / kGroup;
    const PackedMatrix w{from, n, k, packed.data(), packed_block_bytes(from, k)};
    const size_t padded = size_t(w.num_blocks()) * kChannels;
    float* out = new float[rows * size_t(n)];
    FloatRows result = owned<FloatRows>(out, {rows, size_t(n)});
    nb::gil_scoped_release release;
    std::vector<int8_t> codes(groups * rows * kGroup);
    std::vector<float> scales(2 * groups * rows), sums(groups * rows), y(rows * padded);
    std::vector<int32_t> code_sums(2 * groups * rows);
    const ActivationRows activations{int(rows),     k,           x.data(),         codes.data(),
                                     scales.data(), sums.data(), code_sums.data(), from < Format::Q4K};
    if (from != Format::F32 && from != Format::F16 && from != Format::BF16) set.quantize_rows(activations, 0, int(rows));
    set.matmul(w, activations, y.data(), padded, 0, w.num_blocks());
    for (size_t r = 0; r < rows; ++r) std::copy_n(&y[r * padded], n, out + r * size_t(n));
    return result;
}

std::vector<std::string> kernel_sets() {
    std::vector<std::string> names;
    for (const KernelSet* set : runnable_kernel_sets()) names.emplace_back(set->name);
    return names;
}

std::vector<double> time_matmul_by_name(const std::string& set_name, const std::string& format, int n, int k, int rows, int threads,
                                        int copies, int repeats) {
    if (rows < 1 || threads < 1 || copies < 1) throw std::invalid_argument("rows, threads and copies must be at least 1");
    const KernelSet& set = select_kernels(set_name.c_str());
    const Format from = format_by_name(format);
    nb::gil_scoped_release release;
    return time_matmul(set, from, n, k, rows, threads, copies, repeats);
}

std::vector<double> time_reading_checked(size_t bytes, int threads, int repeats) {
    if (bytes < 1 || threads < 1) throw std::invalid_argument("bytes and threads must be at least 1");
    nb::gil_scoped_release release;
    return time_reading(bytes, threads, repeats);
}

}  // namespace

Format format_by_name(const std::string& name) {
    for (const auto& known : kFormats)
        if (name == known.name) return known.format;
    throw std::invalid_argument("unknown packed format '" + name + "'");
}

void bind_kernels(nb::module_& m) {
    m.def("kernel_sets", kernel_sets);
    m.def("packed_format", [](int type) { return format_name(packed_format(GgmlType(type))); }, nb::arg("ggml_type"));
    m.def(
        "packed_bytes", [](const std::string& format, int n, int k) { return packed_bytes(format_by_name(format), n, k); },
        nb::arg("format"), nb::arg("n"), nb::arg("k"));
    m.def("pack", pack_blocks, nb::arg("format"), nb::arg("ggml_type"), nb::arg("n"), nb::arg("k"), nb::arg("src"),
          nb::arg("dst").noconvert(), nb::arg("block_begin") = 0, nb::arg("block_end") = -1);
    m.def("dequantize", dequantize_bytes, nb::arg("ggml_type"), nb::arg("src"));
    m.def("matmul", matmul_rows, nb::arg("set_name"), nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("packed"), nb::arg("x"));
    m.def("time_matmul", time_matmul_by_name, nb::arg("set_name"), nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("rows"),
          nb::arg("threads"), nb::arg("copies"), nb::arg("repeats"));
    m.def("time_reading", time_reading_checked, nb::arg("bytes"), nb::arg("threads"), nb::arg("repeats"));
}

}  // namespace foredraft
