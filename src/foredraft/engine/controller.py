"""Whether to draft, with whom, and how much: the choice with the most expected tokens per second of all sequences.

Costs and acceptance are measured while running, acceptance per request. A drafter that does not pay, for what it is or
among so many other requests, is switched off for that request. It is back when the others are fewer, and tried again
now and then wherever a good draft would pay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from foredraft.algo.lengths import best_length, best_lengths, expected_tokens
from foredraft.algo.tree import height
from foredraft.drafters.base import Drafter
from foredraft.drafters.calibration import BatchCost, Calibration, RunningCost
from foredraft.engine.costs import PassCosts
from foredraft.engine.scheduler import Planned
from foredraft.engine.sequence import Sequence
from foredraft.models.base import Rows
from foredraft.types import Draft, DraftRequest, PassPrice, SamplingParams

logger = logging.getLogger("foredraft")

PRIOR_ACCEPTANCE = 0.7
#: What a trial draft hopes for, and a draft that costs nothing before its confidences are known.
HOPE = 0.95
#: A drafter is free whose draft pass takes less than this part of the target's.
FREE = 0.005
#: A drafter that is off is tried again after so many tokens, and after twice as many each time it fails again.
FIRST_PROBE, LAST_PROBE = 48, 768
#: Drafts after which a drafter's acceptance is judged.
FIRSTS_TO_JUDGE = 16
#: Tokens of a trial draft.
PROBE_LENGTH = 3
#: Tokens of a prompt whose reading is timed.
LEAST_READ = 64
#: Of an answer whose end is far, so many tokens are counted on.
LONG_ANSWER = 256


class Controller:
    """Plans drafts. With `adaptive` off every drafter is asked for the full length, the first that answers is taken.

    takes_trees: what the model says of itself.
    """

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        costs: PassCosts,
        *,
        max_draft: int,
        adaptive: bool = True,
        takes_trees: bool = True,
    ) -> None:
        self._drafters = drafters
        self._costs = costs
        self._max_draft = max_draft
        self._adaptive = adaptive
        self._takes_trees = takes_trees
        self._draft_s = {d.name: BatchCost() for d in drafters}  # of a draft pass
        self._records: dict[int, dict[str, _Record]] = {}
        self._proposers: dict[int, Drafter] = {}  # sequence -> whose draft is in the pass
        self._firsts: dict[str, list[bool]] = {d.name: [] for d in drafters}  # was a draft's first token right?
        self._read_s = {d.name: RunningCost() for d in drafters}  # of a token of a prompt
        self._savings: dict[tuple[str, int], float] = {}  # by drafter and number of sequences, in this pass
        self._pass = _NextPass(1, 0.0, 0.0)

    def begin(self, seq: Sequence) -> None:
        self._records.setdefault(seq.id, {d.name: _Record() for d in self._drafters if self._may_draft(seq, d)})

    def end(self, seq: Sequence) -> None:
        self._records.pop(seq.id, None)
        self._proposers.pop(seq.id, None)

    def is_promising(self, seq: Sequence, drafter: Drafter) -> bool:
        """Whether `drafter` should read this prompt now.

        Alone it should: nobody else waits meanwhile. Among others it should if it would draft for as many such
        sequences as there are, were they as predictable as most texts, and if that saves more time than reading takes.
        """
        record = self._records[seq.id].get(drafter.name)
        if record is None:
            return False
        is_alone = len(self._records) == 1 or not self._adaptive
        record.has_read = is_alone or (self._saving(drafter) > 0 and self._pays_to_read(seq, drafter))
        return record.has_read

    def _saving(self, drafter: Drafter) -> float:
        """The part of a plain pass that drafts would save each sequence a token, as many as there are."""
        count = len(self._records)
        if (drafter.name, count) not in self._savings:
            chances = [[PRIOR_ACCEPTANCE] * self._max_draft] * count
            pass_s = self._costs.with_draft(count, count * self._max_draft)
            draft_s = self._draft_s[drafter.name].seconds(count)
            lengths = best_lengths(chances, pass_s, count, [0.0] * count, draft_s)
            tokens = sum(expected_tokens(of_one[:k]) for of_one, k in zip(chances, lengths, strict=True))
            seconds = pass_s[sum(lengths)] + max(lengths) * draft_s
            self._savings[drafter.name, count] = 1 - seconds / tokens * count / pass_s[0]
        return self._savings[drafter.name, count]

    def _pays_to_read(self, seq: Sequence, drafter: Drafter) -> bool:
        """Whether drafts save more time of all sequences than they wait while `drafter` reads this text."""
        count = len(self._records)
        answer_s = min(seq.num_remaining, LONG_ANSWER) * self._costs.base_s(count)
        reading_s = count * len(seq.tokens) * self._read_s[drafter.name].seconds
        return reading_s < max(FREE, self._saving(drafter)) * answer_s

    def begin_pass(self, planned: SequenceOf[Planned]) -> None:
        """Another pass: these rows are sure to be in it. What prompts take of its time is not charged to drafts."""
        self._proposers.clear()
        self._savings.clear()
        decoding = [p.seq for p in planned if p.completes and p.seq.origins]
        seconds = self._costs.base_s(len(decoding)) + sum(self._costs.context_s(1, len(s.tokens)) for s in decoding)
        self._pass = _NextPass(sum(p.num_rows for p in planned), seconds, float(len(decoding)))

    def requests(self, drafter: Drafter, planned: SequenceOf[Planned]) -> list[DraftRequest]:
        """What to ask `drafter` for: requests of at least one token each, for some of these sequences or none."""
        slots = {p.seq.id: p.num_draft_slots if self._takes_trees else 0 for p in planned}
        limits = {p.seq.id: min(self._limit(p.seq), p.num_draft_slots) for p in planned}
        # the pass that ends the prompt carries no draft: its time is not decoding
        seqs = [
            p.seq for p in planned if limits[p.seq.id] > 0 and p.seq.origins and drafter.name in self._records[p.seq.id]
        ]
        if not self._adaptive:
            return [DraftRequest(seq, limits[seq.id], num_slots=slots[seq.id]) for seq in seqs]
        seqs = [seq for seq in seqs if self._records[seq.id][drafter.name].may_be_asked(len(seq.origins))]
        if not seqs:
            return []
        draft_s = self._draft_s[drafter.name].seconds(len(seqs))
        is_trial = all(self._records[seq.id][drafter.name].is_probe_due(len(seq.origins)) for seq in seqs)
        if is_trial and not self._draft_s[drafter.name].is_sure:
            seqs, draft_s = seqs[:1], 0.0  # it was timed once, perhaps in a bad moment: let one try
        price = self._pass.price(self._costs, sum(limits[seq.id] for seq in seqs))
        row_s = [self._costs.row_s(len(seq.tokens)) for seq in seqs]
        is_free = not drafter.needs.length and draft_s < FREE * price.pass_s[0]
        chances = [self._chances(seq, drafter, limits[seq.id], is_free) for seq in seqs]
        lengths = best_lengths(chances, price.pass_s, price.tokens, row_s, draft_s)
        requests = []
        for seq, length, own_row_s in zip(seqs, lengths, row_s, strict=True):
            record = self._records[seq.id][drafter.name]
            if length == 0:
                acceptance = record.acceptance(min(PROBE_LENGTH, limits[seq.id]))
                self._switch_off(seq, drafter, record, acceptance, price, draft_s + own_row_s)
            elif not record.has_read and not self._pays_to_read(seq, drafter):
                continue
            elif record.is_probe_due(len(seq.origins)):
                requests.append(DraftRequest(seq, length, num_slots=slots[seq.id], is_trial=True))
            else:
                record.is_off = False  # it waited, and fewer requests run by now
                num_tokens = length if drafter.needs.length else limits[seq.id]
                requests.append(DraftRequest(seq, num_tokens, price, own_row_s, slots[seq.id]))
        return requests

    def settle(
        self, drafter: Drafter, draft: Draft, request: DraftRequest, later: SequenceOf[Drafter], num_unsettled: int
    ) -> bool:
        """Note a draft; whether to keep it rather than ask the `later`, dearer drafters too.

        It may look at a deterministic draft; what was drawn from a drafter's own probabilities is never dropped.
        num_unsettled: how many sequences would share the draft passes of the later ones.
        """
        if not draft.tokens:
            return False
        self._proposers[request.seq.id] = drafter
        records = self._records[request.seq.id]
        chances = draft.confidences or records[drafter.name].acceptance(len(draft.tokens))
        gain = expected_tokens(chances, draft.parents) - 1
        is_settled = (
            draft.probs is not None
            or request.price is None
            or not any(
                self._is_better(
                    other, records[other.name], len(draft.tokens), gain, request, request.price, num_unsettled
                )
                for other in later
                if other.name in records and not records[other.name].is_off
            )
        )
        if is_settled:
            self._pass = self._pass.with_draft(self._costs, len(draft.tokens), gain, request.row_s)
        return is_settled

    def observe_draft(self, drafter: Drafter, drafts: SequenceOf[Draft], seconds: float) -> None:
        depth = max(map(_depth, drafts), default=0)
        if depth:
            self._draft_s[drafter.name].observe(len(drafts), seconds / depth)

    def observe_reading(self, drafter: Drafter, num_tokens: int, seconds: float) -> None:
        """So many tokens of prompts were read. Few say little: a pass over one takes almost as long."""
        if num_tokens >= LEAST_READ:
            self._read_s[drafter.name].observe(seconds / num_tokens)

    def observe_pass(self, batch: SequenceOf[Rows], seconds: float) -> None:
        self._costs.observe([(len(rows.tokens), rows.start) for rows in batch], seconds)

    def observe_verdict(self, seq: Sequence, draft: Draft, num_accepted: int) -> None:
        drafter = self._proposers.get(seq.id)
        if drafter is not None and draft.tokens:
            self._records[seq.id][drafter.name].learn(_depth(draft), num_accepted, len(seq.origins))
            self._check_acceptance(drafter, num_accepted)

    def _may_draft(self, seq: Sequence, drafter: Drafter) -> bool:
        named = seq.params.drafters
        return seq.params.num_speculative_tokens != 0 and (named is None or drafter.name in named)

    def _limit(self, seq: Sequence) -> int:
        return min(self._longest(seq.params), seq.num_remaining - 1)  # the target's own token comes with every pass

    def _longest(self, params: SamplingParams) -> int:
        own = params.num_speculative_tokens
        return self._max_draft if own is None else min(own, self._max_draft)

    def _chances(self, seq: Sequence, drafter: Drafter, limit: int, is_free: bool) -> list[float]:
        """What to expect of a draft when deciding whether to ask for it."""
        record = self._records[seq.id][drafter.name]
        if record.is_probe_due(len(seq.origins)):
            return [HOPE] * min(limit, PROBE_LENGTH)
        acceptance = record.acceptance(limit)
        if is_free and self._pays_alone(seq, drafter, acceptance):
            return [max(HOPE, chance) for chance in acceptance]
        return acceptance

    def _pays_alone(self, seq: Sequence, drafter: Drafter, acceptance: SequenceOf[float]) -> bool:
        """Whether a draft would raise the rate if nothing else ran."""
        row_s, own_s = self._costs.row_s(len(seq.tokens)), self._costs.context_s(1, len(seq.tokens))
        pass_s = [seconds + own_s for seconds in self._costs.with_draft(1, len(acceptance))]
        return best_length(acceptance, pass_s, self._draft_s[drafter.name].seconds(1) + row_s) > 0

    def _switch_off(
        self,
        seq: Sequence,
        drafter: Drafter,
        record: _Record,
        acceptance: list[float],
        price: PassPrice,
        token_s: float,
    ) -> None:
        """acceptance: of a short draft; token_s: seconds of one of its tokens beside the pass."""
        if record.is_off:
            return
        k = len(acceptance)
        is_busy = best_length([HOPE] * k, price.pass_s, token_s, price.tokens) == 0
        is_waiting = self._pays_alone(seq, drafter, acceptance)
        record.switch_off(len(seq.origins), is_waiting=is_waiting)
        if record.has_told or (is_waiting and not is_busy):  # surer texts have the rows for the moment
            return
        record.has_told = True
        if is_waiting:
            logger.info(
                "request %d: %s waits: %d requests decode at once, and more rows would cost more than drafts bring",
                seq.request_id,
                drafter.name,
                round(price.tokens),
            )
            return
        logger.info(
            "request %d: %s pauses for %d tokens: a draft of %d would bring %.2f tokens a pass instead of %.2f, "
            "at %.2f times the time",
            seq.request_id,
            drafter.name,
            record.next_probe - len(seq.origins),
            k,
            price.tokens - 1 + expected_tokens(acceptance),
            price.tokens,
            (price.pass_s[k] + k * token_s) / price.pass_s[0],
        )

    def _is_better(
        self,
        drafter: Drafter,
        record: _Record,
        num_tokens: int,
        gain: float,
        request: DraftRequest,
        price: PassPrice,
        num_sharing: int,
    ) -> bool:
        """Whether `drafter`'s best draft promises more than the one at hand, of whose tokens `gain` are expected."""
        others = price.tokens - 1
        rate = (price.tokens + gain) / (price.pass_s[num_tokens] + num_tokens * request.row_s)
        acceptance = record.acceptance(min(self._longest(request.seq.params), len(price.pass_s) - 1))
        token_s = self._draft_s[drafter.name].seconds(num_sharing) / num_sharing + request.row_s
        k = best_length(acceptance, price.pass_s, token_s, price.tokens)
        return (others + expected_tokens(acceptance[:k])) / (price.pass_s[k] + k * token_s) > rate

    def _check_acceptance(self, drafter: Drafter, num_accepted: int) -> None:
        """Over all requests: warn once about a drafter whose first tokens are hardly ever accepted."""
        firsts = self._firsts[drafter.name]
        if len(firsts) == FIRSTS_TO_JUDGE:
            return
        firsts.append(num_accepted > 0)
        if len(firsts) == FIRSTS_TO_JUDGE and sum(firsts) < drafter.needs.least_acceptance * len(firsts):
            logger.warning(
                "%s: %d of its first %d drafts had a right token, abnormally few: is the draft of the same family and "
                "training as the target (base with base, instruct with instruct)?",
                drafter.name,
                sum(firsts),
                len(firsts),
            )


