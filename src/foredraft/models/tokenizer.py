"""Tokenizers built from the fields of a GGUF file; ids equal llama.cpp's on the same file.

Two kinds: byte-level BPE ("gpt2" in the file), whose words are cut by patterns that the file names in `.pre`, and
SentencePiece's BPE ("llama"), which merges by score and falls back to bytes.
Text never crosses the engine: it sees ids, and bytes come out again through `token_bytes`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.base import TextTokenizer
from foredraft.models.gguf import load_core

# Kinds of a token in the file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Words:
    """How text is cut into words before merging: each pattern cuts what the one before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


_DIGITS_APART = Words((r"\p{N}", _GPT2))
_LIKE_LLAMA3 = Words((_LLAMA3,), ignore_merges=True, add_bos=True)

#: Byte-level BPE: the file's name of its pre-tokenizer -> how it cuts words.
PRE_TOKENIZERS: Mapping[str, Words] = {
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Words((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "qwen2": Words((_QWEN2,)),
    "deepseek-r1-qwen": Words((_QWEN2,)),
    "stablelm2": Words((_QWEN2,)),
    "qwen35": Words((_QWEN35,)),
    "llama-bpe": _LIKE_LLAMA3,
    "llama3": _LIKE_LLAMA3,
    "llama-v3": _LIKE_LLAMA3,
    "falcon3": _LIKE_LLAMA3,
    "lfm2": _LIKE_LLAMA3,
    "smaug-bpe": Words((_LLAMA3,)),
    "dbrx": Words((_LLAMA3,)),
}

#: Tokens that end a generation whatever the file's own fields say: converters often name only one of several.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"}
    | {"<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"}
    | {"<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["}
)
#: Ends only as a control token: elsewhere it is the HTML tag.
_END_OR_TAG = "</s>"
#: Code models: padding, or another file begins, after the middle is filled in. The first of each row that exists.
_END_OF_FILL = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)

#: Characters from which on a text is encoded by the call that lets other threads run (a megabyte takes seconds).
LONG_TEXT = 2_000

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_T = TypeVar("_T")
_SURROGATES = re.compile("[\ud800-\udfff]")


class _Special(NamedTuple):
    """A token that is cut out of the text before words are."""

    rank: int  # longest first
    text: str
    id: int
    needs_parsing: bool  # control tokens are plain text unless parse_special


