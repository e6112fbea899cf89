#include "bindings/bindings.h"

#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "formats/gguf.h"
#include "formats/sentencepiece.h"

namespace nb = nanobind;

namespace foredraft {
namespace {

class GgufFile {
  public:
    explicit GgufFile(const std::string& path) : file(path), header(parse_gguf(file.data(), file.size())) {}
    MappedFile file;
    GgufHeader header;
};

// Bytes that are no UTF-8 survive as lone surrogates (PEP 383).
nb::object make_text(std::string_view text) {
    PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
}

template <class T>
nb::object make_number(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return nb::cast(value);
}

nb::object make_item(const GgufValue& value, uint64_t i) {
    switch (value.type) {
        case GgufType::U8:
            return make_number<uint8_t>(value.data + i);
        case GgufType::I8:
            return make_number<int8_t>(value.data + i);
        case GgufType::U16:
            return make_number<uint16_t>(value.data + 2 * i);
        case GgufType::I16:
            return make_number<int16_t>(value.data + 2 * i);
        case GgufType::U32:
            return make_number<uint32_t>(value.data + 4 * i);
        case GgufType::I32:
            return make_number<int32_t>(value.data + 4 * i);
        case GgufType::F32:
            return make_number<float>(value.data + 4 * i);
        case GgufType::Bool:
            return nb::bool_(value.data[i] != 0);
        case GgufType::U64:
            return make_number<uint64_t>(value.data + 8 * i);
        case GgufType::I64:
            return make_number<int64_t>(value.data + 8 * i);
        case GgufType::F64:
            return make_number<double>(value.data + 8 * i);
        default:
            return make_text(value.strings[i]);
    }
}

nb::object make_value(const GgufValue& value) {
    if (!value.is_array) return make_item(value, 0);
    nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(value.count)));
    if (!list.is_valid()) throw nb::python_error();
    for (uint64_t i = 0; i < value.count; ++i) PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), make_item(value, i).release().ptr());
    return list;
}

nb::list make_tensors(const GgufHeader& header) {
    nb::list tensors;
    for (const GgufTensor& tensor : header.tensors) {
        nb::list shape;
        for (uint64_t n : tensor.shape) shape.append(n);
        tensors.append(nb::make_tuple(make_text(tensor.name), nb::str(tensor.type.data(), tensor.type.size()), nb::tuple(shape),
                                      tensor.offset, tensor.nbytes));
    }
    return tensors;
}

// [(left, right)] of the very strings that were given; those that are no UTF-8 take no part.
nb::list make_merges(const nb::list& tokens, const std::vector<float>& scores) {
    if (scores.size() != tokens.size()) throw std::invalid_argument("tokens and scores differ in number");
    std::vector<std::string_view> texts;
    for (nb::handle token : tokens) {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(token.ptr(), &size);
        if (text == nullptr) PyErr_Clear();
        texts.emplace_back(text == nullptr ? "" : text, text == nullptr ? 0 : static_cast<size_t>(size));
    }
    nb::list merges;
    for (Merge merge : sentencepiece_merges(texts, scores)) merges.append(nb::make_tuple(tokens[merge.left], tokens[merge.right]));
    return merges;
}

using ReadOnlyBytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

}  // namespace

void bind_gguf(nb::module_& m) {
    nb::exception<GgufMalformed>(m, "GgufMalformed");
    nb::exception<GgufUnsupported>(m, "GgufUnsupported");
    nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
        try {
            std::rethrow_exception(raised);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });

    m.def("sentencepiece_merges", &make_merges);
    nb::class_<GgufFile>(m, "GgufFile", "A GGUF file, mapped read-only; its header has been checked.")
        .def("__init__", [](GgufFile* self, nb::bytes path) { new (self) GgufFile(std::string(path.c_str(), path.size())); })
        .def_prop_ro("version", [](const GgufFile& self) { return self.header.version; })
        .def_prop_ro("alignment", [](const GgufFile& self) { return self.header.alignment; })
        .def_prop_ro("nbytes", [](const GgufFile& self) { return self.file.size(); })
        .def("keys",
             [](const GgufFile& self) {
                 nb::list keys;
                 for (const GgufEntry& entry : self.header.entries) keys.append(make_text(entry.key));
                 return keys;
             })
        .def("value", [](const GgufFile& self, size_t index) { return make_value(self.header.entries.at(index).value); })
        .def("tensors", [](const GgufFile& self) { return make_tensors(self.header); })
        .def(
            "view",
            [](const GgufFile& self, size_t offset, size_t count) {
                if (offset > self.file.size() || count > self.file.size() - offset)
                    throw std::out_of_range("the range is outside the file");
                return ReadOnlyBytes(self.file.data() + offset, {count}, nb::find(self));
            },
            nb::rv_policy::reference_internal)
        .def("drop_pages", [](const GgufFile& self, size_t offset, size_t count) { self.file.drop_pages(offset, count); });
}

}  // namespace foredraft
