"""Prompt lookup: what followed the last time the text ended like this.

Source: prompt lookup decoding (Saxena 2023) and vLLM's `ngram` method. No model, no cost worth naming. The
text is the request's own tokens and, if there is one, the caller's prediction of the answer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from foredraft.algo.lengths import best_lengths
from foredraft.drafters.base import DraftNeeds
from foredraft.drafters.calibration import Calibration
from foredraft.errors import ParameterError
from foredraft.types import NO_DRAFT, Array, Draft, DraftRequest, SequenceView, Verdict

#: How often a continuation is right after a match of so many tokens (index), before a request has shown its own rate.
PRIOR_ACCEPTANCE = (0.0, 0.15, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95)
#: What drafts are called whose tokens come from the caller's prediction.
PREDICTION = "prediction"
#: Places that a match is sought at, newest first; more of them rarely hold a longer one.
MAX_CANDIDATES = 32
#: Tokens by which these are found, or fewer where so many were never seen together.
MAX_KEY = 2


class NgramDrafter:
    """Proposes the tokens after the longest earlier occurrence of the text's end.

    Of equally long ones the newest in the answer, else one in the prediction, else the newest in the prompt. Where the
    text ends before the draft does, it is taken to go round in a circle: what followed is followed by itself.
    """

    name = "ngram"
    needs = DraftNeeds(length=False)
    DEFAULT_MIN_MATCH = 2
    DEFAULT_MAX_MATCH = len(PRIOR_ACCEPTANCE) - 1

    def __init__(self, *, min_match: int = DEFAULT_MIN_MATCH, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if not 1 <= min_match <= max_match <= self.DEFAULT_MAX_MATCH:
            raise ParameterError(
                "prompt_lookup_min", f"and prompt_lookup_max must satisfy 1 <= min <= max <= {self.DEFAULT_MAX_MATCH}"
            )
        self._min_match = min_match
        self._max_match = max_match
        self._states: dict[int, _State] = {}

    def begin(self, seq: SequenceView) -> None:
        own, prediction = (_Text(self._min_match, self._max_match) for _ in range(2))
        prediction.extend(seq.prediction)
        self._states[seq.id] = _State(own, prediction, seq.num_prompt_tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Lengths are chosen for all of them together."""
        drafts = [self._states[r.seq.id].draft(self.name, r.seq.tokens, r.num_tokens) for r in requests]
        priced = [i for i, r in enumerate(requests) if r.price is not None and drafts[i].tokens]
        for i, length in zip(priced, _lengths([requests[i] for i in priced], [drafts[i] for i in priced]), strict=True):
            drafts[i] = _cut(drafts[i], length)
        return drafts

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        if draft.source in (self.name, PREDICTION):
            self._states[seq.id].learn(draft.source, len(draft.tokens), len(verdict.accepted))

    def end(self, seq: SequenceView) -> None:
        self._states.pop(seq.id, None)


def _lengths(requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[int]:
    price = requests[0].price if requests else None
    if price is None:
        return []
    confidences = [draft.confidences or () for draft in drafts]
    return best_lengths(confidences, price.pass_s, price.tokens, [request.row_s for request in requests])


def _cut(draft: Draft, length: int) -> Draft:
    if length == 0:
        return NO_DRAFT
    return Draft(draft.tokens[:length], confidences=(draft.confidences or ())[:length], source=draft.source)


@dataclass(slots=True)
class _State:
    """One sequence: its text, the prediction of its answer, and how well matches of each length in either have done."""

    own: _Text
    prediction: _Text
    num_prompt_tokens: int
    match: int = 0  # length of the match behind the last draft
    calibrations: defaultdict[str, Calibration] = field(
        default_factory=lambda: defaultdict(lambda: Calibration(PRIOR_ACCEPTANCE))
    )

    def draft(self, name: str, tokens: Sequence[int], num_tokens: int) -> Draft:
        """At most so many tokens that followed the best earlier match, and how sure they are."""
        self.own.extend(tokens[len(self.own.tokens) :])
        end, self.match = self.own.longest_match(self.own.tokens)
        predicted_end, predicted_match = self.prediction.longest_match(self.own.tokens)
        source, text = name, self.own
        if predicted_match > self.match or (predicted_match == self.match and end <= self.num_prompt_tokens):
            source, text, end, self.match = PREDICTION, self.prediction, predicted_end, predicted_match
        if not self.match:
            return NO_DRAFT
        found = text.tokens[end : end + num_tokens]
        if text is self.own:
            found = list(islice(cycle(found), num_tokens))
        # each token that is right makes the match one longer
        confidences = [self._estimate(source, self.match + i) for i in range(len(found))]
        return Draft(found, confidences=confidences, source=source)

    def learn(self, source: str, num_proposed: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_proposed)):
            self.calibrations[source].update(self._bucket(self.match + i), i < num_accepted)

    def _estimate(self, source: str, match: int) -> float:
        return self.calibrations[source].estimate(self._bucket(match))

    def _bucket(self, match: int) -> int:
        return min(match, self.own.max_match)


@dataclass(slots=True)
class _Text:
    """Tokens, and where each run of `min_match` to MAX_KEY of them ends."""

    min_match: int
    max_match: int
    tokens: list[int] = field(default_factory=list)
    ends: defaultdict[tuple[int, ...], deque[int]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_CANDIDATES))
    )

    @property
    def key_sizes(self) -> range:
        return range(self.min_match, max(self.min_match, min(MAX_KEY, self.max_match)) + 1)

    def extend(self, tokens: Sequence[int]) -> None:
        begin = len(self.tokens)
        self.tokens += tokens
        for size in self.key_sizes:
            for end in range(max(begin + 1, size), len(self.tokens) + 1):
                self.ends[tuple(self.tokens[end - size : end])].append(end)

    def longest_match(self, text: Sequence[int]) -> tuple[int, int]:
        """Where the longest run ends that equals the end of `text` and that something follows; its length, or 0."""
        best_end, best = 0, 0
        for size in reversed(self.key_sizes):
            if best:
                break
            for end in reversed(self.ends.get(tuple(text[-size:]), ())):
                length = self._match_length(end, text, size)
                if end < len(self.tokens) and length > best:
                    best_end, best = end, length
                    if length == self.max_match:
                        break
        return best_end, best

    def _match_length(self, end: int, text: Sequence[int], length: int) -> int:
        """How many tokens before `end` equal the last ones of `text`; `length` of them do."""
        last = len(text)
        while length < min(self.max_match, end, last) and self.tokens[end - 1 - length] == text[last - 1 - length]:
            length += 1
        return length