class Tokenizer:
    """Text to ids and back. Immutable; may be shared between threads.

    `eos_ids`: all ids that end a generation. `add_bos`: `encode(..., add_special=True)` begins with `bos_id`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        kind = _field(fields, "model", str, "")
        if kind not in ("gpt2", "llama"):
            raise UnsupportedModelError(
                f"the tokenizer model {kind or '(none)'!r} is not supported; "
                "these are: gpt2 (byte-level BPE), llama (SentencePiece)"
            )
        self._is_byte_level = kind == "gpt2"
        words = _words(fields) if self._is_byte_level else Words(())
        self._texts = _list(fields, "tokens", str)
        self._kinds = _list(fields, "token_type", int, [_NORMAL] * len(self._texts))
        if len(self._kinds) < len(self._texts) or not self._texts:
            raise ModelFileError(
                "the vocabulary is empty or shorter than its table of token types; download the file again"
            )

        ids = {text: id for id, text in enumerate(self._texts)}
        self.bos_id = self._special_id(fields, "bos_token_id", None if self._is_byte_level else 1)
        self.eos_id = self._special_id(fields, "eos_token_id", None if self._is_byte_level else 2)
        others = (self._special_id(fields, name) for name in ("eot_token_id", "eom_token_id"))
        named_ends = {id for id in (self.eos_id, *others) if id is not None}
        self.eos_ids = frozenset(_end_ids(ids, self._kinds) | named_ends)
        self.add_bos = _field(fields, "add_bos_token", bool, words.add_bos or not self._is_byte_level)
        adds_eos = _field(fields, "add_eos_token", bool, False)
        self._suffix = [self.eos_id] if adds_eos and self.eos_id is not None else []
        self._add_space_prefix = _field(fields, "add_space_prefix", bool, not self._is_byte_level)
        if self.add_bos and self.bos_id is None:
            raise ModelFileError("the tokenizer adds a begin-of-text token but names none; convert the model again")
        chat_template = fields.get("tokenizer.chat_template")
        self.chat_template: str | None = chat_template if isinstance(chat_template, str) else None

        self._specials = self._group_specials()
        self._byte_of = byte_alphabet()
        self._backend = _byte_level(fields, ids, words) if self._is_byte_level else _sentencepiece(fields, ids)

    @cached_property
    def max_token_length(self) -> int:
        """Characters of text that one token stands for at most."""
        return max(map(len, self._texts))

    @property
    def vocab_size(self) -> int:
        """Tokens of the file. A model's logits may be padded to more."""
        return len(self._texts)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False, mark: str = "") -> list[int]:
        """Ids of a text.

        `add_special` adds the begin- and end-of-text tokens that the model expects. `parse_special` turns the text of
        control tokens ("<|im_end|>") into those tokens: for rendered chat templates, never for what a user wrote.
        `mark` is taken out after that: a control token that `mark_special` has put it into stays text.
        Lone surrogates (what surrogateescape makes of bytes that are no UTF-8) become U+FFFD.
        """
        if not text.isascii():
            text = _SURROGATES.sub("\ufffd", text)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after_special = True
        for piece in self._cut_specials(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                prefix = " " if self._add_space_prefix and after_special else ""
                unmarked = piece.replace(mark, "") if mark else piece
                ids += self._encode(prefix + unmarked)
            after_special = isinstance(piece, int)
        return ids + self._suffix if add_special else ids

    def mark_special(self, text: str, mark: str) -> str:
        """The text with `mark` inside every control token that it spells."""
        for special in self._candidates(text):
            if special.needs_parsing:
                text = text.replace(special.text, special.text[:1] + mark + special.text[1:])
        return text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, with U+FFFD where the bytes are no UTF-8. Nothing is stripped: what the tokens say."""
        raw = b"".join(self.token_bytes(id) for id in ids if not (skip_special_tokens and self.is_special(id)))
        return raw.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; a control token's are its text. Empty for unused ids and for padding."""
        if not 0 <= id < len(self._texts):
            return b""
        text, kind = self._texts[id], self._kinds[id]
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN):
            return text.encode("utf-8", "surrogateescape")
        if kind == _BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind != _NORMAL:
            return b""
        if not self._is_byte_level:
            return text.replace("▁", " ").encode("utf-8", "surrogateescape")
        try:
            return bytes(map(self._byte_of.__getitem__, text))
        except KeyError:  # not written in the byte alphabet
            return text.encode("utf-8", "surrogateescape")

    def is_special(self, id: int) -> bool:
        """Whether a token is control (turns, end of text …) rather than text."""
        return 0 <= id < len(self._texts) and (self._kinds[id] in (_CONTROL, _UNKNOWN) or id in self.eos_ids)

    def is_same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether the two were built from equal tables: quicker to see than that all bytes are equal."""
        mine, theirs = (
            (self._is_byte_level, self._kinds, self._texts),
            (other._is_byte_level, other._kinds, other._texts),
        )
        return mine == theirs

    def _encode(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _special_id(self, fields: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        id = fields.get("tokenizer.ggml." + name, default)
        return id if isinstance(id, int) and 0 <= id < len(self._texts) else None

    def _group_specials(self) -> dict[str, list[_Special]]:
        """By their first two characters: most of thousands of them are ruled out by a few searches of the text."""
        cut_out = (_CONTROL, _USER_DEFINED, _UNKNOWN)
        found = [
            id for id, text in enumerate(self._texts) if text and (self._kinds[id] in cut_out or id in self.eos_ids)
        ]
        found.sort(key=lambda id: -len(self._texts[id].encode("utf-8", "surrogateescape")))
        groups: dict[str, list[_Special]] = {}
        for rank, id in enumerate(found):
            text = self._texts[id]
            groups.setdefault(text[:2], []).append(_Special(rank, text, id, self.is_special(id)))
        return groups

    def _candidates(self, text: str) -> list[_Special]:
        """Special tokens that the text may hold, the longest first."""
        return sorted(chain.from_iterable(group for start, group in self._specials.items() if start in text))

    def _cut_specials(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Texts between special tokens, and the ids of those: the longest token of the vocabulary is cut out first."""
        pieces: list[str | int] = [text]
        for special in self._candidates(text):
            if special.text in text and (parse_special or not special.needs_parsing):
                pieces = [part for piece in pieces for part in _cut(piece, special)]
        return (piece for piece in pieces if piece != "")


