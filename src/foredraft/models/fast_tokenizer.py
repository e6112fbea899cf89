"""Tokenizers of the `tokenizers` library (tokenizer.json) as the engine wants them: ids and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import tokenizers

from foredraft.errors import UnsupportedModelError
from foredraft.models.tokenizer import byte_alphabet

_SURROGATES = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
#: Decoders of vocabularies that write a blank as ▁, and bytes as <0x0A>.
_SENTENCEPIECE_DECODERS = frozenset({"ByteFallback", "Metaspace", "Replace"})


class FastTokenizer:
    """A tokenizer of the `tokenizers` library as a `TextTokenizer`; see there for the methods.

    eos_ids: what ends a generation by the model's own settings, beside `eos_id`. Ids of a text are those that the
    backend gives it. Raises UnsupportedModelError for vocabularies whose bytes are unknown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        settings = backend.to_str()
        self._is_byte_level = _writes_byte_alphabet(json.loads(settings))
        self._parsing, self._literal = (tokenizers.Tokenizer.from_str(settings) for _ in range(2))
        for own in (self._parsing, self._literal):
            own.no_truncation()
            own.no_padding()
        self._literal.encode_special_tokens = True
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self._special_ids = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._texts = {id: text for text, id in backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._texts, default=-1) + 1
        self.max_token_length = max(map(len, self._texts.values()), default=1)
        self.bos_id, self.eos_id = bos_id, eos_id
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos_id is None else {eos_id})
        self.chat_template = chat_template
        self._byte_of = byte_alphabet()

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False, mark: str = "") -> list[int]:
        if not text.isascii():
            text = _SURROGATES.sub("\ufffd", text)
        if not mark or mark not in text:
            backend = self._parsing if parse_special else self._literal
            return self._ids(backend, text, add_special)
        if not parse_special:
            return self._ids(self._literal, text.replace(mark, ""), add_special)
        ids: list[int] = []
        for piece in self._marked_apart(text, mark):
            backend = self._literal if mark in piece else self._parsing
            ids += self._ids(backend, piece.replace(mark, ""), add_special and not ids)
        return ids

    def mark_special(self, text: str, mark: str) -> str:
        for special in self._special_texts:
            if special in text:
                text = text.replace(special, special[:1] + mark + special[1:])
        return text

    def token_bytes(self, token: int, /) -> bytes:
        text = self._added.get(token)
        if text is not None:
            return text.encode("utf-8", "surrogateescape")
        text = self._texts.get(token, "")
        if self._is_byte_level:
            try:
                return bytes(map(self._byte_of.__getitem__, text))
            except KeyError:  # not written in the byte alphabet
                return text.encode("utf-8", "surrogateescape")
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(match[1])
        return text.replace("▁", " ").encode("utf-8", "surrogateescape")

    def is_special(self, token: int, /) -> bool:
        return token in self._special_ids or token in self.eos_ids

    @cached_property
    def _special_texts(self) -> list[str]:
        """Texts of control tokens, the longest first."""
        return sorted((self._added[id] for id in self._special_ids if self._added[id]), key=len, reverse=True)

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def _marked_apart(self, text: str, mark: str) -> Iterator[str]:
        """Texts between control tokens by themselves where they are marked; else together with those tokens."""
        pattern = "|".join(map(re.escape, self._special_texts))
        together = ""
        for piece in re.split(f"({pattern})", text) if pattern else [text]:
            if mark not in piece:
                together += piece
                continue
            if together:
                yield together
            yield piece
            together = ""
        if together:
            yield together


def _writes_byte_alphabet(settings: dict[str, Any]) -> bool:
    """Whether tokens are written in GPT-2's letters for bytes, rather than in SentencePiece's manner."""
    decoder = settings.get("decoder") or {}
    kinds = {step["type"] for step in (decoder, *decoder.get("decoders", ())) if "type" in step}
    if "ByteLevel" in kinds:
        return True
    if kinds & _SENTENCEPIECE_DECODERS:
        return False
    named = ", ".join(sorted(kinds)) or "none"
    raise UnsupportedModelError(f"the bytes of the tokenizer's tokens are unknown: its decoder is {named}")
