#include "bindings/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "decoder.h"

namespace nb = nanobind;

namespace foredraft {
namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <size_t Dimensions>
using View = nb::ndarray<nb::numpy, float, nb::ndim<Dimensions>, nb::c_contig>;

template <class Array>
auto span_of(const Array& array) {
    return std::span(array.data(), array.size());
}

template <class T>
std::span<const T> span_of(const std::optional<Vector<T>>& array) {
    return array ? std::span<const T>(array->data(), array->size()) : std::span<const T>();
}

// The decoder and the arrays that its matrices refer to.
class BoundDecoder {
  public:
    BoundDecoder(ThreadPool& pool, int num_layers, int hidden_size, int num_heads, int num_kv_heads, int head_dim, int ffn_size,
                 int vocab_size, float norm_eps, float attention_scale, const std::vector<std::pair<Vector<double>, double>>& rope_tables,
                 std::vector<int> layer_rope, std::vector<int> layer_window, bool rope_interleaved, const std::string& activation,
                 float attention_softcap, float logit_softcap, float embedding_scale, const std::optional<std::string>& kernel_set)
        : decoder_({.num_layers = num_layers,
                    .hidden_size = hidden_size,
                    .num_heads = num_heads,
                    .num_kv_heads = num_kv_heads,
                    .head_dim = head_dim,
                    .ffn_size = ffn_size,
                    .vocab_size = vocab_size,
                    .norm_eps = norm_eps,
                    .attention_scale = attention_scale,
                    .rope_tables = tables(rope_tables),
                    .layer_rope = std::move(layer_rope),
                    .layer_window = std::move(layer_window),
                    .rope_interleaved = rope_interleaved,
                    .activation = activation_by_name(activation),
                    .attention_softcap = attention_softcap,
                    .logit_softcap = logit_softcap,
                    .embedding_scale = embedding_scale},
                   pool, select_kernels(kernel_set ? kernel_set->c_str() : nullptr)) {}

    Decoder& decoder() { return decoder_; }

    void set_weight(const std::string& name, const std::string& format, int n, int k, const Vector<uint8_t>& packed) {
        decoder_.set_weight(name, format_by_name(format), n, k, span_of(packed));
        arrays_.push_back(packed);
    }

    void set_embedding(int type, int vocab, int hidden, const Vector<uint8_t>& rows) {
        decoder_.set_embedding(GgmlType(type), vocab, hidden, span_of(rows));
        arrays_.push_back(rows);
    }

  private:
    static std::vector<RopeTable> tables(const std::vector<std::pair<Vector<double>, double>>& pairs) {
        std::vector<RopeTable> result;
        for (const auto& [frequencies, factor] : pairs)
            result.emplace_back(std::vector<double>(frequencies.data(), frequencies.data() + frequencies.size()), factor);
        return result;
    }

    static Activation activation_by_name(const std::string& name) {
        if (name == "silu") return Activation::Silu;
        if (name == "gelu_tanh") return Activation::GeluTanh;
        throw std::invalid_argument("unknown activation '" + name + "': silu or gelu_tanh");
    }

    Decoder decoder_;
    std::vector<Vector<uint8_t>> arrays_;
};

template <size_t Dimensions>
View<Dimensions> view_of(const FloatRows& rows, std::initializer_list<size_t> shape) {
    auto* keep = new std::shared_ptr<float[]>(rows.data);
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<float[]>*>(p); });
    return View<Dimensions>(rows.data.get(), shape, owner);
}

View<2> forward(BoundDecoder& self, KVCache& cache, const IntMatrix& sequences, const Vector<int32_t>& block_tables,
                const Vector<int32_t>& tokens, const std::optional<Vector<int32_t>>& parents, const std::vector<int32_t>& hidden_layers,
                const std::optional<Vector<int32_t>>& embedding_rows, const std::optional<Matrix>& embeddings) {
    if (sequences.shape(1) != 4) throw std::invalid_argument("sequences must be [n, 4]: start, rows, logits, table blocks");
    if (embeddings && (!embedding_rows || embeddings->shape(0) != embedding_rows->size()))
        throw std::invalid_argument("embeddings must be [embedding_rows, hidden]");
    PassInput input{.sequences = span_of(sequences),
                    .block_tables = span_of(block_tables),
                    .tokens = span_of(tokens),
                    .parents = span_of(parents),
                    .embedding_rows = span_of(embedding_rows),
                    .embeddings = {},
                    .hidden_layers = hidden_layers};
    if (embeddings) input.embeddings = span_of(*embeddings);
    FloatRows logits;
    {
        nb::gil_scoped_release release;
        logits = self.decoder().forward(cache, input);
    }
    return view_of<2>(logits, {logits.rows, logits.width});
}

