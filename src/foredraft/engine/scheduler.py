"""Who runs in the next step, and how many rows each gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import EngineSnapshot
from foredraft.kvcache.blocks import BlockPool, SlotTable, num_blocks_for
from foredraft.models.base import BLOCK_SIZE
from foredraft.types import MAX_DRAFT

#: Rows of prompts in a pass that answers wait for: 512 take over a second on a model of 1.5 billion weights. From a few
#: dozen rows on a pass is bound by arithmetic (`engine/costs.py`), so that chunks of this size cost little.
MAX_PROMPT_ROWS_BESIDE_ANSWERS = 128


@dataclass(frozen=True, slots=True)
class Planned:
    """`num_rows` uncomputed tokens of `seq` go now. `completes`: they are all it has, so a next token can be drawn.

    A draft behind them may take `num_draft_slots` slots of the cache.
    """

    seq: Sequence
    num_rows: int
    completes: bool
    num_draft_slots: int


class Scheduler:
    """First come, first served. Invariants between steps:

        waiting  [ preempted, oldest first | new, oldest first ]    own no blocks
        running  [ in the order of admission ]                      own the blocks of all their text so far

    A sequence is admitted when the blocks of its text are there now, whatever it may yet grow to. When a running one
    grows and no block is left, the last admitted gives its own back and waits at the head of the queue. Its blocks are
    kept until they are needed, so little is computed twice. The first admitted always goes on.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_running = min(max_num_seqs, max_num_batched_tokens)  # a row for each, so that none starves
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._num_preemptions = 0
        self._prefix_queries = self._prefix_hits = 0  # tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Sequence]:
        return [*self._waiting, *self._running]

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def plan(self) -> tuple[list[Planned], list[Sequence]]:
        """The rows of the next step, and the sequences that run for the first time. Decoding comes before prompts."""
        self._grow()
        new = self._admit()
        budget, spare = self._max_num_batched_tokens, self._pool.num_free
        planned = []
        decoding = [seq for seq in self._running if seq.num_uncomputed == 1]
        if decoding:
            budget = min(budget, len(decoding) + MAX_PROMPT_ROWS_BESIDE_ANSWERS)
        for seq in sorted(self._running, key=lambda s: s.num_uncomputed > 1):
            num_rows = min(seq.num_uncomputed, budget)
            if not num_rows:
                continue
            budget -= num_rows
            completes = num_rows == seq.num_uncomputed
            num_slots = 0
            if completes:
                owned = len(seq.table.blocks)
                more = min(num_blocks_for(len(seq.tokens) + MAX_DRAFT) - owned, spare)
                spare -= more
                num_slots = min((owned + more) * BLOCK_SIZE - len(seq.tokens), MAX_DRAFT)
            planned.append(Planned(seq, num_rows, completes, num_slots))
        return planned, new

    def remove(self, seq: Sequence) -> None:
        """A finished or aborted sequence leaves, if it is here; what it published may serve the next prompt."""
        for queue in (self._running, self._waiting):
            if seq in queue:
                queue.remove(seq)
        seq.table.release()

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            kv_cache_usage=1 - self._pool.num_free / self._pool.num_blocks,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
        )

    def tables(self) -> SequenceOf[SlotTable]:
        """All tables that may own blocks, for integrity checks."""
        return [seq.table for seq in self.unfinished()]

    def _grow(self) -> None:
        """Blocks for what the running ones have written. The oldest are served first, from the youngest if need be."""
        for index, seq in enumerate(self._running):  # loses its end meanwhile
            while not seq.table.can_reserve(len(seq.tokens)):
                self._preempt_last()
                if index == len(self._running):
                    return
            seq.table.reserve(len(seq.tokens))

    def _preempt_last(self) -> None:
        seq = self._running.pop()
        seq.preempt()
        self._num_preemptions += 1
        self._waiting.appendleft(seq)

    def _admit(self) -> list[Sequence]:
        """Move sequences from waiting to running, in order. Returns those that were not there before.

        One whose next block is being computed by another prompt waits for it, and keeps a place.
        """
        if not self._waiting or len(self._running) >= self._max_num_running:
            return []
        new: list[Sequence] = []
        held_back: list[Sequence] = []
        computing = {h for seq in self._running if seq.num_uncomputed > 1 for h in seq.table.unpublished(seq.tokens)}
        while self._waiting and len(self._running) + len(held_back) < self._max_num_running:
            seq = self._waiting[0]
            hashes = seq.table.hashes(seq.tokens)
            known = self._pool.find(hashes)
            if len(known) < len(hashes) and hashes[len(known)] in computing:
                held_back.append(self._waiting.popleft())
                continue
            missing = num_blocks_for(len(seq.tokens)) - len(known)
            if missing + len(self._running) > self._pool.num_free - self._pool.num_kept(known):  # each may grow by one
                break
            self._running.append(self._waiting.popleft())
            seq.num_computed = seq.table.share(seq.tokens)
            seq.table.reserve(len(seq.tokens))
            computing.update(hashes[len(known) :])
            if not seq.num_preemptions:
                new.append(seq)
                seq.num_cached_tokens = seq.num_computed
                self._prefix_queries += len(seq.tokens)
                self._prefix_hits += seq.num_computed
        self._waiting.extendleft(reversed(held_back))
        return new
