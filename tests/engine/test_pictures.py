"""Prompts with pictures through the engine: equal to plain decoding, never another's picture, never lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from foredraft.drafters.base import Drafter
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.generator import Generator
from foredraft.errors import ForedraftError
from foredraft.testing import ByteTokenizer
from foredraft.types import Picture, PicturePrompt, SamplingParams
from tests.drafters.translated import byte_level, cross_drafter
from tests.engine.build import VOCAB, draft_model, generator, target

PAD = ByteTokenizer.PAD
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompt(key: str, num_tokens: int = 40, before: str = "look ", after: str = " and say") -> PicturePrompt:
    """All pictures have the same tokens."""
    head, tail = (list(text.encode()) for text in (before, after))
    picture = Picture(len(head), num_tokens, key.encode(), None)
    return PicturePrompt([*head, *[PAD] * num_tokens, *tail], [picture])


def plain(*prompts: PicturePrompt | list[int], params: SamplingParams = PARAMS) -> list[list[int]]:
    """Each by itself, nothing drafted or shared."""
    with generator("none", enable_prefix_caching=False) as engine:
        return [list(engine.generate(one, params)[0].token_ids) for one in prompts]


def drafters(spec: str) -> list[Drafter]:
    if spec == "text-only model":
        return [ModelDrafter("model", draft_model(), VOCAB)]
    if spec == "seeing model":
        return [ModelDrafter("model", draft_model(), VOCAB, sees=True)]
    if spec == "other tokenizer":
        return [cross_drafter("text", byte_level(), draft_model(), target())]
    return [NgramDrafter()]


def engine_of(spec: str, num_blocks: int = 160, **options: object) -> Generator:
    return Generator(
        target(num_blocks),
        ByteTokenizer(),
        drafters(spec),
        native=False,
        adaptive=False,
        num_speculative_tokens=4,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("spec", ["ngram", "text-only model", "seeing model", "other tokenizer"])
def test_many_at_once_get_what_each_alone_gets(spec: str) -> None:
    prompts = [prompt("a"), prompt("b"), prompt("a"), list(b"only text here"), prompt("a", 70), prompt("c", after="!")]
    wanted = plain(*prompts)
    assert wanted[0] == wanted[2] != wanted[1]  # the picture is all that differs
    with engine_of(spec) as engine:
        for _ in range(2):  # from the cache, too
            assert [list(c.token_ids) for c in engine.generate(prompts, PARAMS)] == wanted
        engine.engine.check_integrity()


def test_a_model_that_sees_drafts_better() -> None:
    """It has the target's language, and its own part of the law is one of the whole text."""
    accepted = {}
    for spec in ("text-only model", "seeing model"):
        with engine_of(spec) as engine:
            done = engine.generate([prompt(key) for key in "abcdefgh"], PARAMS)
            accepted[spec] = sum(c.speculation.num_accepted_tokens for c in done)
    assert min(accepted.values()) > 0


@pytest.mark.parametrize("spec", ["none", "seeing model"])
def test_preempted_texts_keep_their_pictures(spec: str) -> None:
    prompts = [prompt(key, num) for key, num in itertools.product("ab", (40, 75, 100))]
    long = replace(PARAMS, max_tokens=100)
    wanted = plain(*prompts, params=long)
    for caching in (True, False):
        with engine_of(spec, num_blocks=9, enable_prefix_caching=caching) as engine:
            assert [list(c.token_ids) for c in engine.generate(prompts, long)] == wanted
            assert engine.snapshot().num_preemptions > 0


def test_equal_pictures_are_computed_once() -> None:
    with engine_of("none") as engine:
        engine.generate(prompt("a", 100), PARAMS)
        (again,) = engine.generate(prompt("a", 100, after=" or not"), PARAMS)
        (other,) = engine.generate(prompt("b", 100), PARAMS)
        (elsewhere,) = engine.generate(prompt("a", 100, before="l" * 64), PARAMS)
        (text,) = engine.generate([*b"look ", *[PAD] * 100, *b" and say"], PARAMS)
    assert again.usage.num_cached_tokens == 96
    assert other.usage.num_cached_tokens == elsewhere.usage.num_cached_tokens == text.usage.num_cached_tokens == 0


def test_the_text_before_a_picture_is_shared() -> None:
    with engine_of("none") as engine:
        engine.generate(prompt("a", before="s" * 64), PARAMS)
        (other,) = engine.generate(prompt("b", before="s" * 64), PARAMS)
    assert other.usage.num_cached_tokens == 64


def test_choices_share_a_picture() -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True)
    with engine_of("seeing model") as engine, generator("none") as simple:
        wanted = [c.token_ids for c in simple.generate(prompt("a"), params)]
        assert [c.token_ids for c in engine.generate(prompt("a"), params)] == wanted


@pytest.mark.parametrize("spec", ["none", "seeing model"])
def test_a_picture_that_cannot_be_read_ends_its_own_request(spec: str) -> None:
    broken = prompt("x")
    hidden = Picture(5, 40, b"x", ForedraftError("the model could not read an image"))
    broken = PicturePrompt(broken.token_ids, [hidden])
    wanted = plain(prompt("a"))[0]
    with engine_of(spec) as engine:
        good, bad = engine.stream(prompt("a"), PARAMS), engine.stream(broken, PARAMS)
        with pytest.raises(ForedraftError, match="could not read an image"):
            list(bad)
        assert [token for chunk in good for token in chunk.token_ids] == wanted
        engine.engine.check_integrity()
        assert not engine.has_unfinished
