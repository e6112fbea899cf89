"""Prompt lookup: what followed the last time the text ended like this.

Source: prompt lookup decoding (Saxena 2023) and vLLM's `ngram` method. No model, no cost worth naming. The
text is the request's own tokens, preceded by the caller's prediction of the answer if there is one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.algo.lengths import best_length
from foredraft.drafters.base import DraftNeeds
from foredraft.drafters.calibration import Calibration
from foredraft.errors import ParameterError
from foredraft.types import NO_DRAFT, Array, Draft, DraftRequest, SequenceView, Verdict

#: How often a continuation is right after a match of so many tokens (index), before a request has shown its own rate.
PRIOR_ACCEPTANCE = (0.0, 0.15, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95)
#: Places that a match is sought at, newest first; more of them rarely hold a longer one.
MAX_CANDIDATES = 32


class NgramDrafter:
    """Proposes the tokens after the longest earlier occurrence of the text's end; the newest of equally long ones."""

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
        self._indexes: dict[int, _Index] = {}

    def begin(self, seq: SequenceView) -> None:
        self._indexes[seq.id] = _Index(self._min_match, self._max_match, list(seq.prediction))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose_one(request) for request in requests]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        if draft.source == self.name:
            self._indexes[seq.id].learn(len(draft.tokens), len(verdict.accepted))

    def end(self, seq: SequenceView) -> None:
        self._indexes.pop(seq.id, None)

    def _propose_one(self, request: DraftRequest) -> Draft:
        index = self._indexes[request.seq.id]
        index.extend(request.seq.tokens)
        tokens = index.continuation(request.num_tokens)
        confidences = index.confidences(len(tokens))
        if request.pass_s is not None:
            tokens = tokens[: best_length(confidences, request.pass_s)]
        if not tokens:
            return NO_DRAFT
        return Draft(tokens, confidences=confidences[: len(tokens)], source=self.name)


@dataclass(slots=True)
class _Index:
    """Where each `min_match`-gram of the text ends, and how well matches of each length have done.

    text  [ prediction ][ prompt, output ]      an n-gram never spans the two
    """

    min_match: int
    max_match: int
    text: list[int]
    num_seen: int = 0  # tokens of the sequence that are in `text`
    match: int = 0  # length of the match behind the last continuation
    ends: defaultdict[tuple[int, ...], deque[int]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_CANDIDATES))
    )
    calibration: Calibration = field(default_factory=lambda: Calibration(PRIOR_ACCEPTANCE))
    border: int = 0  # text[:border] is the prediction

    def __post_init__(self) -> None:
        self.border = len(self.text)
        self._index_from(0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        begin = len(self.text)
        self.text += tokens[self.num_seen :]
        self.num_seen = len(tokens)
        self._index_from(begin, self.border)

    def continuation(self, num_tokens: int) -> list[int]:
        """At most so many tokens that followed the best earlier match."""
        best_end, self.match = 0, 0
        if len(self.text) - self.border >= self.min_match:
            for end in reversed(self.ends[tuple(self.text[-self.min_match :])]):
                length = self._match_length(end)
                if end < len(self.text) and length > self.match:
                    best_end, self.match = end, length
                    if length == self.max_match:
                        break
        return self.text[best_end : best_end + num_tokens] if self.match else []

    def confidences(self, count: int) -> list[float]:
        """Each token that is right makes the match one longer."""
        return [self.calibration.estimate(min(self.match + i, self.max_match)) for i in range(count)]

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_proposed)):
            self.calibration.update(min(self.match + i, self.max_match), i < num_accepted)

    def _index_from(self, begin: int, border: int) -> None:
        for end in range(max(begin + 1, border + self.min_match), len(self.text) + 1):
            self.ends[tuple(self.text[end - self.min_match : end])].append(end)

    def _match_length(self, end: int) -> int:
        """How many tokens before `end` equal the text's last ones."""
        text, length, last = self.text, self.min_match, len(self.text)
        while length < min(self.max_match, end) and text[end - 1 - length] == text[last - 1 - length]:
            length += 1
        return length
