from __future__ import annotations

import pytest

from foredraft.models.spelling import Speller
from foredraft.models.tokenizer import Tokenizer

from .vocabularies import AWKWARD, byte_level_fields, sentencepiece_fields

BYTE_LEVEL, SENTENCEPIECE = Tokenizer(byte_level_fields()), Tokenizer(sentencepiece_fields())
PREFIXED = Tokenizer(sentencepiece_fields(add_space_prefix=True))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, PREFIXED], ids=["bpe", "spm", "prefix"])
def test_any_bytes_can_be_spelled_exactly(tokenizer: Tokenizer) -> None:
    speller = Speller(tokenizer)
    raw = "né 日本 🙂".encode()
    texts = [text.encode() for text in AWKWARD]
    texts += [raw[begin:end] for begin in range(len(raw)) for end in range(begin, len(raw) + 1)] + [b"\xff\x00\xfe"]
    for text in texts:
        ids = speller.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text
        assert not any(map(tokenizer.is_special, ids))


def test_whole_text_is_written_as_the_tokenizer_writes_it() -> None:
    for text in AWKWARD:
        assert Speller(BYTE_LEVEL).encode(text.encode()) == BYTE_LEVEL.encode(text)


def test_no_blank_is_put_before_a_text() -> None:
    assert PREFIXED.encode("world") != Speller(PREFIXED).encode(b"world")
    assert PREFIXED.decode(Speller(PREFIXED).encode(b"world")) == "world"


def test_of_equal_tokens_the_one_that_is_written_comes_first() -> None:
    ids = Speller(SENTENCEPIECE).ids
    (letter,) = [i for i in ids[b"h"] if i >= 260]
    assert ids[b"h"] == [letter, 4 + ord("h")]  # and the byte token behind it
    assert Speller(SENTENCEPIECE).spell(b"hello") == [SENTENCEPIECE.encode("\nhello")[-1]]


def test_control_tokens_are_no_text() -> None:
    assert b"<s>" not in Speller(SENTENCEPIECE).ids
    assert b"<|im_end|>" not in Speller(BYTE_LEVEL).ids


def test_a_byte_that_is_missing() -> None:
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.token_type"][4 + 0xFF] = 5  # unused
    with pytest.raises(ValueError, match="no token for"):
        Speller(Tokenizer(fields)).encode(b"h\xff")
