"""Bytes as tokens: the text that a vocabulary can say, whether or not it is whole characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from foredraft.models.base import TextTokenizer

#: How the message begins where a text cannot be spelled.
UNSPELT = "the vocabulary has no token for"


class Speller:
    """A tokenizer for bytes in the middle of a text: no token is control, and no blank is put before."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: bytes) -> list[int]:
        """Ids whose bytes are exactly `text`: the tokenizer's own, and byte tokens for what is no UTF-8.

        Raises ValueError where the vocabulary lacks a byte.
        """
        ids: list[int] = []
        while text:
            try:
                return ids + self._encode_characters(text.decode())
            except UnicodeDecodeError as error:
                ids += self._encode_characters(text[: error.start].decode())
                ids += self.spell(text[error.start : error.end])
                text = text[error.end :]
        return ids

    def spell(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again. Raises ValueError where none does."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            piece = next((p for n in range(self._longest, 0, -1) if (p := text[at : at + n]) in self.ids), b"")
            if not piece:
                raise ValueError(f"{UNSPELT} {text[at : at + 1]!r}")
            ids.append(self.ids[piece][0])
            at += len(piece)
        return ids

    @cached_property
    def ids(self) -> Mapping[bytes, Sequence[int]]:
        """Tokens that are text, by their bytes: of several with the same bytes the one that the tokenizer writes first.

        SentencePiece has many characters as byte tokens too.
        """
        tokenizer = self.tokenizer
        ids: dict[bytes, list[int]] = {}
        for id in range(tokenizer.vocab_size):
            if (text := tokenizer.token_bytes(id)) and not tokenizer.is_special(id):
                ids.setdefault(text, []).append(id)
        for text, equal in ids.items():
            if len(equal) > 1:
                written = tokenizer.encode(text.decode(errors="replace"))
                equal.sort(key=lambda id: (written != [id], -id))
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids), default=0)

    def _encode_characters(self, text: str) -> list[int]:
        wanted = text.encode()
        # Some tokenizers put a space before a text: let it go before a line end, and drop both.
        for ids in (self.tokenizer.encode(text), self.tokenizer.encode("\n" + text)):
            pieces = [self.tokenizer.token_bytes(id) for id in ids]
            surplus, first = sum(map(len, pieces)) - len(wanted), 0
            while surplus > 0:
                surplus -= len(pieces[first])
                first += 1
            if b"".join(pieces[first:]) == wanted:
                return ids[first:]
        return self.spell(wanted)
