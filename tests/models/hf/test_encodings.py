from __future__ import annotations

import torch

from foredraft.models.hf.encodings import Encodings
from foredraft.models.hf.vision import Features


def features(rows: int) -> Features:
    """4 bytes a row."""
    return Features(torch.zeros(rows, 1))


def test_what_was_used_last_stays() -> None:
    encodings, first = Encodings(max_bytes=40), features(5)
    encodings.keep(b"a", first)
    encodings.keep(b"b", features(5))
    assert encodings.find(b"a") is first
    encodings.keep(b"c", features(1))
    assert encodings.find(b"b") is None
    assert encodings.find(b"a") is first
    assert encodings.find(b"c") is not None


def test_an_image_larger_than_all_that_is_kept() -> None:
    encodings = Encodings(max_bytes=40)
    encodings.keep(b"a", features(11))
    assert encodings.find(b"a") is None
    encodings.keep(b"b", features(10))
    assert encodings.find(b"b") is not None


def test_a_row_of_a_larger_tensor_keeps_all_of_it() -> None:
    assert Features(torch.zeros(3, 4, 2)[0]).nbytes == 3 * 4 * 2 * 4
