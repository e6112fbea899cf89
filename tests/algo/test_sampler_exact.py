"""The reference sampler, drafting and verifying over several passes, by exact enumeration of its own random numbers.

Only the source of numbers is replaced: each key (seed, stream, position, choice, pass; index) stands for one uniform
number, of which every way it can fall is taken. Numbers that two uses share are shared here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foredraft.algo import sampler as sampling
from foredraft.algo.filters import softmax
from foredraft.algo.sampler import ArraySampler
from foredraft.types import Draft, SamplingParams

from .chance import Chance, draw_by_comparison, outcomes
from .worlds import Law, assert_is_target, completed, expected_accepted, fixed, random_worlds

Logits = Callable[[tuple[int, ...]], np.ndarray]


def logits_of(law: Law) -> Logits:
    def logits(context: tuple[int, ...]) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(law(context))

    return logits


def generated(
    target: Logits,
    draft: Logits,
    params: SamplingParams,
    *,
    gamma: int,
    length: int,
    dtype: type = np.float64,
    draft_width: int | None = None,
    whole_passes: bool = False,
    **options: Any,
) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens that speculation emits, or of all that its passes emit until then."""
    vocab = len(target(()))
    width = vocab if draft_width is None else draft_width

    def experiment(chance: Chance) -> tuple[int, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda key, index=0: chance.uniform((key, index)))
            patch.setattr(sampling, "draw_from", draw_by_comparison)
            sampler = ArraySampler(params, vocab_size=vocab, prompt=[], seed=0, **options)
            text: list[int] = []
            while len(text) < length:
                tokens: list[int] = []
                probs = np.zeros((gamma, width), dtype=dtype)
                for i in range(gamma):
                    tokens.append(sampler.draw(draft((*text, *tokens)), tokens, probs[i])[0])
                rows = np.stack([target((*text, *tokens[:i])) for i in range(gamma + 1)])
                verdict = sampler.verify(rows, Draft(tokens=tokens, probs=probs))
                new = [*(tokens[i] for i in verdict.accepted), verdict.token]
                sampler.extend(new)
                text += new
            return tuple(text if whole_passes else text[:length])

    return outcomes(experiment)


def processed(target: Logits, params: SamplingParams, **options: Any) -> Law:
    """What plain decoding samples from, after `context`."""

    def law(context: tuple[int, ...]) -> np.ndarray:
        sampler = ArraySampler(params, vocab_size=len(target(())), prompt=[], seed=0, **options)
        sampler.extend(context)
        return softmax(sampler.scores(target(context), []))

    return law


def assert_sampler_is_lossless(params: SamplingParams, target: Law, draft: Law, **options: Any) -> None:
    target_logits, draft_logits = logits_of(target), logits_of(draft)
    plain = processed(target_logits, params, **{k: v for k, v in options.items() if k == "eos_ids"})
    for method in ("standard", "block"):
        for gamma, length in ((1, 2), (2, 2)):
            law = generated(target_logits, draft_logits, params, gamma=gamma, length=length, method=method, **options)
            assert_is_target(law, plain, length)


def test_two_tokens_over_several_passes():
    for vocab, target, draft in random_worlds(2):
        if vocab == 2:
            assert_sampler_is_lossless(SamplingParams(), target, draft)


def test_block_with_unequal_laws_over_several_passes():
    """Noise keyed by position alone would make the second token .389 here instead of .333."""
    assert_sampler_is_lossless(SamplingParams(), fixed(1 / 3, 2 / 3), fixed(2 / 3, 1 / 3))


def test_three_tokens_with_separate_streams():
    """A residual draw that shares the draft's noise shows from three tokens on."""
    target, draft = fixed(0.1, 0.6, 0.3), fixed(0.5, 0.25, 0.25)
    for method in ("standard", "block"):
        law = generated(logits_of(target), logits_of(draft), SamplingParams(), gamma=1, length=1, method=method)
        assert [law[(i,)] for i in range(3)] == pytest.approx([0.1, 0.6, 0.3], abs=1e-12)


def test_draft_law_is_the_filtered_one():
    """The draft is drawn from, and tested against, its law after the filters."""
    for params in (
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.75),
        SamplingParams(top_k=2),
        SamplingParams(min_p=0.4),
        SamplingParams(temperature=1.5, min_p=0.1, top_k=2, top_p=0.9),
    ):
        for method in ("standard", "block"):
            target, draft = fixed(0.45, 0.3, 0.25), fixed(0.2, 0.38, 0.42)
            law = generated(logits_of(target), logits_of(draft), params, gamma=1, length=1, method=method)
            assert_is_target(law, processed(logits_of(target), params), 1)


