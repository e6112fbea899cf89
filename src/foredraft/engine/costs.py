"""What a pass costs: seconds over rows and context, measured at load and followed while running."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from foredraft.models.base import BLOCK_SIZE, LanguageModel, Rows

#: Row counts that are followed; costs in between are interpolated.
ROWS = (1, 4, 8, 16, 32, 64)
#: Of these the ones timed at load. Past them a pass is bound by arithmetic: proportional to rows.
TIMED_ROWS = ROWS[:4]
#: Passes over more rows are prompts: how long they take says nothing about verification.
MAX_ROWS = ROWS[-1]


#: How much of a larger count's extra cost each pass forgets.
FORGETTING = 0.004
#: Seconds that timing may take at load, if more than MIN_REPEATS rounds would fit, up to MAX_REPEATS.
TIMING_BUDGET_S = 0.15
MIN_REPEATS, MAX_REPEATS = 2, 6


class PassCosts:
    """Seconds of a pass by its number of rows: a running mean at each of ROWS, never falling with more rows.

    What one count shows is also evidence for its neighbours (the context grew, the machine is busy): an observation
    scales all counts a little and its own the most. Counts above it fall a little towards it, so that a cost that was
    overestimated once is tried again some day.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = np.array(seconds, np.float64)  # [len(ROWS)]

    def seconds(self, num_rows: int) -> float:
        return float(np.interp(num_rows, ROWS, self._seconds))

    def with_draft(self, num_rows: int, max_draft: int) -> list[float]:
        """[max_draft + 1]: a pass over `num_rows` rows and k draft tokens, for each k."""
        return np.interp(np.arange(num_rows, num_rows + max_draft + 1), ROWS, self._seconds).tolist()

    def observe(self, num_rows: int, seconds: float) -> None:
        if num_rows > MAX_ROWS:
            return
        ratio = min(max(seconds / self.seconds(num_rows), 0.5), 2.0)  # one hiccup must not mislead
        closeness = 1.0 / (1.0 + np.abs(np.array(ROWS) - num_rows))
        self._seconds *= 1 + (ratio - 1) * (0.02 + 0.08 * closeness)
        here = self.seconds(num_rows)
        self._seconds = np.where(
            self._seconds > here, self._seconds + FORGETTING * (here - self._seconds), self._seconds
        )
        self._seconds = np.maximum.accumulate(self._seconds)


def measure_pass_costs(model: LanguageModel, blocks: Sequence[int]) -> PassCosts:
    """Time the model at each of TIMED_ROWS on idle blocks of its own cache: the best of some rounds after a warm-up.

    What context adds is followed while running.
    """
    table = np.array(blocks, np.int32)
    counts = [n for n in TIMED_ROWS if n <= min(model.max_model_len, len(blocks) * BLOCK_SIZE)]
    _time(model, table, counts[-1])
    began = perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < MIN_REPEATS or (len(rounds) < MAX_REPEATS and perf_counter() - began < TIMING_BUDGET_S):
        rounds.append([_time(model, table, n) for n in counts])
    seconds = np.min(rounds, axis=0).tolist()
    seconds += [seconds[-1] * n / counts[-1] for n in ROWS[len(counts) :]]
    return PassCosts(np.maximum.accumulate(seconds).tolist())


def _time(model: LanguageModel, table: NDArray[np.int32], num_rows: int) -> float:
    began = perf_counter()
    model.forward([Rows(table, 0, [0] * num_rows, num_logits=num_rows)])
    return perf_counter() - began
