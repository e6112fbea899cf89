"""Exact enumeration of random experiments: the code under test runs once for every way its random numbers can fall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

Outcome = TypeVar("Outcome", bound=Hashable)


class Chance:
    """One way that everything falls. A branch is a list of choices; unexplored ones are taken in depth-first order."""

    def __init__(self, choices: list[int]) -> None:
        self.probability = 1.0
        self.taken: list[tuple[int, list[int]]] = []  # what was chosen, and what could have been besides
        self._choices = choices
        self._keyed: dict[Hashable, Uniform] = {}

    def choose(self, weights: Sequence[float]) -> int:
        """An index in proportion to the weights."""
        weights = [float(w) for w in weights]
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        choice = self._choices[at] if at < len(self._choices) else possible[0]
        self.taken.append((choice, possible[possible.index(choice) + 1 :]))
        self.probability *= weights[choice] / sum(weights)
        return choice

    def uniform(self, key: Hashable = None) -> Uniform:
        """A number in [0, 1); asked for twice by the same key, the same number."""
        if key is None:
            return Uniform(self)
        return self._keyed.setdefault(key, Uniform(self))


class Uniform:
    """A uniform number of which only as much is fixed as comparisons have asked: it lies in [low, high)."""

    def __init__(self, chance: Chance) -> None:
        self._chance, self._low, self._high = chance, 0.0, 1.0

    def is_below(self, threshold: float) -> bool:
        inside = min(max(threshold, self._low), self._high)
        if self._chance.choose([inside - self._low, self._high - inside]) == 0:
            self._high = inside
            return True
        self._low = inside
        return False

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, factor)

    def __lt__(self, threshold: float) -> bool:
        return self.is_below(threshold)

    __le__ = __lt__


class Scaled:
    """factor * uniform."""

    def __init__(self, uniform: Uniform, factor: float) -> None:
        self._uniform, self._factor = uniform, factor

    def __lt__(self, threshold: float) -> bool:
        return self._uniform.is_below(threshold / self._factor) if self._factor > 0 else threshold > 0

    __le__ = __lt__


def outcomes(experiment: Callable[[Chance], Outcome]) -> dict[Outcome, float]:
    """The exact law of what `experiment` returns."""
    law: dict[Outcome, float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        chance = Chance(pending.pop())
        outcome = experiment(chance)
        law[outcome] += chance.probability
        fixed = len(chance._choices)
        for at in range(fixed, len(chance.taken)):
            before = [choice for choice, _ in chance.taken[:at]]
            pending += [[*before, other] for other in chance.taken[at][1]]
    assert abs(sum(law.values()) - 1) < 1e-12
    return dict(law)


def draw_by_comparison(weights: np.ndarray, u: Uniform) -> int:
    """`draw_from` for a number that only comparisons fix."""
    sums = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])
    return next((i for i in range(last) if weights[i] > 0 and u < sums[i] / sums[-1]), last)
