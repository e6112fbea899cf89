"""A smaller model of the same tokenizer as the drafter.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Its output head may be cut to frequent
tokens and those of the context (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foredraft.drafters.base import DraftNeeds, text_of
from foredraft.drafters.chains import ChainModel, LawChain
from foredraft.models.base import LanguageModel
from foredraft.types import Array, Draft, DraftRequest, SequenceView, Verdict


class ModelDrafter:
    """Drafts a chain, perhaps with second choices, by its own model and cache, many requests in one pass.

    sees: the model reads the pictures of a prompt as the target's processor made them; else it reads the text only.
    """

    needs = DraftNeeds(least_acceptance=0.25, length=False)

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        target_vocab_size: int,
        *,
        head_size: int | None = None,
        enable_prefix_caching: bool = True,
        sees: bool = False,
    ) -> None:
        self.name = name
        self.sees = sees
        self._ids = _SameIds(min(target_vocab_size, model.vocab_size))
        self._head = _Head(model, head_size) if head_size is not None else None
        self._chains = ChainModel(model, enable_prefix_caching=enable_prefix_caching)

    def begin(self, seq: SequenceView) -> None:
        self._chains.begin(seq.id, seq.cache_salt, seq.pictures if self.sees else ())

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = [LawChain(r, self._chains.state(r.seq.id), self._read(r.seq), self._ids) for r in requests]
        for chain in chains:
            chain.state.follow(chain.text, len(chain.text))
        if self._head is not None:
            self._head.cover(r.seq for r in requests if r.num_tokens)
        self._chains.unroll(chains)
        return [chain.draft(self.name) for chain in chains]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        if draft.source == self.name:
            self._chains.state(seq.id).learn(len(draft.tokens), verdict.accepted)

    def end(self, seq: SequenceView) -> None:
        if self._head is not None:
            self._head.forget(seq.id)
        text = self._read(seq)
        self._chains.end(seq.id, text, len(text))

    def check_integrity(self) -> None:
        """Raises ForedraftError if its cache miscounts a block's owners, or mistakes what it holds."""
        self._chains.check_integrity()

    def _read(self, seq: SequenceView) -> Sequence[int]:
        return seq.tokens if self.sees else text_of(seq)


class _SameIds:
    """Both know the first `width` ids; the rest is padding."""

    def __init__(self, width: int) -> None:
        self.width = width

    def row(self, logits: Array) -> Array:
        return logits[: self.width]

    def own(self, token: int) -> int:
        return token


class _Head:
    """The output head cut to the `size` lowest ids (of a byte-level BPE the most frequent) and the running texts' own.

    What a text brought leaves the head when a text begins after its end: answers must not help, or slow, later ones.
    """

    def __init__(self, model: LanguageModel, size: int) -> None:
        self._model = model
        self._size = size
        self._common = np.arange(size)
        self._texts: dict[int, tuple[int, set[int]]] = {}  # sequence -> tokens looked at, rare ones among them
        self._extra: set[int] = set()
        model.limit_head(self._common)

    def cover(self, seqs: Iterable[SequenceView]) -> None:
        """Have the tokens of these texts in the head."""
        has_new_text = False
        for seq in seqs:
            has_new_text |= seq.id not in self._texts
            begin, rare = self._texts.get(seq.id, (0, set()))
            rare.update(t for t in seq.tokens[begin:] if self._size <= t < self._model.vocab_size)
            self._texts[seq.id] = len(seq.tokens), rare
        wanted = set().union(*(rare for _, rare in self._texts.values()))
        if not wanted <= self._extra or (has_new_text and wanted != self._extra):
            self._extra = wanted
            self._model.limit_head(np.append(self._common, np.array(sorted(wanted), np.int64)))

    def forget(self, sequence_id: int) -> None:
        """The text has ended."""
        self._texts.pop(sequence_id, None)
