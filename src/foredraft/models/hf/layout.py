"""Where the rows of a pass stand in the cache, and what each of them sees.

Transformers runs a rectangle [batch, queries]; sequences bring rows of their own number, from their own place on, as a
chain or a tree. Rows are filled up at the end, keys are the slots of whole blocks:

    rows     A: 5 6 7 -     keys of A: | 0 1 2 3 4 5 6 7 . . . . |     a row sees the committed slots and its ancestors
             B: 2 - - -     keys of B: | 0 1 2 . . . . . . . . . |     a filler (-) sees slot 0, and nobody reads it

A shape may have room for more of all three: then whole sequences are fillers, and blocks that nobody sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.algo.tree import depths, tree_mask
from foredraft.models.base import BLOCK_SIZE, Rows


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pass has room for."""

    num_sequences: int
    num_queries: int  # rows of each
    num_blocks: int  # that each reads

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.num_queries} rows over {self.num_blocks} blocks"


@dataclass(frozen=True, slots=True)
class Layout:
    """One pass of Transformers: B sequences of at most Q rows, K keys in whole blocks."""

    tokens: torch.Tensor  # [B, Q]
    positions: torch.Tensor  # [B, Q] logical
    key_positions: torch.Tensor  # [B, K] logical
    visible: torch.Tensor  # [B, 1, Q, K] bool: committed slots and ancestors
    blocks: torch.Tensor  # [B, K / BLOCK_SIZE] physical
    num_blocks: int  # that the cache must have
    rows: torch.Tensor | None  # [rows] numbers in [B * Q] of those that are written; None: all are
    slots: torch.Tensor  # [rows] physical slots that they are written to

    @property
    def num_queries(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_keys(self) -> int:
        return self.key_positions.shape[1]


def least_shape(batch: Sequence[Rows], num_queries: int = 0) -> Shape:
    """What holds a batch; of at least `num_queries` rows a sequence."""
    num_rows = [len(rows.tokens) for rows in batch]
    reached = [rows.start + max(n, num_queries) for rows, n in zip(batch, num_rows, strict=True)]
    num_blocks = -(-max(reached) // BLOCK_SIZE)  # of fixed rows, keys do not depend on the draft either
    return Shape(len(batch), max(num_queries, *num_rows), num_blocks)


def make_layout(batch: Sequence[Rows], device: torch.device, shape: Shape, scratch: int | None = None) -> Layout:
    """The rectangle of a batch, on `device`.

    scratch: a physical block that no sequence has. With it fillers are written, there, so that the sizes of all tensors
    are the shape's alone.
    """
    num_sequences, num_queries, num_blocks = shape.num_sequences, shape.num_queries, shape.num_blocks
    tokens, positions = np.zeros((2, num_sequences, num_queries), np.int64)
    key_positions = np.tile(np.arange(num_blocks * BLOCK_SIZE), (num_sequences, 1))
    visible = np.zeros((num_sequences, num_queries, num_blocks * BLOCK_SIZE), np.bool_)
    blocks = np.zeros((num_sequences, num_blocks), np.int64)
    slots = np.full((num_sequences, num_queries), -1)
    for b, rows in enumerate(batch):
        n = len(rows.tokens)
        end = rows.start + n
        own = rows.block_table[: -(-end // BLOCK_SIZE)]
        blocks[b, : len(own)] = own
        written = np.arange(rows.start, end)
        slots[b, :n] = own[written // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + written % BLOCK_SIZE
        tokens[b, :n] = rows.tokens
        positions[b, :n] = written if rows.parents is None else np.add(rows.start, depths(rows.parents))
        key_positions[b, rows.start : end] = positions[b, :n]
        visible[b, :n, : rows.start] = True
        chain = np.tri(n, dtype=np.bool_)
        visible[b, :n, rows.start : end] = chain if rows.parents is None else tree_mask(rows.parents)
        visible[b, n:, 0] = True
    visible[len(batch) :, :, 0] = True
    is_written = slots.ravel() >= 0
    if scratch is not None:
        slots[slots < 0] = scratch * BLOCK_SIZE

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Layout(
        tokens=on_device(tokens),
        positions=on_device(positions),
        key_positions=on_device(key_positions),
        visible=on_device(visible[:, None]),
        blocks=on_device(blocks),
        num_blocks=1 + (int(blocks.max()) if scratch is None else scratch),
        rows=on_device(np.flatnonzero(is_written)) if scratch is None else None,
        slots=on_device(slots.ravel()[is_written] if scratch is None else slots.ravel()),
    )


_current: ContextVar[Layout | None] = ContextVar("foredraft_layout", default=None)


@contextmanager
def running(layout: Layout) -> Iterator[None]:
    """Within it the cache and the masks of this thread follow `layout`."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def current_layout() -> Layout | None:
    return _current.get()
