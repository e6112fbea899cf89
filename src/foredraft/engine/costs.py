"""What a pass costs: seconds over rows and context, measured at load and followed while running."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from foredraft.models.base import BLOCK_SIZE, LanguageModel, Rows

#: Row counts that are followed; costs in between are interpolated.
ROWS = (1, 4, 8, 16, 32, 64)
#: Of these the ones timed at load. Past them costs go on along the line from the second of them to the last.
TIMED_ROWS = ROWS[:4]
#: Passes over more rows are prompts: how long they take says nothing about verification.
MAX_ROWS = ROWS[-1]
#: Cached tokens that attention is timed over at load, and in how many rows at once. Of slower models than FAST_S a pass
#: the contexts in between are left out.
CONTEXTS, CONTEXT_ROWS = (0, 512, 2048), (1, 8)
FAST_S = 0.01
#: Where the lines beyond the last timed point end: past all that happens.
FAR = 1 << 24

#: How far an observation moves the mean: a pass cannot be faster than it is, but many things make it slower.
FASTER, SLOWER = 0.5, 0.08
#: What a count that is not seen is hoped to be cheaper by, with each pass; less after each disappointment.
IMPATIENCE, LEAST_IMPATIENCE = 0.004, 0.00025
#: Seconds that timing may take at load, if more than MIN_REPEATS rounds would fit, up to MAX_REPEATS.
TIMING_BUDGET_S = 0.15
MIN_REPEATS, MAX_REPEATS = 2, 6


class PassCosts:
    """Seconds of a pass: T = base(number of rows) + sum over sequences of what their contexts add.

    base is a running mean at each of ROWS, never falling with more rows. A context adds something to each row of its
    sequence and something once, however many rows these are (reading it); both grow along fixed curves (a line, or one
    that flattens where layers have windows) whose height is followed.

    What one count shows is also evidence for the others (the machine is busy): an observation scales all counts a
    little and its own the most, and the context by its part in the pass. Counts that are not seen are hoped to have
    become cheaper, so that a cost overestimated once is tried again some day.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        contexts: Sequence[int] = (0,),
        row_s: Sequence[float] = (0.0,),
        once_s: Sequence[float] | None = None,
    ) -> None:
        """seconds [len(ROWS)]: without context; row_s, once_s: what so many cached tokens add."""
        self._seconds = np.array(seconds, np.float64)
        self._hope = np.ones(len(ROWS))  # factor of what counts may cost that were not seen for long
        self._impatience = np.full(len(ROWS), IMPATIENCE)
        self._contexts = np.array([*contexts, FAR], np.float64)
        self._row_s = _prolonged(contexts, row_s)
        self._once_s = _prolonged(contexts, [0.0] * len(contexts) if once_s is None else once_s)

    def row_s(self, context: int) -> float:
        """What `context` cached tokens add to each row of their sequence."""
        return float(np.interp(context, self._contexts, self._row_s))

    def context_s(self, num_rows: int, context: int) -> float:
        """What they add to a sequence of so many rows."""
        return num_rows * self.row_s(context) + float(np.interp(context, self._contexts, self._once_s))

    def base_s(self, num_rows: int) -> float:
        """A pass over so many rows, but for what their contexts add."""
        return self.with_draft(num_rows, 0)[0]

    def with_draft(self, num_rows: int, max_draft: int) -> list[float]:
        """[max_draft + 1]: base_s of `num_rows` and m more, for each m."""
        hoped = np.maximum.accumulate(self._seconds * self._hope)
        seconds: list[float] = _between(np.arange(num_rows, num_rows + max_draft + 1), hoped).tolist()
        return seconds

    def observe(self, shares: Iterable[tuple[int, int]], seconds: float) -> None:
        """A pass took so long; shares: rows and cached tokens before them, of each sequence in it."""
        shares = list(shares)
        num_rows = sum(count for count, _ in shares)
        if num_rows > MAX_ROWS:
            return
        base = float(_between(num_rows, self._seconds))
        context_s = sum(self.context_s(count, context) for count, context in shares)
        excess = min(max(seconds / (base + context_s), 0.2), 2.0) - 1  # one hiccup must not mislead
        closeness = 1.0 / (1.0 + np.abs(np.array(ROWS) - num_rows))
        own = FASTER if excess < 0 else SLOWER
        is_cheaper = seconds < self.base_s(num_rows) + context_s
        self._seconds *= 1 + excess * (0.02 + own * closeness) * base / (base + context_s)
        for curve in (self._row_s, self._once_s):
            curve *= 1 + excess * (0.02 + own) * context_s / (base + context_s)
        seen = np.zeros(len(ROWS), bool)
        seen[bisect_right(ROWS, num_rows) - 1 : bisect_left(ROWS, num_rows) + 1] = True
        self._hope *= np.where(seen, 1.0, 1 - self._impatience)
        if not is_cheaper:
            disappointed = seen & (self._hope < 1)
            self._impatience[disappointed] = np.maximum(self._impatience[disappointed] / 2, LEAST_IMPATIENCE)
            self._hope[seen] = 1.0


