"""Engines over tiny models, as the tests of this room want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foredraft.drafters.base import Drafter, DraftNeeds
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.generator import Generator
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Array, Draft, DraftRequest, SequenceView, Verdict
from tests.drafters.translated import byte_level, cross_drafter, sentencepiece

VOCAB = 272  # wider than the byte tokenizer's, as padded heads are


def target(num_blocks: int = 160) -> TinyModel:
    return TinyModel(VOCAB, max_model_len=512, num_blocks=num_blocks, kinship=4.0)


def draft_model(vocab_size: int = VOCAB, num_blocks: int = 160) -> TinyModel:
    """Shares the target's language: agrees often, not always."""
    return TinyModel(vocab_size, max_model_len=512, num_blocks=num_blocks, seed=7, kinship=4.0, name="tiny-draft")


class TreeDrafter:
    """Random trees over likely and unlikely tokens: a deterministic drafter for the tree path."""

    name = "tree"
    needs = DraftNeeds()

    def __init__(self, model: TinyModel, seed: int = 0) -> None:
        self._inner = ModelDrafter("inner", model, VOCAB)
        self._rng = np.random.default_rng(seed)

    def begin(self, seq: SequenceView) -> None:
        self._inner.begin(seq)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        halved = [
            replace(r, num_tokens=min(r.num_tokens, r.num_slots // 2), price=None) for r in requests
        ]  # two nodes each
        return [self._tree(d) for d in self._inner.propose(halved)]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None: ...

    def end(self, seq: SequenceView) -> None:
        self._inner.end(seq)

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def _tree(self, chain: Draft) -> Draft:
        """The chain's tokens, each with a wrong sibling before it, so that the accepted path has to move."""
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in chain.tokens:
            tokens += [int(self._rng.integers(256)), token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(tokens, parents=parents, source=self.name)


def drafters(spec: str, num_blocks: int = 160) -> list[Drafter]:
    def small(vocab_size: int = VOCAB) -> TinyModel:
        return draft_model(vocab_size, num_blocks)

    made: dict[str, Drafter] = {"ngram": NgramDrafter(), "tree": TreeDrafter(small())}
    made["model"] = ModelDrafter("model", small(), VOCAB)
    made["padded"] = ModelDrafter("padded", small(VOCAB + 128), VOCAB)
    made["text"] = cross_drafter("text", byte_level(), small(), target())
    made["tli"] = cross_drafter("tli", sentencepiece(), small(), target())
    made["narrow"] = ModelDrafter("narrow", small(), VOCAB, head_size=200)
    return [made[name] for name in spec.split("+") if name != "none"]


def generator(spec: str = "none", *, num_blocks: int = 160, num_draft_blocks: int = 160, **options: Any) -> Generator:
    options.setdefault("adaptive", False)
    options.setdefault("num_speculative_tokens", 4)
    return Generator(target(num_blocks), ByteTokenizer(), drafters(spec, num_draft_blocks), native=False, **options)
