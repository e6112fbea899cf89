"""Batches of texts with known acceptance under a controller, on a clock that is a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foredraft.drafters.base import DraftNeeds
from foredraft.engine.controller import Controller
from foredraft.engine.costs import ROWS, PassCosts
from foredraft.engine.scheduler import Planned
from foredraft.engine.sequence import Sequence as EngineSequence
from foredraft.models.base import Rows
from foredraft.types import TARGET, Draft, DraftRequest, SamplingParams
from tests.engine.build import generator

PassTime = Callable[[int, int], float]  # of rows, and of cached tokens summed over them


def flat_to_eight(num_rows: int, context: int) -> float:
    """Seconds: the weights are read anyway, and from eight rows on arithmetic takes longer."""
    return 0.02 * (1 + 0.01 * num_rows) * max(1.0, num_rows / 8) + 1e-7 * context


class World:
    """Running sequences. Every draft token for sequence s is right with chance acceptance[s], given those before it."""

    def __init__(
        self,
        pass_s: PassTime,
        acceptance: Sequence[float],
        *,
        draft_s: float = 0.0,
        contexts: Sequence[int] | None = None,
        max_draft: int = 16,
        params: SamplingParams | None = None,
    ) -> None:
        self.pass_s = pass_s
        self.acceptance = acceptance
        self.draft_s = draft_s
        self.drafter: Any = Oracle()
        self.rng = np.random.default_rng(0)
        row_s = [(pass_s(1, c) - pass_s(1, 0)) for c in (0, 1000)]
        costs = PassCosts([pass_s(n, 0) for n in ROWS], (0, 1000), row_s)
        self.controller = Controller([self.drafter], costs, max_draft=max_draft)
        self.seqs = self._make_sequences(contexts or [0] * len(acceptance), params or SamplingParams(temperature=0))
        for seq in self.seqs:
            self.controller.begin(seq)
        self.seconds, self.num_tokens = 0.0, 0

    def lengths(self) -> list[int]:
        """What would be drafted now, by sequence."""
        return self._by_sequence(self._requests())

    def planned(self) -> list[Planned]:
        return [Planned(seq, 1, completes=True, num_draft_slots=64) for seq in self.seqs]

    def step(self) -> list[int]:
        """One pass; what was drafted."""
        requests = self._requests()
        lengths = self._by_sequence(requests)
        drafts = [Draft([5] * r.num_tokens, source="oracle") for r in requests]
        if requests:
            self.seconds += max(lengths) * self.draft_s
            self.controller.observe_draft(self.drafter, drafts, max(lengths) * self.draft_s)
        for request, draft in zip(requests, drafts, strict=True):
            assert self.controller.settle(self.drafter, draft, request, [], len(requests))
        contexts = [len(seq.tokens) - 1 for seq in self.seqs]
        batch = [Rows(np.zeros(0, np.int32), c, [5] * (1 + k)) for c, k in zip(contexts, lengths, strict=True)]
        took = self.pass_s(
            sum(1 + k for k in lengths), sum(c * (1 + k) for c, k in zip(contexts, lengths, strict=True))
        )
        self.seconds += took
        self.controller.observe_pass(batch, took)
        for seq, length, chance in zip(self.seqs, lengths, self.acceptance, strict=True):
            self._verify(seq, length, chance)
        return lengths

    def rate(self, num_steps: int) -> float:
        """Tokens a second of all together, over so many passes."""
        seconds, num_tokens = self.seconds, self.num_tokens
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)

    def plain_rate(self) -> float:
        return len(self.seqs) / self.pass_s(len(self.seqs), sum(len(seq.tokens) - 1 for seq in self.seqs))

    def _requests(self) -> list[DraftRequest]:
        self.controller.begin_pass(self.planned())
        return self.controller.requests(self.drafter, self.planned())

    def _by_sequence(self, requests: Sequence[DraftRequest]) -> list[int]:
        asked = {r.seq.id: r.num_tokens for r in requests}
        return [asked.get(seq.id, 0) for seq in self.seqs]

    def _verify(self, seq: EngineSequence, length: int, chance: float) -> None:
        misses = np.flatnonzero(self.rng.random(length) >= chance)
        accepted = int(misses[0]) if len(misses) else length
        seq.tokens += [5] * (accepted + 1)
        seq.origins += ["oracle"] * accepted + [TARGET]
        self.num_tokens += accepted + 1
        self.controller.observe_verdict(seq, Draft([5] * length, source="oracle"), accepted)

    def _make_sequences(self, contexts: Sequence[int], params: SamplingParams) -> list[EngineSequence]:
        seqs = []
        gen = generator()
        for context in contexts:
            seq = gen._make_sequences(gen.prepare([[1, 2, 3]], params))[0]
            seq.max_len = 10**9
            seq.tokens += [5] * context
            seq.origins.append(TARGET)
            seqs.append(seq)
        return seqs


class Oracle:
    name = "oracle"
    needs = DraftNeeds()
