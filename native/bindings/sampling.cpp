#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <climits>
#include <cstdlib>
#include <mutex>
#include <type_traits>

#include "bindings/bindings.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace foredraft {
namespace {

template <typename T, int D>
using Rows = nb::ndarray<T, nb::ndim<D>, nb::c_contig, nb::device::cpu>;

// Token ids or indices from any Python sequence, numpy arrays included.
std::vector<int32_t> integers(nb::handle sequence) {
    std::vector<int32_t> values;
    for (nb::handle item : sequence) {
        const Py_ssize_t value = PyNumber_AsSsize_t(item.ptr(), PyExc_ValueError);
        if (value == -1 && PyErr_Occurred()) throw nb::python_error();
        if (value < INT32_MIN || value > INT32_MAX) throw std::invalid_argument("an id does not fit in 32 bits");
        values.push_back(int32_t(value));
    }
    return values;
}

// A Sampler for Python: drops the interpreter's lock during the work on a vocabulary, and keeps its own meanwhile.
class BoundSampler {
  public:
    BoundSampler(Sampler sampler) : sampler_(std::move(sampler)) {}

    void extend(nb::handle tokens) {
        const auto ids = integers(tokens);
        const std::lock_guard lock(mutex_);
        sampler_.extend(ids);
    }

    nb::tuple draw(Rows<const float, 1> logits, nb::handle path, std::optional<Rows<float, 1>> probs,
                   std::optional<Rows<const uint32_t, 1>> mask) {
        const auto ids = integers(path);
        if (mask) check_words(mask->shape(0));
        const LogitRow row{logits.data(), int(logits.shape(0)), mask ? mask->data() : nullptr};
        const Drawn drawn =
            unlocked([&] { return sampler_.draw(row, ids, probs ? probs->data() : nullptr, probs ? int(probs->shape(0)) : 0); });
        return nb::make_tuple(drawn.token, drawn.probability);
    }

    nb::list runners_up(Rows<const float, 1> logits, nb::handle path, int count, double least_odds,
                        std::optional<Rows<const uint32_t, 1>> mask) {
        const auto ids = integers(path);
        if (mask) check_words(mask->shape(0));
        const LogitRow row{logits.data(), int(logits.shape(0)), mask ? mask->data() : nullptr};
        nb::list found;
        for (const Odds& other : unlocked([&] { return sampler_.runners_up(row, ids, count, least_odds); }))
            found.append(nb::make_tuple(other.token, other.odds));
        return found;
    }

    nb::object verify(Rows<const float, 2> logits, nb::handle draft, std::optional<Rows<const uint32_t, 2>> masks) {
        DraftArrays arrays{integers(draft.attr("tokens")), {}, nullptr, 0};
        const size_t n = arrays.tokens.size();
        const nb::object parents = draft.attr("parents"), probs = draft.attr("probs");
        if (parents.is_none()) {
            for (size_t i = 0; i < n; ++i) arrays.parents.push_back(int32_t(i) - 1);
        } else {
            arrays.parents = integers(parents);
        }
        Rows<const float, 2> laws;
        if (!probs.is_none() && n > 0) {
            if (!nb::try_cast(probs, laws, false) || laws.shape(0) != n)
                throw std::invalid_argument("draft probabilities must be float32 in C order, one row a draft token");
            arrays.probs = laws.data();
            arrays.width = int(laws.shape(1));
        }
        if (logits.shape(0) != 1 + n || logits.shape(1) != size_t(sampler_.vocab_size()))
            throw std::invalid_argument("logits have shape (" + std::to_string(logits.shape(0)) + ", " + std::to_string(logits.shape(1)) +
                                        "); this draft needs (" + std::to_string(1 + n) + ", " + std::to_string(sampler_.vocab_size()) +
                                        ")");
        if (masks) {
            check_words(masks->shape(1));
            if (masks->shape(0) != 1 + n)
                throw std::invalid_argument(std::to_string(masks->shape(0)) + " masks; this draft needs " + std::to_string(1 + n));
        }
        const TargetRows rows{logits.data(), masks ? masks->data() : nullptr};
        const Outcome outcome = unlocked([&] { return sampler_.verify(rows, arrays); });
        return nb::module_::import_("foredraft.types").attr("Verdict")(as_tuple(outcome.accepted), outcome.token);
    }

