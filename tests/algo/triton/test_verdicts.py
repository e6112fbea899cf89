"""The rules by exact enumeration: what the kernels emit is the target's law.

A verdict is a function of the draft, of a uniform for each of its tokens and of one for the token that follows. Between
the places where theory puts its steps it must not change; so the lengths of these intervals are its exact probability.
"""

from __future__ import annotations

from .launches import DEVICE, drafts_of, laws_of, on_device, verdicts_of  # isort: skip  (before any kernel is defined)

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from foredraft.algo.tree import chain
from foredraft.algo.triton import laws, verdicts
from foredraft.algo.triton.laws import Best
from foredraft.algo.triton.verdicts import Fault
from foredraft.algo.verify import block_test, draw_from, ratio_test, sample_and_walk
from foredraft.types import Verdict

from ..worlds import Law, RandomLaw, assert_is_target, completed, expected_accepted, fixed

Rows = list[np.ndarray]
INSIDE = 1e-9  # how far from a step the kernel is asked


def chain_rows(target: Law, draft: Law, tokens: Sequence[int]) -> tuple[Rows, Rows]:
    """p [1 + n], q [n]."""
    return [target(tuple(tokens[:i])) for i in range(1 + len(tokens))], [
        draft(tuple(tokens[:i])) for i in range(len(tokens))
    ]


def steps(p: Rows, q: Rows, tokens: Sequence[int], by_block: bool) -> tuple[list[float], list[float]]:
    """Where the verdict may change: a threshold for each token's number, and all places for that of the next token."""
    rho, thresholds, rests = 1.0, [], []
    for i, law in enumerate(p):
        rest = np.maximum(rho * law - (q[i] if i < len(tokens) else 0), 0)
        if by_block and i > 0:
            left = rest.sum() + 1 - rho
            thresholds.append(rest.sum() / left if left > 0 else 1.0)
        rests += [rest / rest.sum() if rest.sum() > 0 else law]
        if i < len(tokens):
            ratio = law[tokens[i]] / q[i][tokens[i]]
            thresholds += [] if by_block else [min(1.0, ratio)]
            rho = min(1.0, rho * ratio) if by_block else 1.0
    return thresholds, sorted({float(edge) for rest in rests for edge in np.cumsum(rest)[:-1]})


def cells(thresholds: Sequence[float], edges: Sequence[float]) -> Iterator[tuple[float, list[list[float]]]]:
    """The boxes between the steps: their volume, and their lowest and highest corner."""
    axes = [[0.0, *sorted({min(max(e, 0.0), 1.0) for e in own}), 1.0] for own in (*([t] for t in thresholds), edges)]
    for box in product(*(pairwise(axis) for axis in axes)):
        volume = float(np.prod([high - low for low, high in box]))
        if all(high - low > 3 * INSIDE for low, high in box):
            yield volume, [[low + INSIDE for low, _ in box], [high - INSIDE for _, high in box]]


def judge(cases: Sequence[tuple[Rows, Rows, Sequence[int], Sequence[float]]], by_block: bool) -> list[Verdict]:
    """Drafts of any lengths, all by one launch: p, q, tokens, numbers."""
    vocab = len(cases[0][0][0])
    nothing = [np.zeros(vocab)]
    made = laws_of(np.stack([row for p, _, _, _ in cases for row in p]))
    probs = on_device(np.stack([row for _, q, _, _ in cases for row in (*q, *nothing)]))
    uniforms = on_device([u for _, _, _, numbers in cases for u in numbers])
    drafts = drafts_of([(tokens, chain(len(tokens))) for _, _, tokens, _ in cases])
    return verdicts_of(verdicts.judge_chains(made, probs, drafts, uniforms, by_block=by_block))


def emitted(target: Law, draft: Law, gamma: int, by_block: bool) -> dict[tuple[int, ...], float]:
    """The law of what one pass emits."""
    vocab = len(target(()))
    cases, chances = [], []
    for tokens in product(range(vocab), repeat=gamma):
        p, q = chain_rows(target, draft, tokens)
        drawn = float(np.prod([q[i][token] for i, token in enumerate(tokens)]))
        if drawn > 0:
            for volume, corners in cells(*steps(p, q, tokens, by_block)):
                cases += [(p, q, tokens, corner) for corner in corners]
                chances.append(drawn * volume)
    found = judge(cases, by_block)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, low, high, (_, _, tokens, _) in zip(chances, found[::2], found[1::2], cases[::2], strict=True):
        assert low == high, "a step where theory has none"
        law[(*(tokens[i] for i in low.accepted), low.token)] += chance
    return law


#: Target, draft, draft tokens; and where it is known, how many the ratio test and block verification accept.
WORLDS: dict[str, tuple[Law, Law, int, tuple[float, float] | None]] = {
    "three tokens": (fixed(0.1, 0.6, 0.3), fixed(0.5, 0.25, 0.25), 1, (0.6, 0.6)),
    "an impossible token": (fixed(0.0, 0.7, 0.3), fixed(0.4, 0.0, 0.6), 1, (0.3, 0.3)),
    "two in a row": (fixed(1 / 3, 2 / 3), fixed(2 / 3, 1 / 3), 2, (10 / 9, 11 / 9)),
    "laws that change": (RandomLaw(2, 3), RandomLaw(2, 1003), 2, None),
}


@pytest.mark.parametrize("by_block", [False, True], ids=["ratio", "block"])
@pytest.mark.parametrize("world", WORLDS)
def test_chains_are_lossless(world: str, by_block: bool):
    target, draft, gamma, accepted = WORLDS[world]
    law = emitted(target, draft, gamma, by_block)
    assert_is_target(completed(law, target, gamma + 1), target, gamma + 1)
    if accepted is not None:
        assert expected_accepted(law) == pytest.approx(accepted[by_block], abs=1e-12)


