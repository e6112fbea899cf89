"""What a pass over M rows costs: the number that decides whether verifying a draft is nearly free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.machine import Meter
from foredraft.errors import ParameterError
from foredraft.models.base import BLOCK_SIZE, LanguageModel, Rows

#: Rows of a pass that fills the cache.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class PassCost:
    """T(rows) after `context` cached tokens, with logits for every row.

    ms: median of the repeats. ratio: ms over that of one row in the same context. gb_per_s: bytes of weights over time
    (keys and values come on top, not counted). bandwidth_share: of what the machine reads at most.
    """

    rows: int
    context: int
    ms: float
    ratio: float
    gb_per_s: float
    bandwidth_share: float


def measure_passes(
    model: LanguageModel,
    rows: Sequence[int],
    contexts: Sequence[int],
    *,
    num_repeats: int,
    read_gb_per_s: float,
    meter: Meter,
    on_pass: Callable[[int, int], None] | None = None,
) -> list[PassCost]:
    """Costs for every context and row count, in turns so that all counts see the same machine.

    Raises ParameterError if the model's context or cache is too small.
    """
    counts = sorted({1, *rows})
    capacity = min(model.max_model_len, model.num_blocks * BLOCK_SIZE)
    if max(contexts) + counts[-1] > capacity:
        raise ParameterError("--context", f"{max(contexts)} and {counts[-1]} rows do not fit in {capacity} tokens")
    costs = []
    for context in contexts:
        table = np.arange(-(-(context + counts[-1]) // BLOCK_SIZE), dtype=np.int32)
        fill_cache(model, table, context)
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(num_repeats):
            for count in counts:
                seconds[count].append(time_pass(model, table, context, count, meter))
                if on_pass is not None:
                    on_pass(context, count)
        one = median(seconds[1])
        for count in counts:
            if count in rows:
                costs.append(pass_cost(count, context, median(seconds[count]), one, model.weight_bytes, read_gb_per_s))
    return costs


def pass_cost(
    rows: int, context: int, seconds: float, seconds_of_one: float, weight_bytes: int, read_gb_per_s: float
) -> PassCost:
    gb_per_s = weight_bytes / seconds / 1e9
    return PassCost(rows, context, 1e3 * seconds, seconds / seconds_of_one, gb_per_s, gb_per_s / read_gb_per_s)


def fill_cache(model: LanguageModel, table: NDArray[np.int32], length: int) -> None:
    """Tokens of all sorts in slots 0 .. length-1."""
    tokens = text_of(model, length)
    for start in range(0, length, CHUNK):
        model.forward([Rows(table, start, tokens[start : start + CHUNK], num_logits=0)])


def time_pass(model: LanguageModel, table: NDArray[np.int32], context: int, count: int, meter: Meter) -> float:
    """Seconds. The rows are written after the context and forgotten, as a rejected draft is."""
    rows = Rows(table, context, text_of(model, count), num_logits=count)
    begin = meter.read()
    model.forward([rows])
    return meter.between(begin, meter.read()).wall_s


def text_of(model: LanguageModel, length: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    return [(7919 * i + 1) % model.vocab_size for i in range(length)]