    nb::object logprobs(Rows<const float, 1> logits, int token, int num_top) {
        if (logits.shape(0) != size_t(sampler_.vocab_size()))
            throw std::invalid_argument("logits have " + std::to_string(logits.shape(0)) + " values; expected " +
                                        std::to_string(sampler_.vocab_size()));
        const TokenScores scores = unlocked([&] { return sampler_.logprobs(logits.data(), token, num_top); });
        nb::list top;
        for (const auto& [id, logprob] : scores.top) top.append(nb::make_tuple(id, logprob));
        return nb::module_::import_("foredraft.types").attr("TokenLogprob")(token, scores.logprob, nb::tuple(top));
    }

  private:
    template <typename Work>
    std::invoke_result_t<Work> unlocked(Work work) {
        nb::gil_scoped_release release;
        const std::lock_guard lock(mutex_);
        return work();
    }

    void check_words(size_t words) const {
        const size_t expected = (size_t(sampler_.vocab_size()) + 31) / 32;
        if (words != expected)
            throw std::invalid_argument("a mask has " + std::to_string(words) + " words; expected " + std::to_string(expected));
    }

    static nb::tuple as_tuple(const std::vector<int32_t>& values) {
        nb::list list;
        for (int32_t value : values) list.append(value);
        return nb::tuple(list);
    }

    Sampler sampler_;
    std::mutex mutex_;
};

void make_sampler(BoundSampler* self, int vocab_size, nb::handle prompt, uint64_t seed, int choice, bool block, int vocab_limit,
                  std::optional<std::string> kernel_set, nb::handle eos_ids, double temperature, double top_p, int top_k, double min_p,
                  int min_tokens, double presence_penalty, double frequency_penalty, double repetition_penalty, nb::handle logit_bias) {
    SamplingFields fields{temperature, top_p, min_p, top_k, min_tokens, presence_penalty, frequency_penalty, repetition_penalty, {}};
    for (nb::handle token : logit_bias) {
        const auto bias = nb::cast<float>(nb::object(logit_bias[token]));
        fields.logit_bias.emplace_back(integers(nb::make_tuple(token)).front(), bias);
    }
    const KernelSet& kernels = select_kernels(kernel_set ? kernel_set->c_str() : std::getenv("FOREDRAFT_KERNELS"));
    Sampler sampler(kernels, std::move(fields), integers(eos_ids), vocab_size, vocab_limit, seed, choice, block);
    sampler.add_prompt(integers(prompt));
    new (self) BoundSampler(std::move(sampler));
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const NoToken& fault) {
            PyErr_SetString(nb::module_::import_("foredraft.errors").attr("NoTokenError").ptr(), fault.what());
        } catch (const NumericalFault& fault) {
            PyErr_SetString(nb::module_::import_("foredraft.errors").attr("NumericalError").ptr(), fault.what());
        }
    });
    nb::class_<BoundSampler>(m, "Sampler")
        .def("__init__", make_sampler, nb::kw_only(), "vocab_size"_a, "prompt"_a, "seed"_a, "choice"_a, "block"_a, "vocab_limit"_a,
             "kernel_set"_a.none(), "eos_ids"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a, "min_tokens"_a, "presence_penalty"_a,
             "frequency_penalty"_a, "repetition_penalty"_a, "logit_bias"_a)
        .def("extend", &BoundSampler::extend, "tokens"_a)
        .def("draw", &BoundSampler::draw, nb::arg("logits").noconvert(), "path"_a, nb::arg("probs").noconvert().none(),
             nb::arg("mask").noconvert() = nb::none())
        .def("runners_up", &BoundSampler::runners_up, nb::arg("logits").noconvert(), "path"_a, "count"_a, "least_odds"_a,
             nb::arg("mask").noconvert() = nb::none())
        .def("verify", &BoundSampler::verify, nb::arg("logits").noconvert(), "draft"_a, nb::arg("masks").noconvert() = nb::none())
        .def("logprobs", &BoundSampler::logprobs, nb::arg("logits").noconvert(), "token"_a, "num_top"_a);
}

}  // namespace foredraft