def _depth(draft: Draft) -> int:
    """Tokens of its longest path."""
    return len(draft.tokens) if draft.parents is None else height(draft.parents)


@dataclass(frozen=True, slots=True)
class _NextPass:
    """What the coming pass holds so far: rows, the seconds of it that decoding takes, the tokens expected of it."""

    num_rows: int
    seconds: float
    tokens: float

    def price(self, costs: PassCosts, max_draft: int) -> PassPrice:
        pass_s = costs.with_draft(self.num_rows, max_draft)
        prompts_s = pass_s[0] - self.seconds
        return PassPrice([seconds - prompts_s for seconds in pass_s], self.tokens)

    def with_draft(self, costs: PassCosts, num_tokens: int, gain: float, row_s: float) -> _NextPass:
        pass_s = costs.with_draft(self.num_rows, num_tokens)
        seconds = self.seconds + pass_s[-1] - pass_s[0] + num_tokens * row_s
        return _NextPass(self.num_rows + num_tokens, seconds, self.tokens + gain)


@dataclass(slots=True)
class _Record:
    """One drafter on one request: acceptance by position given that all before were accepted, and whether it is off."""

    positions: list[Calibration] = field(default_factory=list)
    is_off: bool = False
    is_waiting: bool = False  # off, but only because so many others run
    patience: int = FIRST_PROBE // 2  # doubles with each wait
    next_probe: int = 0  # in output tokens
    has_told: bool = False  # why it is off
    has_read: bool = False  # the prompt

    def acceptance(self, count: int) -> list[float]:
        """Chances for so many positions; one not yet seen is as good as the one before."""
        known = [p.estimate(0) for p in self.positions[:count]]
        last = known[-1] if known else PRIOR_ACCEPTANCE
        return known + [last] * (count - len(known))

    def learn(self, num_proposed: int, num_accepted: int, num_output: int) -> None:
        for i in range(min(num_accepted + 1, num_proposed)):
            if i == len(self.positions):
                previous = self.positions[-1].estimate(0) if self.positions else PRIOR_ACCEPTANCE
                self.positions.append(Calibration((previous,), decay=0.95))
            self.positions[i].update(0, i < num_accepted)
        if self.is_off and num_accepted == num_proposed:
            self.is_off = False
            self.positions.clear()  # the text has changed
        elif self.is_off:
            self._wait(num_output)

    def switch_off(self, num_output: int, *, is_waiting: bool) -> None:
        """Trials that kept it on for no longer than its patience were luck: they do not shorten it."""
        if num_output > self.next_probe + self.patience:
            self.patience = FIRST_PROBE // 2
        self.is_off, self.is_waiting = True, is_waiting
        self._wait(num_output)

    def may_be_asked(self, num_output: int) -> bool:
        return not self.is_off or self.is_waiting or self.is_probe_due(num_output)

    def is_probe_due(self, num_output: int) -> bool:
        return self.is_off and num_output >= self.next_probe

    def _wait(self, num_output: int) -> None:
        self.patience = min(2 * self.patience, LAST_PROBE)
        self.next_probe = num_output + self.patience