def same_tokenizer(target: TextTokenizer, draft: TextTokenizer) -> str | None:
    """None if the two give every id that both can emit the same bytes; else the first difference, in one line.

    Padding, chat templates and other settings do not matter: ids cross from draft to target, nothing else does.
    """
    if isinstance(target, Tokenizer) and isinstance(draft, Tokenizer) and target.is_same_vocabulary(draft):
        return None
    for id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_bytes(id), draft.token_bytes(id)
        if ours != theirs and ours and theirs:
            return f"token {id} is {ours!r} in the target and {theirs!r} in the draft"
    return None


def _cut(piece: str | int, special: _Special) -> Iterator[str | int]:
    if isinstance(piece, int):
        yield piece
        return
    first, *rest = piece.split(special.text)
    yield first
    for part in rest:
        yield special.id
        yield part


def _field(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = fields.get("tokenizer.ggml." + name, default)
    if not isinstance(value, kind):
        problem = "is missing" if value is None else f"is a {type(value).__name__}"
        raise ModelFileError(f"tokenizer.ggml.{name} {problem} in the file; download or convert the model again")
    return value


def _list(fields: Mapping[str, Any], name: str, kind: type[_T], default: list[_T] | None = None) -> list[_T]:
    values: list[_T] = _field(fields, name, list, default)
    if values and not isinstance(values[0], kind):  # an array of a GGUF file has one type
        raise ModelFileError(f"tokenizer.ggml.{name} holds no {kind.__name__}s; download or convert the model again")
    return values


def _words(fields: Mapping[str, Any]) -> Words:
    pre = _field(fields, "pre", str, "default")
    if "tokenizer.ggml.pre" not in fields:
        logging.getLogger(__name__).warning(
            "the model file names no pre-tokenizer (an old converter wrote it): answers may be worse than need be"
        )
    try:
        return PRE_TOKENIZERS[pre]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(f"the pre-tokenizer {pre!r} is not supported; these are: {known}") from None


def _end_ids(ids: Mapping[str, int], kinds: Sequence[int]) -> set[int]:
    ends = {text for text in _END_TEXTS if text in ids}
    ends |= {next((text for text in row if text in ids), row[0]) for row in _END_OF_FILL} & ids.keys()
    if _END_OR_TAG in ids and kinds[ids[_END_OR_TAG]] == _CONTROL and "<|tool_response>" not in ids:
        ends.add(_END_OR_TAG)
    # Where answers consist of several messages, this one only ends a message.
    if ends >= {"<|return|>", "<|call|>"} or ("<|flush|>" in ends and ends & {"<|call|>", "<|calls|>"}):
        ends.discard("<|end|>")
    return {ids[text] for text in ends}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(fields: Mapping[str, Any], ids: dict[str, int], words: Words) -> tokenizers.Tokenizer:
    # Writers leave an empty list out: right for a vocabulary of single bytes, damage for any other.
    may_be_absent = "tokenizer.ggml.merges" not in fields and not _has_words(fields)
    parts = (merge.partition(" ") for merge in _list(fields, "merges", str, [] if may_be_absent else None))
    merges = [(left, right) for left, _, right in parts]
    backend = tokenizers.Tokenizer(_bpe(ids, merges, ignore_merges=words.ignore_merges))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in words.patterns]
    to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_alphabet])
    return backend


def _has_words(fields: Mapping[str, Any]) -> bool:
    texts = _list(fields, "tokens", str)
    kinds = _list(fields, "token_type", int, [_NORMAL] * len(texts))
    return any(len(text) > 1 and kind == _NORMAL for text, kind in zip(texts, kinds, strict=False))


def _sentencepiece(fields: Mapping[str, Any], ids: dict[str, int]) -> tokenizers.Tokenizer:
    scores = _list(fields, "scores", float)
    if len(scores) < len(ids):
        raise ModelFileError("the vocabulary is longer than its table of scores; download the file again")
    # SentencePiece's order of merging, by score, as a list of merges.
    merges = load_core().sentencepiece_merges(list(ids), [scores[id] for id in ids.values()])
    backend = tokenizers.Tokenizer(_bpe(ids, merges, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: bool) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library's own class, or TypeError: text that is no text, merges of unknown tokens
        if any(map(_SURROGATES.search, ids)):
            # Tokens that are no text can never be matched; they only keep their ids.
            readable = {(f"\ufffd{id}" if _SURROGATES.search(text) else text): id for text, id in ids.items()}
            return _bpe(readable, [pair for pair in merges if not _SURROGATES.search("".join(pair))], **options)
        reason = str(error).partition("\n")[0]
        raise ModelFileError(
            f"the tokenizer of the file is malformed: {reason}; download or convert the model again"
        ) from None
