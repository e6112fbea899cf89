"""Matrix products: right, and the same bits for a row whatever stands beside it and whichever set runs it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native.weights import HALVES, PACKED_FORMATS, ggml_type, pack, random_pieces, unpacked

from foredraft import _native

SETS = _native.kernel_sets()
K_QUANTS = ("Q4K", "Q5K", "Q6K")
INTEGER = list(HALVES)
ELEMENTS = {name: 256 if name.endswith("_K") else 32 if name in INTEGER else 1 for name in PACKED_FORMATS}
TYPES_AND_FORMATS = list(PACKED_FORMATS.items())


def random_matrix(name: str, n: int, k: int, seed: int) -> NDArray[np.uint8]:
    pieces = random_pieces(name, n * k // ELEMENTS[name], np.random.default_rng(seed), special=False)
    return pack(name, n, k, pieces)


def activations(rows: int, k: int, seed: int) -> NDArray[np.float32]:
    """Rows of very different sizes, with a few outliers, as in a real network."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    x[rng.random((rows, k)) < 0.01] *= 30
    return x.astype(np.float32)


def quantised(x: NDArray[np.float32], group: int) -> NDArray[np.float64]:
    """The activations that integer formats see: int8 codes in groups with one scale, float32 arithmetic. [rows, k]"""
    groups = x.reshape(len(x), -1, group)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / amax))
    return (codes.astype(np.float64) * (amax / np.float32(127))).reshape(x.shape)


def inputs_of(name: str) -> int:
    return {256: 768, 32: 160, 1: 83}[ELEMENTS[name]]


@pytest.mark.parametrize("set_name", SETS)
@pytest.mark.parametrize(("name", "packed_format"), TYPES_AND_FORMATS)
def test_product_is_right(set_name: str, name: str, packed_format: str) -> None:
    n, k = 40, inputs_of(name)
    packed, x = random_matrix(name, n, k, 1), activations(5, k, 2)
    weights = unpacked(packed_format, n, k, packed).astype(np.float64)
    seen = quantised(x, 32 if packed_format in K_QUANTS else 16) if name in INTEGER else x.astype(np.float64)
    want = seen @ weights.T
    scale = np.abs(seen) @ np.abs(weights).T
    got = _native.matmul(set_name, packed_format, n, k, packed, x)
    assert np.max(np.abs(got - want) / scale) < 2e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 13, 16, 19, 70])
@pytest.mark.parametrize(("name", "packed_format"), TYPES_AND_FORMATS)
def test_bits_do_not_depend_on_the_set_nor_on_the_other_rows(name: str, packed_format: str, rows: int) -> None:
    n, k = 24, inputs_of(name)
    packed, x = random_matrix(name, n, k, 3), activations(70, k, 4)
    want = np.concatenate([_native.matmul("portable", packed_format, n, k, packed, row[None]) for row in x[:rows]])
    for set_name in SETS:
        got = _native.matmul(set_name, packed_format, n, k, packed, x[:rows])
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=set_name)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("set_name", SETS)
@pytest.mark.parametrize(("name", "packed_format"), TYPES_AND_FORMATS)
def test_a_row_that_is_not_finite_shows_and_harms_no_other(
    set_name: str, name: str, packed_format: str, bad: float
) -> None:
    packed, x = random_matrix(name, 16, 256, 5), activations(4, 256, 6)
    want = _native.matmul(set_name, packed_format, 16, 256, packed, x)
    x[2, 77] = bad
    got = _native.matmul(set_name, packed_format, 16, 256, packed, x)
    assert not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize("set_name", SETS)
def test_tiny_zero_and_huge_groups(set_name: str) -> None:
    packed = pack("F32", 16, 128, np.ones((16, 128), dtype=np.float32).view(np.uint8), "Q8S")
    x = np.zeros((4, 128), dtype=np.float32)
    x[1, :32] = 1e-40
    x[2, :32] = 3e38
    x[3, 5], x[3, 64] = 1e-42, 1.0
    got = _native.matmul(set_name, "Q8S", 16, 128, packed, x)
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_array_equal(got[1], 0)
    assert np.isposinf(got[2]).all()
    np.testing.assert_allclose(got[3], 1.0, rtol=1e-3)


@pytest.mark.parametrize("set_name", SETS)
def test_extreme_codes_do_not_overflow(set_name: str) -> None:
    """All codes at either end against activations of +-127: the sums that a saturating instruction would clip."""
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        for name in INTEGER:
            k = ELEMENTS[name]
            pieces = random_pieces(name, 16, np.random.default_rng(7), special=False)
            codes = np.ones(pieces.shape[1], dtype=bool)
            for at in HALVES[name]:
                codes[at : at + 2] = False
            pieces[:, codes] = fill
            x = np.full((3, k), 127, dtype=np.float32)
            x[1] = -127
            x[2, ::2] = -127
            weights = _native.dequantize(ggml_type(name), pieces.reshape(-1)).reshape(16, k).astype(np.float64)
            got = _native.matmul(set_name, PACKED_FORMATS[name], 16, k, pack(name, 16, k, pieces), x)
            largest = np.abs(x[0] @ np.abs(weights).T).max()
            np.testing.assert_allclose(got, x @ weights.T, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel set 'sse9' cannot run here; choose one of: .*portable"):
        _native.matmul("sse9", "F32", 16, 1, np.zeros(64, dtype=np.uint8), np.zeros((1, 1), dtype=np.float32))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="packed has 63 bytes, 64 are needed"):
        _native.matmul("portable", "F32", 16, 1, np.zeros(63, dtype=np.uint8), np.zeros((1, 1), dtype=np.float32))
    with pytest.raises(ValueError, match="x has rows of 2, k is 1"):
        _native.matmul("portable", "F32", 16, 1, np.zeros(64, dtype=np.uint8), np.zeros((1, 2), dtype=np.float32))