def test_block_accepts_what_theory_says():
    target, draft = logits_of(fixed(1 / 3, 2 / 3)), logits_of(fixed(2 / 3, 1 / 3))
    for method, expected in (("standard", 10 / 9), ("block", 11 / 9)):
        emitted = generated(target, draft, SamplingParams(), gamma=2, length=1, whole_passes=True, method=method)
        assert expected_accepted(emitted) == pytest.approx(expected, abs=1e-12)


def test_draft_laws_rounded_to_few_bits():
    """The draft is drawn from what the buffer holds: rounding it costs acceptance, never the law."""
    target, draft = fixed(0.1, 0.6, 0.3), fixed(0.47, 0.27, 0.26)
    for method in ("standard", "block"):
        law = generated(
            logits_of(target), logits_of(draft), SamplingParams(), gamma=1, length=1, dtype=np.float16, method=method
        )
        assert_is_target(law, target, 1)


def test_processors_apply_at_each_position_of_the_block():
    for params in (
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.8),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(logit_bias={0: 1.0, 1: -2.0}),
    ):
        assert_sampler_is_lossless(params, fixed(0.6, 0.4), fixed(0.5, 0.5))


def test_min_tokens_counts_tokens_and_not_passes():
    params = SamplingParams(min_tokens=2)
    target, draft = fixed(0.2, 0.3, 0.5), fixed(0.3, 0.3, 0.4)
    for method in ("standard", "block"):
        law = generated(logits_of(target), logits_of(draft), params, gamma=2, length=3, method=method, eos_ids=[2])
        assert_is_target(law, processed(logits_of(target), params, eos_ids=[2]), 3)
        assert sum(v for tokens, v in law.items() if 2 in tokens[:2]) == 0
        assert sum(v for tokens, v in law.items() if tokens[2] == 2) == pytest.approx(0.5, abs=1e-12)


def test_vocabularies_of_different_width():
    target = fixed(0.2, 0.3, 0.5)
    for draft in (fixed(0.6, 0.4), fixed(0.1, 0.2, 0.1, 0.6)):
        for method in ("standard", "block"):
            law = generated(
                logits_of(target),
                logits_of(draft),
                SamplingParams(),
                gamma=2,
                length=1,
                method=method,
                draft_width=len(draft(())),
            )
            assert_is_target(law, target, 1)


def test_self_draft_is_always_accepted():
    """The draft's law is the target's: whatever the parameters, every token passes and penalties count each of them."""
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3)
    target = logits_of(fixed(0.7, 0.2, 0.1))
    for method in ("standard", "block"):
        sampler = ArraySampler(params, vocab_size=3, prompt=[1], seed=3, method=method)
        for _ in range(20):
            tokens: list[int] = []
            probs = np.zeros((4, 3))
            for i in range(4):
                tokens.append(sampler.draw(target(()), tokens, probs[i])[0])
            verdict = sampler.verify(np.stack([target(())] * 5), Draft(tokens=tokens, probs=probs))
            assert verdict.accepted == (0, 1, 2, 3)
            sampler.extend([*tokens, verdict.token])


def test_two_level_tree_with_penalties_samples_each_node_from_its_own_law():
    """Per position, a walk over a tree gives the law of plain decoding, penalties of the path included."""
    params = SamplingParams(frequency_penalty=1.2, presence_penalty=0.4)
    target = logits_of(fixed(0.5, 0.3, 0.2))
    plain = processed(target, params)
    tokens, parents = [0, 1, 0, 1, 0], [-1, -1, 0, 0, 1]

    def experiment(chance: Chance) -> tuple[int, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArraySampler, "_sample_target", lambda self, scores, depth: chance.choose(softmax(scores)))
            sampler = ArraySampler(params, vocab_size=3, prompt=[], seed=0)
            verdict = sampler.verify(np.stack([target(())] * 6), Draft(tokens=tokens, parents=parents))
            return (*(tokens[i] for i in verdict.accepted), verdict.token)

    assert_is_target(completed(outcomes(experiment), plain, 3), plain, 3)
