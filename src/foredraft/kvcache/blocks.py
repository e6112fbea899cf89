"""Physical blocks of a KV cache: who owns which.

One `BlockPool` a model; one `SlotTable` a sequence and model. Slots are the sequence's own addresses 0, 1, 2, …; its
table maps each block of them to a physical block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ForedraftError
from foredraft.models.base import BLOCK_SIZE


class BlockPool:
    """Physical blocks 0 .. num_blocks-1, each free or owned by exactly one `SlotTable`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # lowest on top, so that few pages are ever touched

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Raises ForedraftError when fewer than `count` blocks are free; nothing is taken then."""
        if count > len(self._free):
            raise ForedraftError(f"the KV cache is full ({self.num_blocks * BLOCK_SIZE} tokens): lower max_model_len")
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        self._free.extend(reversed(list(blocks)))

    def check_integrity(self, tables: Iterable[SlotTable]) -> None:
        """Raises ForedraftError unless every block is free or owned exactly once."""
        owned = [int(b) for table in tables for b in table.blocks]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            raise ForedraftError("the KV cache lost or shared a block: please report this")


class SlotTable:
    """One sequence's blocks in one pool. Grows by `reserve`; `release` gives all blocks back."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: NDArray[np.int32] = np.empty(0, np.int32)

    def reserve(self, num_slots: int) -> NDArray[np.int32]:
        """Have blocks for at least `num_slots` slots; the block table."""
        missing = num_blocks_for(num_slots) - len(self.blocks)
        if missing > 0:
            self.blocks = np.append(self.blocks, np.array(self._pool.allocate(missing), np.int32))
        return self.blocks

    def release(self) -> None:
        self._pool.release(self.blocks.tolist())
        self.blocks = np.empty(0, np.int32)


def num_blocks_for(num_slots: int) -> int:
    return -(-num_slots // BLOCK_SIZE)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
