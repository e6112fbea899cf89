"""Inputs of the kernels, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tests.triton_device import DEVICE  # isort: skip  (before any kernel is defined)

import numpy as np
import torch

from foredraft.algo.noise import NoiseKey
from foredraft.algo.triton.laws import Best, Filters, Laws
from foredraft.algo.triton.noise import Keys
from foredraft.algo.triton.verdicts import Drafts, sum_blocks
from foredraft.types import SamplingParams, Verdict


def on_device(values: object, dtype: type = np.float64) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(DEVICE)


def words64(values: Sequence[int]) -> torch.Tensor:
    """Integers of 64 bits, with or without a sign."""
    return on_device(np.asarray([v % 2**64 for v in values], dtype=np.uint64).view(np.int64), np.int64)


def keys_of(keys: Sequence[NoiseKey]) -> Keys:
    return Keys(
        words64([k.seed for k in keys]),
        words64([k.position for k in keys]),
        words64([k.choice << 8 | k.stream for k in keys]),
        words64([k.num_passes for k in keys]),
    )


def filters_of(params: Sequence[SamplingParams]) -> Filters:
    return Filters(
        on_device([p.temperature for p in params]),
        on_device([p.min_p for p in params]),
        on_device([p.top_k for p in params], np.int64),
        on_device([p.top_p for p in params]),
    )


def laws_of(p: np.ndarray) -> Laws:
    """Laws [rows, vocab] as they are."""
    weights = on_device(p)
    sums = sum_blocks(weights)
    return Laws(weights, sums, Best(torch.ones_like(sums), torch.zeros_like(sums, dtype=torch.int32)))


def drafts_of(drafts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Drafts:
    """Tokens and parents of each sequence, in rows behind one another."""
    lengths = [len(tokens) for tokens, _ in drafts]
    first_rows = np.cumsum([0, *(1 + n for n in lengths[:-1])])
    tokens = [t for own, _ in drafts for t in (*own, 0)]
    parents = [t for _, own in drafts for t in (*own, -2)]
    fields = (on_device(values, np.int64) for values in (first_rows, lengths, tokens, parents))
    return Drafts(*fields, most_tokens=max(lengths))


def verdicts_of(table: torch.Tensor) -> list[Verdict]:
    """Of sound rows."""
    assert not table[:, 0].any()
    return [Verdict(tuple(nodes[:count]), token) for _, token, count, *nodes in table.tolist()]