def _between(num_rows: NDArray[np.int64] | int, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolated between ROWS, in proportion past the last."""
    far = seconds[-1] * (FAR / MAX_ROWS)
    return np.asarray(np.interp(num_rows, (*ROWS, FAR), (*seconds, far)))


def _prolonged(contexts: Sequence[int], seconds: Sequence[float]) -> NDArray[np.float64]:
    """And at FAR, as the last two of them go on."""
    slope = (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2]) if len(contexts) > 1 else 0.0
    return np.array([*seconds, seconds[-1] + slope * (FAR - contexts[-1])], np.float64)


def measure_pass_costs(model: LanguageModel, blocks: Sequence[int]) -> PassCosts:
    """Time the model on idle blocks of its own cache: the best of some rounds after a warm-up."""
    table = np.array(blocks, np.int32)
    counts = [n for n in TIMED_ROWS if n <= min(model.max_model_len, len(blocks) * BLOCK_SIZE)]
    _time(model, table, counts[-1])
    is_fast = _time(model, table, 1) < FAST_S
    capacity = min(model.max_model_len, model.num_blocks * BLOCK_SIZE)
    longest = max(0, capacity - CONTEXT_ROWS[-1]) // BLOCK_SIZE * BLOCK_SIZE
    contexts = sorted({min(context, longest) for context in (CONTEXTS if is_fast else CONTEXTS[::2])})
    began = perf_counter()
    rounds: list[list[float]] = []
    attention: list[list[list[float]]] = []
    while len(rounds) < (MAX_REPEATS if perf_counter() - began < TIMING_BUDGET_S else MIN_REPEATS):
        rounds.append([_time(model, table, n) for n in counts])
        attention.append([[_time_attention(model, table, n, c) for n in CONTEXT_ROWS] for c in contexts])
    seconds = _rising(np.min(rounds, axis=0)).tolist()
    few, most = counts[:2][-1], counts[-1]
    slope = (seconds[-1] - seconds[counts.index(few)]) / max(1, most - few)
    seconds += [seconds[-1] + slope * (n - most) for n in ROWS[len(counts) :]]
    return PassCosts(seconds, contexts, *_split_contexts(np.min(attention, axis=0)))


def _split_contexts(seconds: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """seconds [contexts, CONTEXT_ROWS] of whole passes to what contexts add to every row, and once: [contexts] each."""
    few, many = CONTEXT_ROWS
    by_few, by_many = (_rising(seconds) - _rising(seconds)[0]).T
    by_few = np.clip(by_few, by_many * few / many, by_many)
    row_s = (by_many - by_few) / (many - few)
    return row_s.tolist(), (by_few - few * row_s).tolist()


def _rising(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """What was disturbed took too long, so it counts at most as much as what is more work (further along axis 0)."""
    rising: NDArray[np.float64] = np.minimum.accumulate(seconds[::-1], axis=0)[::-1]
    return rising


def _time(model: LanguageModel, table: NDArray[np.int32], num_rows: int) -> float:
    began = perf_counter()
    model.forward([Rows(table, 0, [0] * num_rows, num_logits=num_rows)])
    return perf_counter() - began


def _time_attention(model: LanguageModel, table: NDArray[np.int32], num_rows: int, context: int) -> float:
    """A pass without logits after `context` cached tokens, in whole blocks.

    Nothing is computed for these and they take no memory: all stand in one block, whatever it holds.
    """
    looped = np.append(np.repeat(table[:1], context // BLOCK_SIZE), table[-1])
    began = perf_counter()
    model.forward([Rows(looped, context, [0] * num_rows, num_logits=0)])
    return perf_counter() - began
