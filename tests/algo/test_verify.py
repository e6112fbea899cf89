"""Every rule, by exact enumeration: what it emits is the target's law, and it accepts as much as theory says."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foredraft.algo.tree import chain
from foredraft.algo.verify import block_test, draw_from, excess, ratio_test, sample_and_walk
from foredraft.types import Verdict

from .chance import Chance, outcomes
from .worlds import (
    Law,
    Rule,
    assert_is_target,
    completed,
    expected_accepted,
    fixed,
    one_pass,
    random_worlds,
)


def by_ratio(chance: Chance, tokens: list[int], p: list[np.ndarray], q: list[np.ndarray]) -> Verdict:
    return ratio_test(tokens, chain(len(tokens)), p, q, [chance.uniform() for _ in tokens], chance.choose)


def by_block(chance: Chance, tokens: list[int], p: list[np.ndarray], q: list[np.ndarray]) -> Verdict:
    return block_test(tokens, p, q, [chance.uniform() for _ in tokens], chance.choose)


def by_walk(chance: Chance, tokens: list[int], p: list[np.ndarray], q: list[np.ndarray]) -> Verdict:
    return sample_and_walk(tokens, chain(len(tokens)), lambda row: chance.choose(p[row]))


def assert_lossless(rule: Rule) -> None:
    for _, target, draft in random_worlds(4):
        for gamma in (1, 2, 3):
            emitted = one_pass(rule, target, draft, gamma)
            assert_is_target(completed(emitted, target, gamma + 1), target, gamma + 1)


def test_ratio_test_is_lossless():
    assert_lossless(by_ratio)


def test_block_test_is_lossless():
    assert_lossless(by_block)


def test_walk_is_lossless():
    assert_lossless(by_walk)


def test_stopping_after_a_drawn_token_is_lossless():
    """Drafting may stop because of the tokens drawn so far, as long as all of them are submitted."""
    for _, target, draft in random_worlds(4):
        for rule in (by_ratio, by_block):
            emitted = one_pass(rule, target, draft, 3, lambda tokens: bool(tokens) and tokens[-1] == 0)
            assert_is_target(completed(emitted, target, 4), target, 4)


def test_one_hot_drafts_are_lossless_under_every_rule():
    for vocab, target, _ in random_worlds(2):
        for tokens in product(range(vocab), repeat=2):

            def experiment(chance: Chance, rule: Rule, tokens=tokens, target=target, vocab=vocab) -> tuple[int, ...]:
                p = [target(tokens[:i]) for i in range(3)]
                verdict = rule(chance, list(tokens), p, list(np.eye(vocab)[list(tokens)]))
                return (*tokens[: len(verdict.accepted)], verdict.token)

            laws = [
                outcomes(lambda chance, rule=rule: experiment(chance, rule)) for rule in (by_ratio, by_block, by_walk)
            ]
            for law in laws:
                assert_is_target(completed(law, target, 3), target, 3)
            for law in laws[1:]:  # all accept x with probability p(x)
                assert law == pytest.approx(laws[0], abs=1e-12)


def test_acceptance_of_block_and_ratio():
    target, draft = fixed(1 / 3, 2 / 3), fixed(2 / 3, 1 / 3)
    assert expected_accepted(one_pass(by_ratio, target, draft, 2)) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(one_pass(by_block, target, draft, 2)) == pytest.approx(11 / 9, abs=1e-12)


def test_acceptance_on_three_tokens_in_closed_form():
    """The acceptance of block verification is E[sum of the prefixes' h], and never below the ratio test's."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    ratio = [min(1, a / b) for a, b in zip(p, q, strict=True)]
    alpha = np.minimum(p, q).sum()
    assert expected_accepted(one_pass(by_ratio, fixed(*p), fixed(*q), 2)) == pytest.approx(alpha + alpha**2, abs=1e-12)
    expected = 0.0
    for i, j in product(range(3), repeat=2):
        mass = np.maximum(ratio[i] * p - q, 0).sum()
        h1 = mass / (mass + 1 - ratio[i]) if mass + 1 - ratio[i] > 0 else 1.0
        h2 = min(1.0, ratio[i] * p[j] / q[j])
        expected += q[i] * q[j] * (2 * h2 + (1 - h2) * h1)
    assert expected_accepted(one_pass(by_block, fixed(*p), fixed(*q), 2)) == pytest.approx(expected, abs=1e-12)
    assert expected > alpha + alpha**2 + 0.01


def test_block_never_accepts_less_than_ratio():
    for _, target, draft in random_worlds(4):
        for gamma in (1, 2, 3):
            block = expected_accepted(one_pass(by_block, target, draft, gamma))
            ratio = expected_accepted(one_pass(by_ratio, target, draft, gamma))
            assert block >= ratio - 1e-12
            if gamma == 1:
                assert block == pytest.approx(ratio, abs=1e-12)


def test_impossible_tokens_never_pass_even_at_uniform_zero():
    p = [np.array([1.0, 0.0])] * 2
    q = [np.array([0.5, 0.5])]
    first = lambda weights: int(np.flatnonzero(weights)[0])  # noqa: E731
    assert ratio_test([1], (-1,), p, q, [0.0], first) == Verdict((), 0)
    assert block_test([1], p, q, [0.0], first) == Verdict((), 0)
    # The prefix of one token has rho = 0 and no surplus after it: its threshold is 0 as well.
    p, q = [np.array([1.0, 0.0]), np.array([0.5, 0.5]), np.array([0.5, 0.5])], [np.array([0.5, 0.5])] * 2
    assert block_test([1, 0], p, q, [0.0, 0.0], first) == Verdict((), 0)


def test_drawing_skips_impossible_tokens():
    assert draw_from(np.array([0.0, 0.0, 1.0, 0.0]), 0.0) == 2
    assert draw_from(np.array([0.0, 0.2, 0.8, 0.0]), np.nextafter(1, 0)) == 2
    assert [draw_from(np.array([0.25, 0.25, 0.5]), u) for u in (0.0, 0.2499, 0.25, 0.49, 0.5, 0.99)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_excess_without_mass_is_the_target():
    p = np.array([0.25, 0.75])
    assert excess(p, p) is p
    assert np.array_equal(excess(p, np.array([0.5, 0.5])), [0.0, 1.0])
    # A residual that only rounding emptied is drawn from p.
    seen = []
    block_test([0], [p, p], [p], [np.nextafter(1, 0)], lambda weights: seen.append(weights) or 0)
    ratio_test([0], (-1,), [p, p], [np.array([0.3, 0.8])], [0.99], lambda weights: seen.append(weights) or 0)
    assert np.array_equal(seen[1], p)


def without_replacement(chance: Chance, q: np.ndarray, num_children: int) -> tuple[list[int], list[np.ndarray]]:
    """Children drawn one after another, each from the law without the earlier ones."""
    tokens, laws = [], []
    for _ in range(num_children):
        if not q.sum() > 0:
            break
        q = q / q.sum()
        laws.append(q)
        tokens.append(chance.choose(q))
        q = q.copy()
        q[tokens[-1]] = 0
    return tokens, laws


def sampled_children(p: np.ndarray, q: np.ndarray, num_children: int) -> dict[tuple[int, ...], float]:
    """One node with several sampled children: (accepted token, bonus) or (corrected token,)."""

    def experiment(chance: Chance) -> tuple[int, ...]:
        tokens, laws = without_replacement(chance, q, num_children)
        rows = [p] * (1 + len(tokens))
        uniforms = [chance.uniform() for _ in tokens]
        verdict = ratio_test(tokens, [-1] * len(tokens), rows, laws, uniforms, chance.choose)
        return (*(tokens[i] for i in verdict.accepted), verdict.token)

    return outcomes(experiment)


def test_sampled_children_are_lossless():
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2])
    for num_children, acceptance in ((1, 0.70), (2, 0.82)):
        emitted = sampled_children(p, q, num_children)
        assert expected_accepted(emitted) == pytest.approx(acceptance, abs=1e-12)
        assert_is_target(completed(emitted, fixed(*p), 2), fixed(*p), 2)
    for vocab, target, draft in random_worlds(4):
        for num_children in range(1, vocab + 1):
            emitted = sampled_children(target(()), draft(()), num_children)
            assert_is_target(completed(emitted, fixed(*target(())), 2), fixed(*target(())), 2)