def test_verdicts_are_the_references(monkeypatch: pytest.MonkeyPatch):
    """Random chains of all lengths in one launch, over several blocks of the vocabulary."""
    monkeypatch.setattr(laws, "MAX_BLOCK", 64)
    rng, vocab = np.random.default_rng(0), 150
    cases = []
    for n in (0, 5, 1, 2, 0, 3):
        p = list(rng.dirichlet(np.full(vocab, 0.1), size=1 + n))
        q = [0.5 * law + 0.5 * rng.dirichlet(np.full(vocab, 0.1)) for law in p[:n]]
        cases.append((p, q, [int(rng.choice(vocab, p=law)) for law in q], rng.random(1 + n).tolist()))
    for by_block in (False, True):
        expected = []
        for p, q, tokens, (*uniforms, u) in cases:
            draw = lambda weights, u=u: draw_from(weights, u)  # noqa: E731
            expected.append(
                block_test(tokens, p, q, uniforms, draw)
                if by_block
                else ratio_test(tokens, chain(len(tokens)), p, q, uniforms, draw)
            )
        assert judge(cases, by_block) == expected


def test_nothing_impossible_passes_and_nothing_is_left_over():
    """At the ends of the interval, and where only rounding could leave a rest."""
    impossible = ([np.array([1.0, 0.0])] * 2, [np.array([0.5, 0.5])], [1], [0.0, 0.0])
    for by_block in (False, True):
        assert judge([impossible], by_block) == [Verdict((), 0)]
    last = np.nextafter(1, 0)
    equal = ([np.array([0.25, 0.75])] * 2, [np.array([0.25, 0.75])], [1], [last, last])
    for by_block in (False, True):
        assert judge([equal], by_block) == [Verdict((0,), 1)]
    twice = ([np.array([0.25, 0.75])] * 2, [np.array([0.25, 0.75])], [1], [1.0, 0.1])  # a number that cannot be
    assert judge([twice], False) == [Verdict((), 0)]  # [p - q]+ is empty: drawn from p
    middle = ([np.array([0.0, 0.0, 1.0, 0.0])], [], [], [0.0])
    assert judge([middle], False) == [Verdict((), 2)]


def test_laws_of_the_draft_may_be_narrower_or_wider():
    p = [np.array([0.2, 0.3, 0.5])] * 2
    for width in (2, 3, 5):
        q = np.zeros((2, width))
        q[0, :2] = 0.5
        made, drafts = laws_of(np.stack(p)), drafts_of([([0], [-1])])
        found = []
        for u in (0.39, 0.41):
            numbers = on_device([u, 0.3])
            found += verdicts_of(verdicts.judge_chains(made, on_device(q), drafts, numbers, by_block=False))
        assert found == [Verdict((0,), 1), Verdict((), 2)]


def test_a_draft_without_a_law_is_told():
    for broken in (np.zeros(2), np.array([np.nan, 1.0]), np.array([np.inf, 1.0])):
        probs = on_device(np.stack([broken, np.zeros(2)]))
        made, drafts = laws_of(np.full((2, 2), 0.5)), drafts_of([([1], [-1])])
        table = verdicts.judge_chains(made, probs, drafts, on_device([0.5, 0.5]), by_block=False)
        assert table[0, 0] == Fault.NO_DRAFT_LAW


TREES = [
    ([], []),
    ([0, 1], [-1, 0]),
    ([0, 1, 0], [-1, -1, 1]),
    ([1, 1, 0, 0], [-1, 0, 0, 1]),
    ([0, 0, 1], [-1, -1, 1]),  # of equal children the first
]


def test_walks_are_the_references():
    """Whatever is sampled at every node of every tree; the samples stand in one of two blocks."""
    drafts, tables = [], []
    for tokens, parents in TREES:
        for samples in product(range(2), repeat=1 + len(tokens)):
            drafts.append((tokens, parents))
            tables.append(samples)
    token = torch.tensor([[s, 1 - s] for samples in tables for s in samples], dtype=torch.int32, device=DEVICE)
    value = on_device([[2.0, 1.0]] * len(token))
    found = verdicts_of(verdicts.walk(Best(value, token), drafts_of(drafts)))
    assert found == [
        sample_and_walk(tokens, parents, lambda row, samples=samples: samples[row])
        for (tokens, parents), samples in zip(drafts, tables, strict=True)
    ]


def test_only_rows_that_are_looked_at_matter():
    """A broken row behind a token that is not taken does no harm; block verification looks at all."""
    for value, fault in ((np.inf, Fault.NOT_FINITE), (-np.inf, Fault.NO_TOKEN)):
        best = Best(on_device([[1.0], [value]]), torch.zeros((2, 1), dtype=torch.int32, device=DEVICE))
        drafts = drafts_of([([1], [-1])])
        assert verdicts.walk(best, drafts)[0, 0] == Fault.NONE
        assert verdicts.walk(best, drafts_of([([0], [-1])]))[0, 0] == fault
        p = np.array([[0.5, 0.5], [0.5, 0.5]])
        made = laws.Laws(on_device(p), verdicts.sum_blocks(on_device(p)), best)
        probs = on_device([[0.1, 0.9], [0.0, 0.0]])
        for u, expected in ((0.1, fault), (0.9, Fault.NONE)):
            numbers = on_device([u, 0.5])
            assert verdicts.judge_chains(made, probs, drafts, numbers, by_block=False)[0, 0] == expected
