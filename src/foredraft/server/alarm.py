"""Notices when acceptance is abnormally low or has dropped, and says what the likely cause is.

A pure state machine over finished answers, without clock or randomness: the same answers, the same alarms. One answer
is one observation however long it is, since the tokens of one text rise and fall together.

    answers of one drafter   ... [ reference: up to 128 ][ recent: 16 ] now

An answer enters `recent`, and moves to `reference` once 16 younger ones have come, unless an alarm is on. So a new
level cannot pass for the usual one before it has been judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import fmean, median
from typing import Literal

AlarmKind = Literal["low", "drop"]
Cause = Literal["tokenizer", "drafter", "template", "sampling", "prompt_length", "traffic"]

#: Answers that are judged together, and answers that they are compared with.
NUM_RECENT, NUM_REFERENCE, LEAST_REFERENCE = 16, 128, 32
#: The newest answers, which tell the cause: when a drop is noticed, about so many have come since.
NUM_TELLING = 6
#: An answer with fewer draft tokens says nothing.
LEAST_DRAFT_TOKENS = 8
#: A drop is so many standard errors, and to less than this share of the usual rate: certain, and worth a look.
DROP_ERRORS, DROP_SHARE = 4.5, 2 / 3
#: A drop is over at this share of the usual rate; a low level at this multiple of the floor.
RECOVERED_SHARE, RECOVERED_LOW = 0.85, 1.25
#: After so many answers a drop is the new normal.
ANSWERS_TO_ADOPT = 256
#: No more is right by chance when the draft's token ids mean something else to the target.
CHANCE = 0.02
#: Rates of texts of one kind scatter at least by this; few equal answers must not look infinitely certain.
LEAST_SCATTER = 0.03
#: Largest correlation of neighbours that is believed: beyond it nothing would ever count as a drop.
MOST_ALIKE = 0.8


@dataclass(frozen=True, slots=True)
class Answer:
    """What one drafter did for one answer, and what is known of the request."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    is_chat: bool
    temperature: float
    num_prompt_tokens: int

    @property
    def rate(self) -> float:
        """Accepted share of the draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def accepted_per_draft(self) -> float:
        """At least the share of drafts whose first token was right, for whatever length the drafts had."""
        return self.num_accepted_tokens / self.num_drafts


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that begins (`is_on`) or ends."""

    drafter: str
    kind: AlarmKind
    is_on: bool
    cause: Cause
    message: str


class AcceptanceAlarm:
    """Alarms of all drafters."""

    def __init__(self) -> None:
        self._watches: dict[str, _Watch] = {}

    def watch(self, drafter: str, floor: float) -> None:
        """floor: accepted tokens per draft below which a drafter was hardly made for the target.

        A drafter without a floor (n-gram: some texts have no repeats) raises alarms for drops only.
        """
        self._watches[drafter] = _Watch(drafter, floor)

    def observe(self, drafter: str, answer: Answer) -> list[Alarm]:
        """The alarms that this answer begins or ends, most often none."""
        if answer.num_draft_tokens < LEAST_DRAFT_TOKENS:
            return []
        if drafter not in self._watches:
            self.watch(drafter, floor=0.0)
        return self._watches[drafter].observe(answer)


@dataclass(slots=True)
class _Watch:
    """One drafter. While an alarm is on `reference` stays as it was."""

    drafter: str
    floor: float
    reference: deque[Answer] = field(default_factory=lambda: deque(maxlen=NUM_REFERENCE))
    recent: deque[Answer] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    causes: dict[AlarmKind, Cause] = field(default_factory=dict)  # of the alarms that are on
    num_since_drop: int = 0

    def observe(self, answer: Answer) -> list[Alarm]:
        if len(self.recent) == NUM_RECENT and not self.causes:
            self.reference.append(self.recent[0])
        self.recent.append(answer)
        if len(self.recent) < NUM_RECENT:
            return []
        return [alarm for alarm in (self._judge_drop(), self._judge_level()) if alarm is not None]

    def _judge_drop(self) -> Alarm | None:
        if "low" in self.causes or len(self.reference) < LEAST_REFERENCE:
            return None
        usual, now = fmean(a.rate for a in self.reference), fmean(a.rate for a in self.recent)
        if "drop" in self.causes:
            self.num_since_drop += 1
            if now >= RECOVERED_SHARE * usual:
                return self._end("drop", f"acceptance is back at {now:.0%}")
            level = fmean(a.accepted_per_draft for a in self.recent)
            if self.num_since_drop >= ANSWERS_TO_ADOPT and level >= self.floor:
                self.reference.clear()
                return self._end("drop", f"acceptance stays at {now:.0%}, which is taken as usual from now on")
            return None
        if not has_dropped(self.reference, self.recent):
            return None
        self.num_since_drop = 0
        cause, words = cause_of_drop(self.reference, list(self.recent)[-NUM_TELLING:])
        return self._begin("drop", cause, f"acceptance dropped from {usual:.0%} to {now:.0%}: {words}")

    def _judge_level(self) -> Alarm | None:
        if "drop" in self.causes:  # has been better, so the drafter is made for the target
            return None
        level = fmean(a.accepted_per_draft for a in self.recent)
        if "low" in self.causes:
            if level < RECOVERED_LOW * self.floor:
                return None
            return self._end("low", f"{level:.2f} tokens of a draft are right, no longer abnormally few")
        if level >= self.floor:
            return None
        cause, words = cause_of_low(self.recent, self.floor)
        return self._begin("low", cause, f"{level:.2f} tokens of a draft are right, abnormally few: {words}")

    def _begin(self, kind: AlarmKind, cause: Cause, message: str) -> Alarm:
        self.causes[kind] = cause
        return Alarm(self.drafter, kind, True, cause, message)

    def _end(self, kind: AlarmKind, message: str) -> Alarm:
        return Alarm(self.drafter, kind, False, self.causes.pop(kind), message)