def test_two_level_tree_of_sampled_children_is_lossless():
    """Two children at the root, two below each of them; the laws differ at every node."""

    def experiment(chance: Chance, target: Law, draft: Law) -> tuple[int, ...]:
        tokens, q = without_replacement(chance, draft(()), 2)
        parents = [-1] * len(tokens)
        for node in range(len(tokens)):
            below, laws = without_replacement(chance, draft((tokens[node],)), 2)
            tokens, q, parents = tokens + below, q + laws, parents + [node] * len(below)
        paths = [(tokens[i],) if parents[i] < 0 else (tokens[parents[i]], tokens[i]) for i in range(len(tokens))]
        p = [target(()), *(target(path) for path in paths)]
        verdict = ratio_test(tokens, parents, p, q, [chance.uniform() for _ in tokens], chance.choose)
        return (*(tokens[i] for i in verdict.accepted), verdict.token)

    for vocab, target, draft in random_worlds(1):
        if vocab < 4:
            emitted = outcomes(lambda chance, target=target, draft=draft: experiment(chance, target, draft))
            assert_is_target(completed(emitted, target, 3), target, 3)


def test_walk_over_any_tree_is_lossless():
    """Tokens and shape are arbitrary; the walk takes the deepest path that the target's samples follow."""
    shapes = [([0, 1], [-1, -1]), ([0, 1, 0, 1], [-1, -1, 0, 1]), ([1, 1, 0, 0, 1], [-1, 0, 0, 1, 2])]
    for _, target, _ in random_worlds(2):
        for tokens, parents in shapes:

            def path(node: int, tokens=tokens, parents=parents) -> tuple[int, ...]:
                return () if node < 0 else (*path(parents[node], tokens, parents), tokens[node])

            def experiment(chance: Chance, tokens=tokens, parents=parents, target=target, path=path) -> tuple[int, ...]:
                verdict = sample_and_walk(tokens, parents, lambda row: chance.choose(target(path(row - 1))))
                return (*(tokens[i] for i in verdict.accepted), verdict.token)

            emitted = outcomes(experiment)
            assert_is_target(completed(emitted, target, 4), target, 4)
            reached = {path(node) for node in range(len(tokens))}
            for emission in emitted:  # it stops only where the tree ends
                assert emission not in reached
                assert emission[:-1] in reached | {()}


def test_wrong_use_of_a_rule_is_biased_as_computed():
    """The enumeration sees what theory predicts for drafters that break the contract of `Draft.probs`."""
    # q is not the law the token was drawn from: drawn greedily, tested against the raw law.
    p, q = np.array([0.4, 0.35, 0.25]), np.array([0.5, 0.3, 0.2])
    law = outcomes(lambda chance: _first(by_ratio(chance, [0], [p, p], [q]), [0]))
    assert [law[i] for i in range(3)] == pytest.approx([0.8, 0.1, 0.1], abs=1e-12)
    # A drawn token is withheld because of its own probability.
    p, q = np.array([0.7, 0.3]), np.array([0.6, 0.4])

    def withheld(chance: Chance) -> int:
        token = chance.choose(q)
        return _first(by_ratio(chance, [token], [p, p], [q]), [token]) if q[token] >= 0.5 else chance.choose(p)

    law = outcomes(withheld)
    assert [law[i] for i in range(2)] == pytest.approx([0.88, 0.12], abs=1e-12)


def _first(verdict: Verdict, tokens: list[int]) -> int:
    return tokens[0] if verdict.accepted else verdict.token
