"""Who runs in the next step, and how many rows each gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import EngineSnapshot
from foredraft.kvcache.blocks import BlockPool, SlotTable, num_blocks_for
from foredraft.kvcache.prefixes import PrefixStore
from foredraft.types import MAX_DRAFT


@dataclass(frozen=True, slots=True)
class Planned:
    """`num_rows` uncomputed tokens of `seq` go now. `completes`: they are all it has, so a next token can be drawn."""

    seq: Sequence
    num_rows: int
    completes: bool


class Scheduler:
    """Waiting sequences are admitted in order, once blocks for their whole length are sure to be there.

    So a running sequence never lacks a block: the blocks it may yet need are counted from its admission to its end.
    """

    def __init__(
        self, pool: BlockPool, prefixes: PrefixStore, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prefix_queries = self._prefix_hits = 0  # tokens

    def snapshot(self) -> EngineSnapshot:
        owned = sum(len(s.table.blocks) for s in self._running if s.table is not None)
        return EngineSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=0,  # a running sequence never lacks a block
            kv_cache_usage=owned / self._pool.num_blocks,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Sequence]:
        return [*self._waiting, *self._running]

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def plan(self) -> tuple[list[Planned], list[Sequence]]:
        """The rows of the next step, and the sequences that it admits. Decoding comes before prompts."""
        admitted = self._admit()
        budget = self._max_num_batched_tokens
        planned = []
        for seq in sorted(self._running, key=lambda s: s.num_uncomputed):
            num_rows = min(seq.num_uncomputed, budget)
            if num_rows:
                planned.append(Planned(seq, num_rows, completes=num_rows == seq.num_uncomputed))
                budget -= num_rows
        return planned, admitted

    def remove(self, seq: Sequence) -> None:
        """A finished or aborted sequence leaves, if it is here; what its cache holds may serve the next prompt."""
        if seq in self._running:
            self._running.remove(seq)
            if seq.table is not None:
                self._prefixes.keep(seq.tokens[: seq.num_computed], seq.table)
                seq.table = None
        elif seq in self._waiting:
            self._waiting.remove(seq)

    def tables(self) -> SequenceOf[SlotTable]:
        """All tables that own blocks, for integrity checks."""
        return [*(s.table for s in self._running if s.table is not None), *self._prefixes.tables]

    def _admit(self) -> list[Sequence]:
        admitted = []
        while self._waiting and len(self._running) < self._max_num_seqs and self._has_room(self._waiting[0]):
            seq = self._waiting.popleft()
            seq.table, seq.num_computed = self._prefixes.take(seq.tokens)
            self._prefix_queries += len(seq.tokens)
            self._prefix_hits += seq.num_computed
            self._running.append(seq)
            admitted.append(seq)
        return admitted

    def _has_room(self, seq: Sequence) -> bool:
        promised = sum(_blocks_at_most(s) for s in [*self._running, seq])
        owned = sum(len(s.table.blocks) for s in self._running if s.table is not None)
        self._prefixes.make_room(promised - owned)
        return promised - owned <= self._pool.num_free


def _blocks_at_most(seq: Sequence) -> int:
    return num_blocks_for(seq.max_len + MAX_DRAFT)
