from __future__ import annotations

import numpy as np
import pytest

from foredraft.algo.alignment import (
    encode_after,
    first_after,
    num_settled,
    share_vocabularies,
    spread,
    to_target,
    whole_characters,
)
from foredraft.algo.filters import softmax

PIECES = [b"a", b"b", b"ab", b" ", b" a", b" ab", b"c"]


def encode(text: bytes) -> list[int]:
    """The longest piece first."""
    ids = []
    while text:
        fitting = [i for i, piece in enumerate(PIECES) if text.startswith(piece)]
        if not fitting:
            raise ValueError(text)
        ids.append(max(fitting, key=lambda i: len(PIECES[i])))
        text = text[len(PIECES[ids[-1]]) :]
    return ids


def token_bytes(id: int) -> bytes:
    return PIECES[id]


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        (b"c", b" ab", [5]),
        (b"", b"ab", [2]),
        (b"ab", b"ab", [2]),
        (b" ", b"ab", [2]),  # " ab" would reach across: the text by itself
        (b"a", b"bab", [1, 2]),
        (b"c", b"", []),
    ],
)
def test_a_text_behind_another(before: bytes, text: bytes, expected: list[int]) -> None:
    ids = encode_after(encode, token_bytes, before, text)
    assert ids == expected
    assert b"".join(map(token_bytes, ids)) == text


def test_where_the_last_bytes_begin() -> None:
    assert first_after([5, 2], token_bytes, 2) == 1
    assert first_after([5, 2], token_bytes, 5) == 0
    assert first_after([5, 2], token_bytes, 0) == 2
    assert first_after([5, 2], token_bytes, 3) is None
    assert first_after([5, 2], token_bytes, 6) is None


def test_a_text_is_settled_up_to_a_word() -> None:
    ids = encode(b"ab ab ab ab")
    assert len(ids) == 4
    assert [num_settled(ids, token_bytes, n, 64) for n in (1, 2, 3, 4)] == [3, 2, 1, 0]
    assert num_settled(encode(b"ab  ab"), token_bytes, 1, 64) == 1  # a run of blanks is not cut
    assert num_settled(encode(b"c" * 64), token_bytes, 8, 64) == 0
    assert num_settled(encode(b"c" * 65), token_bytes, 8, 64) == 57
    assert num_settled([], token_bytes, 8, 64) == 0


@pytest.mark.parametrize("character", ["a", "é", "日", "🙂"])
def test_a_character_that_is_not_complete_is_held_back(character: str) -> None:
    whole = character.encode()
    for length in range(len(whole) + 1):
        expected = 1 + len(whole) if length == len(whole) else 1
        assert whole_characters(b"x" + whole[:length]) == expected
    assert whole_characters(b"\x80\x80\x80\x80") == 4  # no character at all: nothing to wait for
    assert whole_characters(b"") == 0


def test_chances_of_tokens_that_another_tokenizer_drew() -> None:
    assert spread([0.5, 0.8], [1, 1], [2]) == [0.4]  # two that make one
    assert spread([0.5], [4], [2, 2]) == [0.5, 1.0]  # one that makes two
    assert spread([0.5, 0.8], [3, 1], [2, 2]) == [0.5, 0.8]  # the second begins within the second
    assert spread([0.5, 0.8], [2, 2], [2]) == [0.5]  # what is not written yet does not count


def test_the_shared_law_is_restricted_and_renormalised() -> None:
    target = {b"a": [3], b"b": [0], b"x": [2], b"far": [9]}
    draft = {b"a": [1, 4], b"b": [2], b"y": [0], b"far": [3]}
    shared = share_vocabularies(target, draft, 5, 5)
    assert len(shared) == 2  # the target's head has no room for "far"
    law = np.array([0.4, 0.1, 0.2, 0.2, 0.1])
    row = np.full(5, -np.inf, np.float32)
    for _ in range(2):  # a row is written over the one before
        to_target(np.log(law).astype(np.float32), shared, row)
        assert softmax(row.astype(np.float64)) == pytest.approx([0.5, 0, 0, 0.5, 0], abs=1e-6)


def test_vocabularies_without_a_common_token() -> None:
    shared = share_vocabularies({b"a": [0]}, {b"b": [0]}, 1, 1)
    row = np.full(1, -np.inf, np.float32)
    to_target(np.zeros(1, np.float32), shared, row)
    assert len(shared) == 0
    assert row[0] == -np.inf
