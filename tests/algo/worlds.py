"""Tiny worlds: a target and a draft whose laws depend on everything before, and what sampling them must give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from foredraft.types import Verdict

from .chance import Chance, outcomes

Law = Callable[[tuple[int, ...]], np.ndarray]  # of the next token, after the tokens so far
Rule = Callable[[Chance, list[int], list[np.ndarray], list[np.ndarray]], Verdict]  # tokens, p [1 + n], q [n]


@dataclass
class RandomLaw:
    """Another law after each context, some of them with impossible tokens."""

    vocab: int
    seed: int
    laws: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def __call__(self, context: tuple[int, ...]) -> np.ndarray:
        if context not in self.laws:
            rng = np.random.default_rng([self.seed, len(context), *context])
            weights = rng.dirichlet(np.full(self.vocab, 0.8)) * (rng.random(self.vocab) > 0.2)
            weights[rng.integers(self.vocab)] += 0.1
            self.laws[context] = weights / weights.sum()
        return self.laws[context]


def fixed(*probabilities: float) -> Law:
    law = np.asarray(probabilities, dtype=np.float64)
    return lambda context: law


def random_worlds(count: int) -> list[tuple[int, Law, Law]]:
    return [
        (vocab, RandomLaw(vocab, seed), RandomLaw(vocab, 1000 + seed)) for seed in range(count) for vocab in (2, 3, 4)
    ]


def one_pass(
    rule: Rule, target: Law, draft: Law, gamma: int, is_enough: Callable[[list[int]], bool] = lambda tokens: False
) -> dict[tuple[int, ...], float]:
    """The law of what one pass emits: accepted tokens and the one that follows them.

    is_enough(tokens): whether to submit the tokens drawn so far rather than draw another.
    """

    def experiment(chance: Chance) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < gamma and not is_enough(tokens):
            tokens.append(chance.choose(draft(tuple(tokens))))
        p = [target(tuple(tokens[:i])) for i in range(len(tokens) + 1)]
        q = [draft(tuple(tokens[:i])) for i in range(len(tokens))]
        verdict = rule(chance, tokens, p, q)
        return (*(tokens[i] for i in verdict.accepted), verdict.token)

    return outcomes(experiment)


def completed(emitted: Mapping[tuple[int, ...], float], target: Law, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens when the target alone goes on after what was emitted."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, probability in emitted.items():
        if len(tokens) >= length:
            law[tokens[:length]] += probability
            continue
        vocab = len(target(()))
        for rest in product(range(vocab), repeat=length - len(tokens)):
            law[tokens + rest] += probability * chain_probability(target, tokens, rest)
    return law


def chain_probability(target: Law, before: Sequence[int], tokens: Sequence[int]) -> float:
    probability = 1.0
    for i, token in enumerate(tokens):
        probability *= float(target((*before, *tokens[:i]))[token])
    return probability


def assert_is_target(law: Mapping[tuple[int, ...], float], target: Law, length: int) -> None:
    """`law`, over sequences of `length` tokens, is the target's own."""
    for tokens in product(range(len(target(()))), repeat=length):
        expected = chain_probability(target, (), tokens)
        assert abs(law.get(tokens, 0.0) - expected) < 1e-12, (tokens, law.get(tokens, 0.0), expected)


def expected_accepted(emitted: Mapping[tuple[int, ...], float]) -> float:
    return sum(probability * (len(tokens) - 1) for tokens, probability in emitted.items())
