"""The names that users import, and what importing them costs."""

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import foredraft
from foredraft import LLM, Completion, SamplingParams
from foredraft.errors import ParameterError


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
        ("logit_bias", {"a": 1.0}),
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


def test_none_means_none_and_numbers_of_numpy_are_numbers() -> None:
    given: Any = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**given) == SamplingParams()
    given = {"top_k": np.int64(3), "seed": np.uint8(4), "temperature": np.float32(0.5), "stop_token_ids": np.arange(2)}
    params = SamplingParams(**given)
    assert (params.top_k, params.seed, params.temperature, params.stop_token_ids) == (3, 4, 0.5, (0, 1))
    assert type(params.top_k) is int
