"""Documented kinds of cache, long texts and padding: the ids of `generate`, or an error that says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, QuantizedCache, StaticCache

import foredraft.hf
from foredraft.errors import UnsupportedModelError
from tests.hf.calls import DRAFTERS, drafter, ours
from tests.models.hf.zoo import draft, make_model, model, prompts

GREEDY = {"max_new_tokens": 14, "do_sample": False}
KINDS = ["dynamic", "static", "offloaded", "offloaded_static"]


@pytest.mark.parametrize("where", ["argument", "generation_config", "the model's own"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_kinds_of_cache(name: str, where: str) -> None:
    """Without drafts and with them, for a model with windows too. Offloading needs a GPU there, not here."""
    wanted = model(name).generate(**prompts(), **GREEDY)
    for kind in KINDS:
        target, given = model(name), dict[str, Any](GREEDY)
        if where == "argument":
            given["cache_implementation"] = kind
        elif where == "generation_config":
            own = copy.deepcopy(target.generation_config)
            own.cache_implementation = kind
            given["generation_config"] = own
        else:
            target = copy.deepcopy(target)
            target.generation_config.cache_implementation = kind
        for spec in ("none", "ngram+model"):
            got = foredraft.hf.generate(target, **prompts(), **given, adaptive=False, **drafter(spec, name))
            assert got.equal(wanted), (kind, spec)


@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_a_quantised_cache_is_refused(where: str) -> None:
    given: dict[str, Any] = {"cache_implementation": "quantized", **GREEDY}
    if where == "generation_config":
        given = {"generation_config": transformers.GenerationConfig(**given)}
    with pytest.raises(UnsupportedModelError, match="a quantised cache rounds keys and values"):
        ours(model("llama"), **prompts(), **given)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_quantised_cache_of_ones_own_is_refused(name: str) -> None:
    cache = object.__new__(QuantizedCache)  # to make one takes a further package
    with pytest.raises(UnsupportedModelError, match="a quantised cache rounds keys and values"):
        ours(model("llama"), **prompts(), **GREEDY, **{name: cache})


def test_empty_caches_of_ones_own() -> None:
    wanted = model("llama").generate(**prompts(), **GREEDY)
    for cache in (DynamicCache(), StaticCache(config=model("llama").config, max_cache_len=64)):
        assert ours(model("llama"), **prompts(), **GREEDY, cache=cache).equal(wanted)


LONG = {"max_position_embeddings": 1024}


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral", "llama4_text"])
def test_long_prompts_with_padding(name: str, spec: str) -> None:
    """Several passes of a prompt each, many windows and chunks behind each other; one row is padded for most of it."""
    target = make_model(name, **LONG)
    inputs = prompts((0, 611, 300), length=700)
    wanted = target.generate(**inputs, **GREEDY)
    given = drafter(spec)
    if "assistant_model" in given:
        given["assistant_model"] = make_model(name, seed=1, **LONG)
    assert foredraft.hf.generate(target, **inputs, **GREEDY, adaptive=False, **given).equal(wanted)


def test_a_folder_that_asks_for_a_static_cache(tmp_path: Any) -> None:
    from foredraft import LLM, SamplingParams
    from tests.models.hf.folders import write_folder

    write_folder(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = transformers.GenerationConfig.from_pretrained(tmp_path)
    settings.cache_implementation = "static"
    settings.save_pretrained(tmp_path)
    with LLM(tmp_path, "ngram", backend="hf", device="cpu") as llm:
        ids = llm.tokenizer.encode("the cat sat on")
        (answer,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=12))
    alone = plain.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
    assert list(answer.token_ids) == alone[0, len(ids) :].tolist()


def test_assistants_may_ask_for_any_cache() -> None:
    assistant = copy.deepcopy(draft("llama"))
    assistant.generation_config.cache_implementation = "quantized"
    got = foredraft.hf.generate(model("llama"), **prompts(), **GREEDY, assistant_model=assistant, adaptive=False)
    assert got.equal(model("llama").generate(**prompts(), **GREEDY))
