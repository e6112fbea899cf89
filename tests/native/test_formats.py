"""Stored tensors to numbers and to packed weights, against the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize as reference_quantize
from tests.native.weights import PACKED_FORMATS, ggml_type, pack, random_pieces, unpacked

from foredraft import _native


@pytest.mark.parametrize("special", [False, True], ids=["modest", "special"])
@pytest.mark.parametrize("name", list(PACKED_FORMATS))
def test_dequantize_equals_the_gguf_package(name: str, special: bool) -> None:
    rng = np.random.default_rng(1)
    pieces = random_pieces(name, 640, rng, special=special)
    with np.errstate(all="ignore"):
        want = reference_dequantize(pieces, ggml_type(name)).reshape(-1)
    got = _native.dequantize(ggml_type(name), pieces.reshape(-1))
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def test_every_half_is_read_right() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    got = _native.dequantize(GGMLQuantizationType.F16, halves.view(np.uint8))
    np.testing.assert_array_equal(got, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize(("name", "packed_format"), list(PACKED_FORMATS.items()))
@pytest.mark.parametrize("n", [16, 37])
def test_packed_weights_are_the_stored_ones(name: str, packed_format: str, n: int) -> None:
    assert _native.packed_format(ggml_type(name)) == packed_format
    elements = GGML_QUANT_SIZES[ggml_type(name)][0]
    k = {256: 512, 32: 96, 1: 77}[elements]
    pieces = random_pieces(name, n * k // elements, np.random.default_rng(2), special=False)
    want = reference_dequantize(pieces, ggml_type(name)).reshape(n, k)
    got = unpacked(packed_format, n, k, pack(name, n, k, pieces))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_blocks_packed_apart_equal_blocks_packed_together() -> None:
    pieces = random_pieces("Q4_K", 50, np.random.default_rng(3), special=False).reshape(-1)
    whole = pack("Q4_K", 50, 256, pieces)
    parts = np.zeros_like(whole)
    for begin, end in [(3, 4), (0, 1), (1, 3)]:
        _native.pack("Q4K", GGMLQuantizationType.Q4_K, 50, 256, pieces, parts, begin, end)
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(
    ("packed_format", "bits"), [("Q4K", 4.625), ("Q5K", 5.625), ("Q6K", 6.5625), ("Q4S", 4.5), ("Q4A", 5), ("Q8S", 8.5)]
)
def test_packed_size(packed_format: str, bits: float) -> None:
    assert _native.packed_bytes(packed_format, 64, 512) == 64 * 512 * bits / 8


@pytest.mark.parametrize(("packed_format", "nearest", "gain"), [("Q8S", "Q8_0", 1.001), ("Q4A", "Q4_1", 0.92)])
def test_quantising_floats(packed_format: str, nearest: str, gain: float) -> None:
    """Root mean square error against plain rounding between the extremes of each group: the search over ranges pays."""
    want = np.random.default_rng(4).standard_normal((48, 256)).astype(np.float32) * np.float32(0.05)
    plain = reference_dequantize(reference_quantize(want, ggml_type(nearest)), ggml_type(nearest))
    got = unpacked(packed_format, 48, 256, pack("F32", 48, 256, want.view(np.uint8), packed_format))
    assert np.sqrt(np.mean((got - want) ** 2)) < gain * np.sqrt(np.mean((plain - want) ** 2))


@pytest.mark.parametrize("packed_format", ["Q4A", "Q8S"])
def test_quantising_edge_cases(packed_format: str) -> None:
    rows = np.zeros((16, 64), dtype=np.float32)
    rows[1] = 0.5
    rows[2, :32] = np.nan
    rows[3, 40] = np.inf
    rows[4] = -3.0
    rows[5, 0] = 1e-30
    got = unpacked(packed_format, 16, 64, pack("F32", 16, 64, rows.view(np.uint8), packed_format))
    assert np.isnan(got[2, :32]).all()
    assert np.isnan(got[3, 32:]).all()
    finite = [0, 1, 4, 5, *range(6, 16)]
    np.testing.assert_allclose(got[finite], rows[finite], rtol=1e-3, atol=1e-6)


def test_wrong_sizes_are_refused() -> None:
    q4k, f32 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.F32
    stored, packed = np.zeros(144 * 16, dtype=np.uint8), np.zeros(2368, dtype=np.uint8)
    _native.pack("Q4K", q4k, 16, 256, stored, packed)
    with pytest.raises(ValueError, match="src has 2303 bytes, 2304 are needed"):
        _native.pack("Q4K", q4k, 16, 256, stored[:-1], packed)
    with pytest.raises(ValueError, match="dst has 2367 bytes, 2368 are needed"):
        _native.pack("Q4K", q4k, 16, 256, stored, packed[:-1])
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.packed_bytes("Q4K", 16, 128)
    with pytest.raises(ValueError, match="at least one row"):
        _native.packed_bytes("F32", 0, 128)
    with pytest.raises(ValueError, match="blocks out of range"):
        _native.pack("Q4K", q4k, 16, 256, stored, packed, 0, 2)
    with pytest.raises(ValueError, match="no conversion"):
        _native.pack("Q4K", f32, 16, 256, np.zeros(16384, dtype=np.uint8), packed)
    with pytest.raises(ValueError, match="tensor type 10 is not supported"):
        _native.packed_format(10)
    with pytest.raises(ValueError, match="unknown packed format 'Q3K'"):
        _native.packed_bytes("Q3K", 16, 256)
    with pytest.raises(ValueError, match="whole number"):
        _native.dequantize(q4k, stored[:100])
