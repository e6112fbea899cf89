"""Draft models of other tokenizers than the byte tokenizer, akin to the tiny targets that speak it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.cross_vocab import CrossVocab, CrossVocabDrafter
from foredraft.models.base import LanguageModel, Rows, TextTokenizer
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import ByteTokenizer, TinyModel
from tests.models.vocabularies import byte_level_fields, sentencepiece_fields


class ToyTokenizer:
    """A few pieces of text, the longest that fits first; other text is lost; `<…>` are control tokens."""

    chat_template = None

    def __init__(self, *pieces: str) -> None:
        self.pieces = [piece.encode() for piece in pieces]
        self.vocab_size = len(pieces)
        specials = [id for id in range(len(pieces)) if self.is_special(id)]
        self.bos_id: int | None = specials[0] if specials else None
        self.eos_id: int | None = specials[-1] if specials else None
        self.eos_ids = frozenset(specials[-1:])

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False, mark: str = "") -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fitting = [id for id, piece in enumerate(self.pieces) if rest.startswith(piece) and not self.is_special(id)]
            if fitting:
                ids.append(max(fitting, key=lambda id: len(self.pieces[id])))
            rest = rest[len(self.pieces[ids[-1]]) if fitting else 1 :]
        return ids

    def mark_special(self, text: str, mark: str) -> str:
        return text

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def is_special(self, token: int) -> bool:
        return self.token_bytes(token).startswith(b"<") and self.token_bytes(token).endswith(b">")


class Translated:
    """A `TinyModel` over bytes that speaks another vocabulary.

    It reads a token as its last byte, and rates one by its first byte; a longer token by chance a little higher or much
    lower than the byte alone.
    """

    def __init__(self, inner: TinyModel, tokenizer: TextTokenizer, padding: int = 3) -> None:
        self.name = "translated"
        self.inner = inner
        self.vocab_size = tokenizer.vocab_size + padding
        self.max_model_len = self.context_length = inner.max_model_len
        self.num_blocks, self.weight_bytes, self.device_rows = inner.num_blocks, inner.weight_bytes, None
        self.takes_trees = True
        texts = [b"" if tokenizer.is_special(id) else tokenizer.token_bytes(id) for id in range(self.vocab_size)]
        self._read = [text[-1] if text else 256 + id % 7 for id, text in enumerate(texts)]
        self._rated = np.array([text[0] if text else 256 for text in texts])
        luck = np.random.default_rng(3).uniform(-4.0, 0.4, self.vocab_size)
        self._bonus = np.where([len(text) == 1 for text in texts], 0.0, luck).astype(np.float32)

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> NDArray[np.float32]:
        logits = self.inner.forward([replace(rows, tokens=[self._read[t] for t in rows.tokens]) for rows in batch])
        return np.ascontiguousarray(logits[:, self._rated] + self._bonus)

    def hidden_states(self) -> NDArray[np.float32]:
        return self.inner.hidden_states()

    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        self.inner.move_slots(block_table, source, target)

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        self.inner.limit_head(token_ids)


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_fields())


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_fields())


def cross_drafter(
    mode: CrossVocab,
    tokenizer: TextTokenizer,
    inner: TinyModel,
    target: LanguageModel,
    target_tokenizer: TextTokenizer | None = None,
) -> CrossVocabDrafter:
    """Named like its mode."""
    model = Translated(inner, tokenizer)
    return CrossVocabDrafter(
        mode, model, tokenizer, target, target_tokenizer or ByteTokenizer(), mode=mode, native=False
    )
