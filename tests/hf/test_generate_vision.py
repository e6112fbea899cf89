"""`foredraft.hf.generate` of models that see, against `model.generate`: equal ids, whatever drafts."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

import foredraft.hf
from foredraft.errors import ParameterError, UnsupportedModelError
from tests.models.hf.folders import byte_level
from tests.models.hf.vision_zoo import SEEING, VOCAB, disturbed, inputs, make_model, model, picture
from tests.models.hf.vision_zoo import tokenizer as own_tokenizer
from tests.models.hf.zoo import make_model as make_text_model

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "min_new_tokens": 16}


@lru_cache
def seeing_draft(name: str) -> Any:
    return disturbed(model(name))


@lru_cache
def text_draft() -> Any:
    return make_text_model("llama", 3, vocab_size=VOCAB, max_position_embeddings=1024)


def drafter(spec: str, name: str) -> dict[str, Any]:
    if spec == "ngram":
        return {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    assistant = text_draft() if spec == "text model" else seeing_draft(name)
    return {"assistant_model": assistant, "num_assistant_tokens": 4}


def one(name: str) -> dict[str, Any]:
    return inputs(name, "what is IMAGE", picture(1))


def two(name: str) -> dict[str, Any]:
    return inputs(name, "is IMAGE or IMAGE the larger one?", picture(2), picture(3, 40, 16))


def text(name: str) -> dict[str, Any]:
    return inputs(name, "no image here")


def batch(name: str) -> dict[str, Any]:
    """Three texts of different lengths, one of them without an image, two with the same tokens."""
    made = [inputs(name, "what is IMAGE", picture(4)), text(name), inputs(name, "what is IMAGE", picture(5))]
    length = max(each["input_ids"].shape[1] for each in made)
    together: dict[str, Any] = {}
    for key in made[0]:
        if key in ("input_ids", "attention_mask", "mm_token_type_ids"):
            rows = [each.get(key, torch.zeros_like(each["input_ids"])) for each in made]
            parts = [torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows]
        else:  # Idefics wants as many images for every row, and drops those that are black
            has_rows = name in ("idefics3", "smolvlm")
            parts = [each.get(key, torch.zeros_like(made[0][key])) for each in made if has_rows or key in each]
        together[key] = torch.cat(parts)
    return together


PROMPTS = {"one": one, "two": two, "text": text, "batch": batch}


@lru_cache
def plain_ids(name: str, prompt: str) -> list[list[int]]:
    ids: list[list[int]] = model(name).generate(**PROMPTS[prompt](name), **GREEDY).tolist()
    return ids


@pytest.mark.parametrize("spec", ["ngram", "text model", "seeing model"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", SEEING)
def test_greedy_ids_are_generates(name: str, prompt: str, spec: str) -> None:
    given = PROMPTS[prompt](name)
    got = foredraft.hf.generate(model(name), **given, **GREEDY, adaptive=False, **drafter(spec, name))
    assert got.tolist() == plain_ids(name, prompt)


@pytest.mark.parametrize("name", SEEING)
def test_the_image_decides(name: str) -> None:
    """Or the tests above would show nothing."""
    other = model(name).generate(**inputs(name, "what is IMAGE", picture(9)), **GREEDY)
    assert other.tolist() != plain_ids(name, "one")
    assert other.shape[1] == len(plain_ids(name, "one")[0])


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_draft_that_sees_is_accepted(name: str) -> None:
    passes: list[int] = []
    target, given = model(name), {**one(name), **GREEDY, "max_new_tokens": 40, "min_new_tokens": 40}
    foredraft.hf.generate(target, **given, **drafter("seeing model", name))  # the first call tries the model out
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    foredraft.hf.generate(target, **given, adaptive=False, **drafter("seeing model", name))
    hook.remove()
    assert len(passes) < 36


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_arguments_of_generate(name: str) -> None:
    for options in (
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 2},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        {"return_dict_in_generate": True, "output_logits": True},
    ):
        given = {**one(name), **GREEDY, **options}
        wanted = model(name).generate(**given)
        got = foredraft.hf.generate(model(name), **given, adaptive=False, **drafter("seeing model", name))
        if "return_dict_in_generate" in options:
            assert got.sequences.equal(wanted.sequences)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), atol=1e-3, rtol=1e-3)
        else:
            assert got.equal(wanted)


def test_videos_come_with_their_positions() -> None:
    """More frames than columns: what follows stands before the last of them."""
    target = model("qwen2_5_vl")
    ids = one("qwen2_5_vl")["input_ids"].clone()
    image, video = target.config.image_token_id, target.config.video_token_id
    frames = torch.full((1, 8), video)
    kept = ids[:, (ids == image).nonzero()[-1, 1] + 1 :]
    ids = torch.cat([ids[:, :3], frames, kept], dim=1)
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == video).long(),
        "pixel_values_videos": torch.randn(32, 96, generator=torch.Generator().manual_seed(1)),
        "video_grid_thw": torch.tensor([[8, 2, 2]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    wanted = target.generate(**given, **GREEDY)
    got = foredraft.hf.generate(target, **given, **GREEDY, adaptive=False, **drafter("seeing model", "qwen2_5_vl"))
    assert got.equal(wanted)


def test_models_that_hand_over_more_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="with images: it hands its decoder deepstack_visual_embeds"):
        foredraft.hf.generate(make_model("qwen3_vl"), **one("qwen3_vl"), **GREEDY)


def test_images_read_in_both_directions_are_refused() -> None:
    """Gemma 3 lets the tokens of an image see each other."""
    target = make_model("gemma3")
    image = target.config.image_token_id
    ids = torch.tensor([[5, 6, *[image] * 4, 7, 8]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == image).long()}
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UnsupportedModelError, match="logits of a prompt with an image differ"):
        foredraft.hf.generate(target, **given, pixel_values=pixels, **GREEDY)
    texts = {"input_ids": ids[:, :2], "attention_mask": torch.ones(1, 2, dtype=torch.long), **GREEDY}
    assert foredraft.hf.generate(target, **texts).equal(target.generate(**texts))


def test_a_model_of_text_takes_no_pixels() -> None:
    ids = one("llava")["input_ids"] % 90
    with pytest.raises(ValueError, match="pixel_values"):
        foredraft.hf.generate(text_draft(), ids, pixel_values=torch.zeros(1, 3, 16, 16), **GREEDY)
    with pytest.raises(UnsupportedModelError, match="token_type_ids cannot be given here"):
        foredraft.hf.generate(make_text_model("gpt2"), ids, token_type_ids=torch.zeros_like(ids), **GREEDY)


def test_an_assistant_with_other_eyes_is_refused() -> None:
    config = copy.deepcopy(model("llava").config)
    config.image_token_id = 7
    other = type(model("llava"))(config).eval()
    with pytest.raises(ParameterError, match=r"assistant_model cannot read these images: .*choose one of the same"):
        foredraft.hf.generate(model("llava"), **one("llava"), assistant_model=other, **GREEDY)


def test_assistants_of_other_tokenizers_read_the_text() -> None:
    tokenizer = byte_level(280)
    other = make_text_model("llama", 3, vocab_size=len(tokenizer), max_position_embeddings=1024)
    given = {**one("llava"), **GREEDY}
    got = foredraft.hf.generate(
        model("llava"),
        **given,
        assistant_model=other,
        tokenizer=own_tokenizer("llava"),
        assistant_tokenizer=tokenizer,
        num_assistant_tokens=4,
        adaptive=False,
    )
    assert got.tolist() == plain_ids("llava", "one")