View<3> hidden_states(BoundDecoder& self) {
    const HiddenStates hidden = self.decoder().hidden_states();
    return view_of<3>(hidden.values,
                      {hidden.num_layers, hidden.num_layers ? hidden.values.rows / hidden.num_layers : 0, hidden.values.width});
}

nb::dict profile(BoundDecoder& self) {
    nb::dict seconds;
    for (size_t i = 0; i < kNumStages; ++i) seconds[stage_name(Stage(i))] = self.decoder().seconds()[i];
    return seconds;
}

}  // namespace

void bind_decoder(nb::module_& m) {
    m.def("default_threads", default_threads);

    nb::class_<ThreadPool>(m, "ThreadPool")
        .def(nb::init<int>(), nb::arg("num_threads"))
        .def_prop_ro("num_threads", &ThreadPool::num_threads);

    nb::class_<KVCache>(m, "KVCache").def_prop_ro("num_blocks", &KVCache::num_blocks).def_prop_ro("block_bytes", [](const KVCache& cache) {
        return 2 * size_t(cache.num_layers()) * size_t(cache.num_kv_heads()) * cache.block_stride();
    });

    nb::class_<BoundDecoder>(m, "Decoder")
        .def(nb::init<ThreadPool&, int, int, int, int, int, int, int, float, float, const std::vector<std::pair<Vector<double>, double>>&,
                      std::vector<int>, std::vector<int>, bool, const std::string&, float, float, float,
                      const std::optional<std::string>&>(),
             nb::keep_alive<1, 2>(), nb::arg("pool"), nb::kw_only(), nb::arg("num_layers"), nb::arg("hidden_size"), nb::arg("num_heads"),
             nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("ffn_size"), nb::arg("vocab_size"), nb::arg("norm_eps"),
             nb::arg("attention_scale"), nb::arg("rope_tables"), nb::arg("layer_rope"), nb::arg("layer_window"),
             nb::arg("rope_interleaved"), nb::arg("activation") = "silu", nb::arg("attention_softcap") = 0.0f,
             nb::arg("logit_softcap") = 0.0f, nb::arg("embedding_scale") = 1.0f, nb::arg("kernel_set") = nb::none())
        .def_prop_ro("kernel_set", [](BoundDecoder& self) { return self.decoder().kernels().name; })
        .def_prop_ro("weight_bytes", [](BoundDecoder& self) { return self.decoder().weight_bytes(); })
        .def("set_weight", &BoundDecoder::set_weight, nb::arg("name"), nb::arg("format"), nb::arg("n"), nb::arg("k"),
             nb::arg("packed").noconvert())
        .def(
            "set_vector",
            [](BoundDecoder& self, const std::string& name, const Vector<float>& values) {
                self.decoder().set_vector(name, span_of(values));
            },
            nb::arg("name"), nb::arg("values"))
        .def("set_embedding", &BoundDecoder::set_embedding, nb::arg("ggml_type"), nb::arg("vocab"), nb::arg("hidden"),
             nb::arg("data").noconvert())
        .def(
            "make_cache", [](BoundDecoder& self, int num_blocks, bool half) { return self.decoder().make_cache(num_blocks, half); },
            nb::arg("num_blocks"), nb::arg("half"))
        .def("forward", forward, nb::arg("cache"), nb::arg("sequences"), nb::arg("block_tables"), nb::arg("tokens"),
             nb::arg("parents") = nb::none(), nb::arg("hidden_layers") = nb::make_tuple(), nb::arg("embedding_rows") = nb::none(),
             nb::arg("embeddings") = nb::none())
        .def("hidden_states", hidden_states)
        .def("profile", profile)
        .def(
            "move_slots",
            [](BoundDecoder& self, KVCache& cache, const Vector<int32_t>& block_table, const Vector<int32_t>& source,
               const Vector<int32_t>& target) { self.decoder().move_slots(cache, span_of(block_table), span_of(source), span_of(target)); },
            nb::arg("cache"), nb::arg("block_table"), nb::arg("source"), nb::arg("target"))
        .def(
            "limit_head",
            [](BoundDecoder& self, const std::optional<Vector<int32_t>>& blocks) { self.decoder().limit_head(span_of(blocks)); },
            nb::arg("blocks").none());
}

}  // namespace foredraft
