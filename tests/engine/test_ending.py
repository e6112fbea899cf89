"""Where an answer ends: end-of-text, stop strings and limits at every place inside a block; nothing leaks after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foredraft.engine.generator import Generator
from foredraft.errors import NumericalError, ParameterError, PromptTooLongError
from foredraft.models.base import Rows
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Completion, SamplingParams
from tests.engine.build import VOCAB, generator

PROMPT = "the cat and the hat"
LONG = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> Completion:
    return generator().generate(PROMPT, LONG)[0]


@pytest.mark.parametrize("position", range(1, 14))
def test_max_tokens_inside_a_block(plain: Completion, position: int) -> None:
    out = generator("model").generate(PROMPT, SamplingParams(temperature=0, max_tokens=position, ignore_eos=True))[0]
    assert out.token_ids == plain.token_ids[:position]
    assert out.finish_reason == "length"
    assert out.usage.completion_tokens == position == len(out.origins)


@pytest.mark.parametrize("spec", ["none", "model", "tree"])
@pytest.mark.parametrize("position", range(14))
def test_stop_token_inside_a_block(plain: Completion, position: int, spec: str) -> None:
    token = plain.token_ids[position]
    first = plain.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop_token_ids=[token])
    gen = generator(spec)
    out = gen.generate(PROMPT, params)[0]
    assert out.token_ids == plain.token_ids[: first + 1]
    assert out.finish_reason == "stop"
    assert out.speculation.num_accepted_tokens == sum(o != "target" for o in out.origins)
    gen.engine.check_integrity()
    # The cache that the finished text leaves behind serves the same prompt without a change.
    assert gen.generate(PROMPT, LONG)[0].token_ids == plain.token_ids


@pytest.mark.parametrize("spec", ["none", "model"])
def test_stop_strings_end_the_text_before_them(spec: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    text = generator().generate(PROMPT, params)[0].text
    for begin in range(0, 20, 3):
        stop = text[begin : begin + 3]
        chunks = list(
            generator(spec).stream(PROMPT, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=stop))
        )
        out = chunks[-1].completion
        assert out is not None
        assert out.text == text[: text.index(stop)] == "".join(c.text for c in chunks)
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("spec", ["none", "model", "ngram+model"])
def test_the_stream_is_the_text(spec: str) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True, stop=["zq", "\ufffd\ufffd\ufffd"])
    chunks = list(generator(spec).stream(PROMPT, params))
    final = chunks[-1].completion
    assert final is not None
    assert "".join(c.text for c in chunks) == final.text
    assert [t for c in chunks for t in c.token_ids] == list(final.token_ids)
    assert [o for c in chunks for o in c.origins] == list(final.origins)
    assert final.text == generator().generate(PROMPT, params)[0].text


def test_min_tokens_hold_back_the_end() -> None:
    gen = generator("model")
    free = gen.generate(PROMPT, LONG)[0].token_ids
    stop = [free[2], free[5]]
    out = gen.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, min_tokens=8, stop_token_ids=stop)
    )
    assert len(out[0].token_ids) > 8
    assert not set(stop) & set(out[0].token_ids[:8])


def test_closing_a_stream_gives_everything_back() -> None:
    gen = generator("model")
    stream = gen.stream([PROMPT, "another one"], LONG)
    next(stream)
    stream.close()
    assert gen.engine.scheduler.unfinished() == []
    gen.engine.check_integrity()
    assert gen.generate(PROMPT, LONG)[0].token_ids == generator().generate(PROMPT, LONG)[0].token_ids


def test_two_streams_drive_one_engine() -> None:
    gen = generator("model")
    first, second = gen.stream(PROMPT, LONG), gen.stream("another one", LONG)
    next(first)
    second_ids = [t for c in second for t in c.token_ids]
    assert second_ids == list(generator().generate("another one", LONG)[0].token_ids)
    assert len([t for c in first for t in c.token_ids]) > 40


def test_the_whole_context() -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    out = generator("model").generate("x" * 500, params)[0]
    assert out.finish_reason == "length"
    assert out.usage.prompt_tokens + out.usage.completion_tokens == 512
    with pytest.raises(PromptTooLongError, match="512"):
        generator().generate("x" * 512, params)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(ParameterError, match="prompt is empty"):
        generator().generate(prompt)


def test_a_request_may_switch_drafting_off() -> None:
    out = generator("model").generate(PROMPT, SamplingParams(temperature=0, num_speculative_tokens=0))[0]
    assert out.speculation.num_drafts == 0


def test_a_prediction_is_drafted_from(plain: Completion) -> None:
    text = bytes(t for t in plain.token_ids if t < 256).decode("latin-1")
    gen = generator("ngram")
    gen.tokenizer.encode = lambda s, **_: [ord(c) for c in s]  # type: ignore[method-assign]
    guided = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, prediction=text)
    out = gen.generate(PROMPT, guided)[0]
    assert out.token_ids == plain.token_ids
    assert out.speculation.num_accepted_tokens > 20


class Poisoned(TinyModel):
    """Its logits turn to NaN where the last token is 7."""

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> NDArray[np.float32]:
        logits = super().forward(batch, hidden_layers)
        rows = [token for r in batch for token in r.tokens[len(r.tokens) - r.num_logits :]]
        logits[[token == 7 for token in rows]] = np.nan
        return logits


@pytest.mark.parametrize("read_it", [True, False])
def test_a_request_that_fails_harms_no_other(plain: Completion, read_it: bool) -> None:
    gen = Generator(Poisoned(VOCAB, kinship=4.0, num_blocks=160), ByteTokenizer(), native=False)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first = gen.stream(PROMPT, short)
    opening = next(first)
    with pytest.raises(NumericalError):
        gen.generate([[1, 2, 7], list(PROMPT.encode())], LONG)
    if read_it:
        rest = list(first)
        assert [*opening.token_ids, *(t for c in rest for t in c.token_ids)] == list(plain.token_ids[:2])
    else:
        first.close()
    assert gen.generate(PROMPT, LONG)[0].token_ids == plain.token_ids
    assert gen.engine.scheduler.unfinished() == []
    gen.engine.check_integrity()


def test_a_hook_that_raises_loses_no_text(plain: Completion) -> None:
    gen = generator()
    stream = gen.stream(PROMPT, LONG)

    def fail(_: object) -> None:
        raise RuntimeError("hook")

    gen.on_round(fail)
    other = gen.stream("another one", LONG)
    with pytest.raises(RuntimeError, match="hook"):
        next(other)
    gen.on_round(None)
    assert [t for c in stream for t in c.token_ids] == list(plain.token_ids)
    gen.engine.check_integrity()


def test_a_stop_string_completed_by_the_last_broken_character() -> None:
    gen = generator()
    gen.tokenizer.token_bytes = lambda token: b"\xf0"  # type: ignore[method-assign]
    out = gen.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, stop="\ufffd"))[0]
    assert (out.text, out.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    "prompts",
    [[1, "abc"], ["abc", 1], [[1], 2], 5, [1.5, 2], [[1, "a"]], [None], np.ones(3), b"abc", {"prompt": "abc"}],
)
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        generator("none").generate(prompts)
    assert caught.value.field == "prompt"


def test_parameters_are_sampling_parameters() -> None:
    given: Any = {"max_tokens": 4}
    with pytest.raises(ParameterError, match="params must be a SamplingParams such as"):
        generator("none").generate("abc", given)


def test_arrays_and_their_integers_are_token_ids() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    [expected] = generator("none").generate([1, 2, 3], params)
    ids = np.array([1, 2, 3])
    many: list[Any] = [ids, list(ids), (1, 2, 3), ids[None, :], [ids, [1, 2, 3]], ["abc", ids]]
    for prompts in many:
        assert generator("none").generate(prompts, params)[-1].token_ids == expected.token_ids
