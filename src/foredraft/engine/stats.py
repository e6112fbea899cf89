"""Counting what happened: per request, and per round for tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from foredraft.algo.tree import height
from foredraft.types import TARGET, Draft, SpeculationStats, Timing


@dataclass(frozen=True, slots=True)
class Round:
    """One sequence's share of one pass, for `on_round` hooks and `generate --trace-rounds`."""

    sequence_id: int
    num_prompt_rows: int  # prompt tokens computed in this pass
    num_batch_rows: int  # rows of the whole pass
    proposed: Sequence[int]
    source: str
    accepted: Sequence[int]  # token ids that became text
    rejected: Sequence[int]  # token ids of `proposed` that did not; none where a draft token ended the text
    token: (
        int | None
    )  # correction or bonus; None while the prompt is not complete, or where a draft token ended the text
    draft_s: float
    pass_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's load at one moment, and its counters since it began."""

    num_running: int  # sequences
    num_waiting: int
    num_preemptions: int
    kv_cache_usage: float  # 0 .. 1: share of the target's blocks that running sequences hold
    prefix_cache_queries: int  # tokens looked up when a sequence was admitted
    prefix_cache_hits: int  # of these: found in the cache, so not computed again


@dataclass(slots=True)
class RequestStats:
    """Counters of one request. `passes` counts those after the prompt's."""

    began: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    num_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, dict[str, int]] = field(default_factory=dict)

    def start(self) -> None:
        self.began = perf_counter()

    def count_tokens(self, now: float) -> None:
        """A round has emitted tokens."""
        if self.first_token is None:
            self.first_token = now
        else:
            self.num_passes += 1
        self.last_token = now

    def count_draft(self, draft: Draft, num_accepted: int) -> None:
        if not draft.tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft.tokens)
        self.num_accepted_tokens += num_accepted
        longest = len(draft.tokens) if draft.parents is None else height(draft.parents)
        self.accepted_per_position += [0] * (longest - len(self.accepted_per_position))
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1
        counts = self.by_drafter.setdefault(draft.source, {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0})
        counts["drafts"] += 1
        counts["draft_tokens"] += len(draft.tokens)
        counts["accepted_tokens"] += num_accepted

    def speculation(self, origins: Sequence[str]) -> SpeculationStats:
        decoded = max(0, len(origins) - 1)
        return SpeculationStats(
            num_passes=self.num_passes,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(origin != TARGET for origin in origins),
            acceptance_rate=self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            mean_acceptance_length=1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0,
            tokens_per_pass=decoded / self.num_passes if self.num_passes else 0.0,
            accepted_per_position=tuple(self.accepted_per_position),
            by_drafter={name: dict(counts) for name, counts in self.by_drafter.items()},
        )

    def timing(self, load_s: float, num_tokens: int) -> Timing:
        first = self.first_token if self.first_token is not None else perf_counter()
        decode_s = (self.last_token or first) - first
        return Timing(
            load_s=load_s,
            prefill_s=first - self.began,
            decode_s=decode_s,
            tokens_per_s=(num_tokens - 1) / decode_s if decode_s > 0 and num_tokens > 1 else 0.0,
        )
