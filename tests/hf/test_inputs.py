"""Inputs of every odd kind: the ids of `generate`, or an error that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import foredraft.hf
from foredraft.errors import ForedraftError, ParameterError, UnsupportedModelError
from tests.hf.calls import count_passes, letter_tokenizer, ours
from tests.models.hf.zoo import PAD, VOCAB, make_model, model, prompts

BATCH = prompts()
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": IDS.int(), "attention_mask": MASK},
        {"input_ids": IDS, "attention_mask": MASK.bool()},
        {"input_ids": IDS, "attention_mask": MASK.float()},
        {"input_ids": IDS[:1], "attention_mask": MASK[:1]},
        {"input_ids": IDS[:, -1:], "attention_mask": MASK[:, -1:]},
        {"input_ids": IDS[:, -1:], "attention_mask": MASK[:, -1:], "forced_bos_token_id": 9},
        {},
        BatchEncoding(BATCH),
    ],
    ids=["int32", "bool mask", "float mask", "one row", "one token", "forced begin", "nothing", "encoding"],
)
def test_ids_are_generates(arguments: dict[str, Any]) -> None:
    plain = model("llama").generate(**arguments, **GREEDY)
    got = ours(model("llama"), **arguments, **GREEDY)
    assert got.equal(plain)
    assert got.dtype == plain.dtype


def test_an_end_of_text_but_no_padding_token() -> None:
    """`generate` pads with it; ours, too. Without either nothing is padded, and rows go on."""
    target = make_model("llama")
    target.config.pad_token_id = target.generation_config.pad_token_id = None
    free = target.generate(**BATCH, **GREEDY)
    for ends in ([int(free[0, 13]), int(free[2, 16])], None):
        target.generation_config.eos_token_id = ends
        plain = target.generate(**BATCH, **GREEDY)
        assert ours(target, **BATCH, **GREEDY).equal(plain)
        assert (plain.equal(free)) == (ends is None)


def test_padding_on_the_right_that_no_mask_tells_of() -> None:
    ids = IDS.clone()
    ids[1, -3:] = PAD
    with pytest.raises(ParameterError, match="pad on the left"):
        ours(model("llama"), input_ids=ids, **GREEDY)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ParameterError, "must be a tensor of token ids", {"input_ids": IDS.tolist()}),
        (ParameterError, "must be a tensor of token ids", {"input_ids": IDS.numpy()}),
        (ParameterError, "must be a tensor of token ids", {"input_ids": IDS.float()}),
        (ParameterError, "must be a tensor of token ids", {"input_ids": IDS > 3}),
        (ParameterError, "must be a tensor of token ids", {"input_ids": ["the cat"]}),
        (ParameterError, "must be a tensor of token ids", {"input_ids": IDS[0]}),
        (ParameterError, "has no rows", {"input_ids": IDS[:0]}),
        (ParameterError, "has no tokens", {"input_ids": IDS[:, :0]}),
        (
            ParameterError,
            f"holds {VOCAB}, and the model's tokens are 0 to {VOCAB - 1}",
            {"input_ids": IDS.clamp(min=VOCAB - 1) + 1},
        ),
        (ParameterError, "holds -1", {"input_ids": IDS - 1}),
        (ParameterError, r"in the shape of input_ids, \(4, 11\)", {"input_ids": IDS, "attention_mask": MASK[:, 1:]}),
        (ParameterError, "must be a tensor of ones", {"input_ids": IDS, "attention_mask": MASK.tolist()}),
        (ParameterError, "must be a tensor of ones", {"input_ids": IDS, "attention_mask": MASK.numpy()}),
        (ParameterError, "must be a tensor of ones", {"input_ids": IDS, "attention_mask": MASK[0]}),
        (ParameterError, "ones and zeros", {"input_ids": IDS, "attention_mask": MASK * 2}),
        (ParameterError, "input_ids is on meta, and the model on cpu: move", {"input_ids": IDS.to("meta")}),
        (ParameterError, "has no numbers", {"input_ids": IDS, "attention_mask": MASK.to("meta")}),
        (ParameterError, "max_matching_ngram_size", {"input_ids": IDS, "max_matching_ngram_size": "3"}),
        (ParameterError, "between 0 and 64", {"input_ids": IDS, "num_assistant_tokens": 2.0}),
        (ParameterError, "between 0 and 64", {"input_ids": IDS, "num_assistant_tokens": True}),
        (ParameterError, "between 0 and 64", {"input_ids": IDS, "prompt_lookup_num_tokens": -1}),
        (ParameterError, "adaptive must be true or false", {"input_ids": IDS, "adaptive": "no"}),
        (ParameterError, "fixed_rows must be true or false", {"input_ids": IDS, "fixed_rows": 1}),
        (ParameterError, "at least 1", {"input_ids": IDS, "max_matching_ngram_size": 0}),
        (UnsupportedModelError, "inputs_embeds cannot be given", {"inputs_embeds": torch.zeros(1, 3, 32)}),
        (UnsupportedModelError, "assistant_model must be a model", {"input_ids": IDS, "assistant_model": "gpt2"}),
        (
            UnsupportedModelError,
            "assistant_model cannot be .* has no head .* AutoModelForCausalLM",
            {"input_ids": IDS, "assistant_model": model("llama").model},
        ),
        (
            UnsupportedModelError,
            "assistant_model cannot be .* weights are not loaded",
            {"input_ids": IDS, "assistant_model": make_model("llama").to("meta")},
        ),
        (
            UnsupportedModelError,
            r"assistant_model cannot be .* in training mode, .* call model\.eval\(\) first",
            {"input_ids": IDS, "assistant_model": make_model("llama").train()},
        ),
        (
            ParameterError,
            "tokenizer must be given",
            {"input_ids": IDS, "assistant_model": model("gpt2"), "assistant_tokenizer": letter_tokenizer(order=-1)},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(error: type[ForedraftError], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        foredraft.hf.generate(model("llama"), **arguments, **GREEDY)


def test_models_that_are_none_yet() -> None:
    for target, message in (
        (None, "the model must be a model of Transformers, not NoneType"),
        (model("llama").model, "the model cannot be .* has no head"),
        (make_model("llama").to("meta"), "the model cannot be .* weights are not loaded"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            foredraft.hf.generate(target, **BATCH, **GREEDY)


def test_a_share_of_a_model_is_refused() -> None:
    """Each process would draft at its own pace, and they would wait for each other for ever."""
    share = make_model("llama")
    share._tp_size = 2
    for target, own in ((share, {}), (model("llama"), {"assistant_model": share})):
        with pytest.raises(UnsupportedModelError, match="is shared out over processes"):
            foredraft.hf.generate(target, **BATCH, **GREEDY, **own)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_as_a_tokenizer_makes_it(side: str) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.padding_side = side
    inputs = tokenizer(["ABCDEFG", "HIJ"], padding=True, return_tensors="pt", return_token_type_ids=False)
    if side == "left":
        assert ours(model("llama"), **inputs, **GREEDY).equal(model("llama").generate(**inputs, **GREEDY))
    else:
        with pytest.raises(ParameterError, match="pad on the left"):
            ours(model("llama"), **inputs, **GREEDY)


def test_a_model_that_is_its_own_assistant() -> None:
    """One object: greedy ids, and draws by the ratio test that always accepts."""
    target = make_model("llama")
    given = {"assistant_model": target, "num_assistant_tokens": 4, "adaptive": False}
    assert foredraft.hf.generate(target, **BATCH, **GREEDY, **given).equal(target.generate(**BATCH, **GREEDY))
    one = {name: value[:1] for name, value in BATCH.items()}
    sampled = {**one, **given, "do_sample": True, "max_new_tokens": 21, "eos_token_id": None}
    foredraft.hf.generate(target, **sampled)  # the first call holds the model's passes against its own
    num_passes = count_passes(target, lambda: foredraft.hf.generate(target, **sampled))
    assert num_passes <= 5 + 5 * 4  # of the target: 1 token, then five each; of the draft: a token each


def test_what_a_tokenizer_returns_is_no_tensor() -> None:
    with pytest.raises(ParameterError, match=r"is given as \*\*inputs"):
        foredraft.hf.generate(model("llama"), BatchEncoding(BATCH), **GREEDY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_two_number_types(dtype: torch.dtype) -> None:
    """The target and its assistant need not be of one type; in float64 the ids are `generate`'s as in float32."""
    target = make_model("llama").to(dtype)
    got = foredraft.hf.generate(target, **BATCH, **GREEDY, assistant_model=model("gpt2"), adaptive=False)
    assert got.shape[1] <= 23
    if dtype == torch.float64:
        assert got.equal(target.generate(**BATCH, **GREEDY))
