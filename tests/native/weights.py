"""Random stored tensors, packed, for the tests of the native kernels."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from foredraft import _native

# GGUF tensor types and the packed formats that hold the same numbers.
PACKED_FORMATS = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q4_0": "Q4S",
    "Q4_1": "Q4A",
    "Q4_K": "Q4K",
    "Q5_0": "Q5S",
    "Q5_1": "Q5A",
    "Q5_K": "Q5K",
    "Q6_K": "Q6K",
    "Q8_0": "Q8S",
}
# Where the halves of a piece lie: scale and, where there is one, minimum.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q8_0": [0],
}
SPECIAL_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0xFE00, 0x3C00]


def ggml_type(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name]


def random_pieces(name: str, count: int, rng: np.random.Generator, *, special: bool) -> NDArray[np.uint8]:
    """`count` random pieces, [count, bytes]; scales are special halves, or modest so that products stay small."""
    size = GGML_QUANT_SIZES[ggml_type(name)][1]
    if name in ("F32", "F16", "BF16") and not special:
        values = rng.standard_normal(count).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(count, size)
        return values.astype(np.float32 if name == "F32" else np.float16).view(np.uint8).reshape(count, size)
    pieces = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        if special:
            halves = rng.choice(np.array(SPECIAL_HALVES, dtype=np.uint16), count)
        else:
            halves = rng.uniform(-0.02, 0.02, count).astype(np.float16).view(np.uint16)
        pieces[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return pieces


def pack(name: str, n: int, k: int, stored: NDArray[np.uint8], packed_format: str | None = None) -> NDArray[np.uint8]:
    packed_format = packed_format or _native.packed_format(ggml_type(name))
    packed = np.full(_native.packed_bytes(packed_format, n, k), 0xAA, dtype=np.uint8)
    _native.pack(packed_format, ggml_type(name), n, k, stored.reshape(-1), packed)
    return packed


def unpacked(packed_format: str, n: int, k: int, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights that the kernels see: an identity of powers of two picks them out one by one. [n, k]

    127 has the code 127 and the scale 1, so each output is 127 times one weight, rounded twice.
    """
    return _native.matmul("portable", packed_format, n, k, packed, 127 * np.eye(k, dtype=np.float32)).T / np.float32(
        127
    )