def has_dropped(reference: Iterable[Answer], recent: Iterable[Answer]) -> bool:
    """Whether the recent rates are lower beyond chance and by much.

    The two-sample z test. Successive requests are often alike (one user, one task), which makes means scatter more:
    by (1 + r) / (1 - r) in variance, where r is the correlation of neighbours.
    """
    usual, now = [a.rate for a in reference], [a.rate for a in recent]
    usual_mean, mean = fmean(usual), fmean(now)
    if mean >= DROP_SHARE * usual_mean:
        return False
    deviations = [rate - usual_mean for rate in usual]
    variance = max(fmean(d * d for d in deviations), LEAST_SCATTER**2)
    neighbours = fmean(a * b for a, b in pairwise(deviations)) / variance
    r = min(max(neighbours, 0.0), MOST_ALIKE)
    error = sqrt(variance * (1 + r) / (1 - r) * (1 / len(usual) + 1 / len(now)))
    return usual_mean - mean > DROP_ERRORS * error


def cause_of_low(recent: Iterable[Answer], floor: float) -> tuple[Cause, str]:
    """Why hardly any draft is right: only some kinds of requests, or all?"""
    answers = list(recent)

    def split(is_suspect: Callable[[Answer], bool]) -> bool:
        """Whether the suspects are low and the others are not."""
        suspects, others = [a for a in answers if is_suspect(a)], [a for a in answers if not is_suspect(a)]
        return _is_low(suspects, floor) and bool(others) and not _is_low(others, floor)

    if split(lambda a: a.is_chat):
        return "template", "chats only; was the draft trained with another chat template than the target's?"
    if split(lambda a: not a.is_chat):
        return "template", "text without a chat template only; a draft trained on chats alone needs the template"
    if split(lambda a: a.temperature > 0.5):
        return "sampling", "requests with a high temperature only, whose tokens are hard to foresee for any draft"
    if any(a.accepted_per_draft >= floor for a in answers):
        return "traffic", "some requests only; their texts are of a kind that the draft has not learnt"
    if fmean(a.accepted_per_draft for a in answers) < CHANCE:
        return "tokenizer", "no more than by chance; do the draft's token ids mean the same as the target's?"
    return (
        "drafter",
        "every request; the drafter was not made for this target (same family and training: base with base, "
        "instruct with instruct?)",
    )


def cause_of_drop(reference: Iterable[Answer], recent: Iterable[Answer]) -> tuple[Cause, str]:
    """What else has changed since acceptance was as usual."""
    before, now = list(reference), list(recent)
    chats_before, chats_now = fmean(a.is_chat for a in before), fmean(a.is_chat for a in now)
    if abs(chats_now - chats_before) >= 0.5:
        return "traffic", f"the requests changed, {chats_now:.0%} are chats and {chats_before:.0%} were"
    warm_before, warm_now = fmean(a.temperature for a in before), fmean(a.temperature for a in now)
    if warm_now - warm_before >= 0.3:
        return "sampling", f"requests ask for temperature {warm_now:.1f} and asked for {warm_before:.1f}"
    long_before, long_now = (median(a.num_prompt_tokens for a in answers) for answers in (before, now))
    if long_now >= 2 * long_before or long_before >= 2 * long_now:
        return "prompt_length", f"prompts have {long_now:.0f} tokens and had {long_before:.0f}"
    limit = DROP_SHARE * fmean(a.rate for a in before)
    num_low = sum(a.rate < limit for a in now)
    if num_low <= 3 / 4 * len(now):
        return "traffic", f"{num_low} of {len(now)} requests, the others are as before; a new kind of text came in"
    if chats_now >= 0.5:
        return "template", "every request, in nothing else unlike those before; did a template or system prompt change?"
    return "traffic", "every request, in nothing else unlike those before; the texts are of another kind"


def _is_low(answers: Sequence[Answer], floor: float) -> bool:
    return len(answers) >= 4 and fmean(a.accepted_per_draft for a in answers) < floor
