"""The names that users import, and what importing them costs."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foredraft
from foredraft import LLM, Completion, SamplingParams, StructuredOutputs
from foredraft.errors import ModelFileError, ParameterError
from foredraft.testing import make_tiny_gguf


def test_the_public_names() -> None:
    assert set(foredraft.__all__) == {
        "LLM",
        "Chunk",
        "Completion",
        "ForedraftError",
        "SamplingParams",
        "StructuredOutputs",
    }
    assert all(hasattr(foredraft, name) for name in foredraft.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(foredraft, "Llm")


def test_the_arguments_of_llm() -> None:
    names = list(inspect.signature(LLM).parameters)
    assert names[:2] == ["model", "drafter"]
    assert {
        "num_speculative_tokens",
        "rejection_sample_method",
        "draft_quantize",
        "draft_vocab",
        "adaptive",
        "threads",
        "max_model_len",
        "kv_cache_dtype",
        "quantize",
        "backend",
        "progress",
    } <= set(names)
    assert all(hasattr(LLM, method) for method in ("generate", "stream", "chat", "stream_chat"))


def test_the_fields_of_an_answer_and_of_a_request() -> None:
    assert {"text", "token_ids", "finish_reason", "logprobs", "usage", "speculation", "origins", "timing"} <= {
        field.name for field in fields(Completion)
    }
    assert SamplingParams().temperature == 1.0


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = (
        "import sys, foredraft as f; f.SamplingParams(); print({'numpy', 'tokenizers', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_the_version_is_the_packages() -> None:
    command = [sys.executable, "-m", "foredraft", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_tiny_gguf("llama", path)
    return path


@pytest.mark.parametrize("threads", [0, 257, 1000, 1.5])
def test_a_number_of_threads_that_no_engine_takes(threads: float) -> None:
    with pytest.raises(ParameterError, match="threads must be a whole number from 1 to 256") as caught:
        LLM("any", threads=threads)  # type: ignore[arg-type]
    assert caught.value.field == "threads"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", None),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", float("inf")),
        ("ignore_eos", "no"),
        ("logprobs", True),
        ("drafters", 3),
        ("drafters", ["ngram", 3]),
        ("structured_outputs", {"regex": "a"}),
        ("seed", 1.5),
        ("top_k", 2.5),
        ("n", None),
        ("max_tokens", 1.0),
        ("logprobs", "2"),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**40]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: float("nan")}),
        ("repetition_penalty", 1e-7),
        ("repetition_penalty", 1e7),
        ("prediction", b"x"),
    ],
)
def test_a_value_that_means_nothing_is_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "needs exactly one of"),
        ({"json_schema": ["type"]}, "needs text for json_schema"),
        ({"json_schema": {"type": object()}}, "has a json_schema that JSON cannot hold"),
        ({"json_object": "yes"}, "needs true or false for json_object"),
        ({"choice": "yes"}, "needs a list of texts for choice"),
        ({"choice": ["yes", ""]}, "needs texts that are not empty for choice"),
        ({"regex": b"a"}, "needs text for regex"),
    ],
)
def test_structured_outputs_that_mean_nothing(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=f"^structured_outputs {words}") as caught:
        StructuredOutputs(**given)
    assert caught.value.field == "structured_outputs"


def test_a_schema_may_be_given_as_python_has_it() -> None:
    schema: dict[str, Any] = {"type": "object"}
    wanted = StructuredOutputs(json_schema=schema)
    schema["type"] = "array"
    assert wanted == StructuredOutputs(json_schema='{"type": "object"}')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drafter", None),
        ("threads", "2"),
        ("threads", True),
        ("num_speculative_tokens", "5"),
        ("num_speculative_tokens", 2.5),
        ("num_speculative_tokens", 65),
        ("prompt_lookup_min", 0),
        ("prompt_lookup_max", "3"),
        ("rejection_sample_method", "best"),
        ("draft_quantize", "q3"),
        ("quantize", "q5"),
        ("backend", None),
        ("cross_vocab", "slem"),
        ("draft_vocab", "32k"),
        ("draft_vocab", 0),
        ("max_model_len", "100"),
        ("max_model_len", 100.0),
        ("max_model_len", 10**6),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", "512"),
        ("kv_cache_tokens", 31),
        ("kv_cache_tokens", 2**33),
        ("kv_cache_tokens", 10**30),
        ("kernels", 3),
        ("progress", 3),
        ("adaptive", "x"),
        ("enable_prefix_caching", 1),
        ("enforce_eager", "yes"),
        ("kv_cache_dtype", "f64"),
    ],
)
def test_an_argument_of_llm_that_means_nothing_is_named(model: Path, name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        LLM(model, **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", [None, 3, [], b"model.gguf"])
def test_a_model_has_a_name_of_text(name: Any) -> None:
    with pytest.raises(ParameterError, match="model must be a path or a name"):
        LLM(name)


def test_a_vocabulary_larger_than_the_embedding_is_no_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "narrow.gguf"
    make_tiny_gguf("llama", path, vocab_size=200)
    with pytest.raises(ModelFileError, match="263 tokens, and an embedding of 200; the file is damaged"):
        LLM(path)


def test_none_means_none_and_numbers_of_numpy_are_numbers() -> None:
    given: Any = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**given) == SamplingParams()
    given = {"top_k": np.int64(3), "seed": np.uint8(4), "temperature": np.float32(0.5), "stop_token_ids": np.arange(2)}
    params = SamplingParams(**given)
    assert (params.top_k, params.seed, params.temperature, params.stop_token_ids) == (3, 4, 0.5, (0, 1))
    assert type(params.top_k) is int
    assert type(params.temperature) is float
