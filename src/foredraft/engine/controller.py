"""Whether to draft, with whom, and how much: the choice with the most expected tokens per second.

Costs and acceptance are measured while running, per request. A drafter that does not pay is switched off for that
request and tried again after some tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from foredraft.algo.lengths import best_length, expected_tokens
from foredraft.drafters.base import Drafter
from foredraft.drafters.calibration import Calibration, RunningCost
from foredraft.engine.costs import PassCosts
from foredraft.engine.sequence import Sequence
from foredraft.types import MAX_DRAFT, Draft, DraftRequest

logger = logging.getLogger("foredraft")

PRIOR_ACCEPTANCE = 0.7
#: A drafter that is off is tried again after so many tokens, and after twice as many each time it fails again.
FIRST_PROBE, LAST_PROBE = 48, 768
#: Drafts after which a drafter's acceptance is judged.
FIRSTS_TO_JUDGE = 16
#: Tokens of a trial draft.
PROBE_LENGTH = 3


class Controller:
    """Plans drafts. With `adaptive` off every drafter is asked for the full length, the first that answers is taken."""

    def __init__(
        self, drafters: SequenceOf[Drafter], costs: PassCosts, *, max_draft: int, adaptive: bool = True
    ) -> None:
        self._drafters = drafters
        self._costs = costs
        self._max_draft = max_draft
        self._adaptive = adaptive
        self._draft_s = {d.name: RunningCost() for d in drafters}  # per draft token
        self._records: dict[int, dict[str, _Record]] = {}
        self._firsts: dict[str, list[bool]] = {d.name: [] for d in drafters}  # was a draft's first token right?

    def begin(self, seq: Sequence) -> None:
        self._records[seq.id] = {d.name: _Record() for d in self._drafters}

    def end(self, seq: Sequence) -> None:
        self._records.pop(seq.id, None)

    def request(
        self, seq: Sequence, drafter: Drafter, num_batch_rows: int, num_slots: int = MAX_DRAFT
    ) -> DraftRequest | None:
        """What to ask `drafter` for, or None.

        num_batch_rows: rows of the pass so far, all sequences together. num_slots: of the cache, for the draft.
        """
        limit = min(self._limit(seq), seq.num_remaining - 1, num_slots)  # the target's own token comes with every pass
        if limit <= 0 or not seq.origins:  # the pass that ends the prompt carries no draft: its time is not decoding
            return None
        if not self._adaptive:
            return DraftRequest(seq, limit, num_slots=num_slots)
        pass_s = self._costs.with_draft(num_batch_rows, limit)
        record = self._records[seq.id][drafter.name]
        if record.is_off:
            if not record.is_probe_due(len(seq.origins)):
                return None
            return DraftRequest(seq, min(limit, PROBE_LENGTH), num_slots=num_slots)
        length = best_length(record.acceptance(limit), pass_s, self._draft_s[drafter.name].seconds)
        if length == 0:
            record.switch_off(len(seq.origins))
            self._log_off(seq, drafter, record, pass_s)
            return None
        return DraftRequest(seq, length if drafter.needs.length else limit, pass_s, num_slots)

    def is_good_enough(self, draft: Draft, request: DraftRequest, later: SequenceOf[Drafter]) -> bool:
        """Whether to take this draft rather than ask the `later`, dearer drafters.

        It may look at a deterministic draft; what was drawn from a drafter's own probabilities is never dropped.
        """
        if not draft.tokens:
            return False
        if draft.probs is not None or request.pass_s is None:
            return True
        records = self._records[request.seq.id]
        limit = len(request.pass_s) - 1
        acceptance = draft.confidences or records[draft.source].acceptance(len(draft.tokens))
        rate = expected_tokens(acceptance) / request.pass_s[len(draft.tokens)]
        return all(
            rate >= records[d.name].best_rate(limit, request.pass_s, self._draft_s[d.name].seconds)
            for d in later
            if not records[d.name].is_off
        )

    def observe_draft(self, drafter: Drafter, drafts: SequenceOf[Draft], seconds: float) -> None:
        depth = max((len(d.tokens) for d in drafts), default=0)
        if depth:
            self._draft_s[drafter.name].observe(seconds / depth)

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        self._costs.observe(num_rows, seconds)

    def observe_verdict(self, seq: Sequence, draft: Draft, num_accepted: int) -> None:
        if draft.tokens:
            self._records[seq.id][draft.source].learn(len(draft.tokens), num_accepted, len(seq.origins))
            self._check_acceptance(draft, num_accepted)

    def _limit(self, seq: Sequence) -> int:
        own = seq.params.num_speculative_tokens
        return self._max_draft if own is None else min(own, self._max_draft)

    def _log_off(self, seq: Sequence, drafter: Drafter, record: _Record, pass_s: SequenceOf[float]) -> None:
        k = min(PROBE_LENGTH, len(pass_s) - 1)
        logger.info(
            "%s is off for request %d, it does not pay here: %.2f tokens a pass expected with %d drafted, at %.2f x "
            "the time of a plain pass; next try in %d tokens",
            drafter.name,
            seq.request_id,
            expected_tokens(record.acceptance(k)),
            k,
            (pass_s[k] + k * self._draft_s[drafter.name].seconds) / pass_s[0],
            record.next_probe - len(seq.origins),
        )

    def _check_acceptance(self, draft: Draft, num_accepted: int) -> None:
        """Over all requests: warn once about a drafter whose first tokens are hardly ever accepted."""
        firsts = self._firsts[draft.source]
        if len(firsts) == FIRSTS_TO_JUDGE:
            return
        firsts.append(num_accepted > 0)
        least = next(d.needs.least_acceptance for d in self._drafters if d.name == draft.source)
        if len(firsts) == FIRSTS_TO_JUDGE and sum(firsts) < least * len(firsts):
            logger.warning(
                "%s: %d of its first %d drafts had a right token, abnormally few: is the draft of the same family and "
                "training as the target (base with base, instruct with instruct)?",
                draft.source,
                sum(firsts),
                len(firsts),
            )


@dataclass(slots=True)
class _Record:
    """One drafter on one request: acceptance by position given that all before were accepted, and whether it is off."""

    positions: list[Calibration] = field(default_factory=list)
    is_off: bool = False
    patience: int = FIRST_PROBE
    next_probe: int = 0  # in output tokens

    def acceptance(self, count: int) -> list[float]:
        """Chances for so many positions; one not yet seen is as good as the one before."""
        known = [p.estimate(0) for p in self.positions[:count]]
        last = known[-1] if known else PRIOR_ACCEPTANCE
        return known + [last] * (count - len(known))

    def best_rate(self, limit: int, pass_s: SequenceOf[float], draft_s: float) -> float:
        """Expected tokens per second at the best length."""
        acceptance = self.acceptance(limit)
        k = best_length(acceptance, pass_s, draft_s)
        return expected_tokens(acceptance[:k]) / (pass_s[k] + k * draft_s)

    def learn(self, num_proposed: int, num_accepted: int, num_output: int) -> None:
        for i in range(min(num_accepted + 1, num_proposed)):
            if i == len(self.positions):
                previous = self.positions[-1].estimate(0) if self.positions else PRIOR_ACCEPTANCE
                self.positions.append(Calibration((previous,), decay=0.95))
            self.positions[i].update(0, i < num_accepted)
        if self.is_off and num_accepted == num_proposed:
            self.is_off, self.patience = False, FIRST_PROBE
            self.positions.clear()  # the text has changed
        elif self.is_off:
            self._wait(num_output)

    def switch_off(self, num_output: int) -> None:
        self.is_off = True
        self._wait(num_output)

    def is_probe_due(self, num_output: int) -> bool:
        return num_output >= self.next_probe

    def _wait(self, num_output: int) -> None:
        self.next_probe = num_output + self.patience
        self.patience = min(2 * self.patience, LAST_PROBE)
