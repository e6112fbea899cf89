"""The names that users import, and what importing them costs."""

import inspect
import subprocess
import sys
from dataclasses import fields

import foredraft
from foredraft import LLM, Completion, SamplingParams


def test_the_public_names() -> None:
    assert set(foredraft.__all__) == {"LLM", "Chunk", "Completion", "SamplingParams"}
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
