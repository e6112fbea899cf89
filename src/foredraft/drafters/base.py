"""The protocol of a drafter. `docs/add_a_drafter.md` walks through writing one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.types import Array, Draft, DraftRequest, SequenceView, Verdict


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What a drafter asks of the engine, as data."""

    hidden_layers: Sequence[int] = ()  # of the target, handed to `observe`
    least_acceptance: float = 0.0  # of a draft's first token; less says that it was not made for this target
    length: bool = True  # False: it limits its own drafts by `DraftRequest.price` and gives confidences


class Drafter(Protocol):
    """Proposes tokens. State per sequence lives between `begin` and `end`, keyed by `seq.id`."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DraftNeeds: ...

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, possibly empty, never longer than asked for (a tree: deeper, nor of more nodes)."""
        ...

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        """Called after `seq.tokens` has grown by the verdict. `hidden`: [layers, rows, hidden] of the verified rows."""
        ...

    def end(self, seq: SequenceView) -> None: ...


def text_of(seq: SequenceView) -> Sequence[int]:
    """Its tokens without those that stand for pictures: what a drafter reads that cannot see."""
    if not seq.pictures:
        return seq.tokens
    text: list[int] = []
    begin = 0
    for picture in seq.pictures:
        text += seq.tokens[begin : picture.start]
        begin = picture.end
    return [*text, *seq.tokens[begin:]]
