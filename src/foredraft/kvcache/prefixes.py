"""Caches of finished sequences, kept until their blocks are needed: a chat's next turn starts where the last ended."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.kvcache.blocks import BlockPool, SlotTable, common_prefix


class PrefixStore:
    """The newest `max_num_prefixes` finished tables with the tokens they hold.

    A table has one owner: this store, or the sequence that took it.
    """

    def __init__(self, pool: BlockPool, max_num_prefixes: int) -> None:
        self._pool = pool
        self._max_num_prefixes = max_num_prefixes
        self._kept: list[tuple[list[int], SlotTable]] = []  # oldest first

    @property
    def tables(self) -> list[SlotTable]:
        return [table for _, table in self._kept]

    def keep(self, tokens: Sequence[int], table: SlotTable) -> None:
        """Take over a finished sequence's table, whose first len(tokens) slots hold `tokens`."""
        self._kept.append((list(tokens), table))
        while len(self._kept) > self._max_num_prefixes:
            self._drop_oldest()

    def take(self, tokens: Sequence[int]) -> tuple[SlotTable, int]:
        """A table for `tokens`, and how many of them it already holds: all but the last at most."""
        shared = [min(common_prefix(held, tokens), len(tokens) - 1) for held, _ in self._kept]
        best = max(range(len(shared)), key=lambda i: shared[i], default=-1)
        if best < 0 or shared[best] == 0:
            return SlotTable(self._pool), 0
        _, table = self._kept.pop(best)
        return table, shared[best]

    def make_room(self, num_blocks: int) -> None:
        """Drop the oldest prefixes until so many blocks are free, or nothing is left to drop."""
        while self._kept and self._pool.num_free < num_blocks:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, table = self._kept.pop(0)
        table.release()
