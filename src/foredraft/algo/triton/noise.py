"""The generator of `algo/noise.py` in Triton: the same words, bit for bit."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

#: How kernels are launched: a product is rounded before it is added to something, as it is in the reference.
EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}


class Keys(NamedTuple):
    """What numbers are for, int64 [count] each; `NoiseKey` says what the fields mean."""

    seed: torch.Tensor
    position: torch.Tensor
    stream: torch.Tensor  # choice << 8 | stream
    num_passes: torch.Tensor


def draw_uniforms(keys: Keys, index: torch.Tensor) -> torch.Tensor:
    """`noise.uniform` of each key and index: float64 [count] in [0, 1), of 53 bits. index [count]: int64."""
    uniforms = torch.empty(index.shape, dtype=torch.float64, device=index.device)
    _draw_uniforms[(triton.cdiv(len(index), 64),)](keys, index, uniforms, len(index), BLOCK=64, **EXACT)
    return uniforms


@triton.jit
def philox(keys, at, index, mask):
    """Four words of 32 bits each for the counters `index`; `at`: which key."""
    seed = tl.load(keys.seed + at, mask=mask)
    position = tl.load(keys.position + at, mask=mask).to(tl.uint32)
    stream = tl.load(keys.stream + at, mask=mask).to(tl.uint32)
    num_passes = tl.load(keys.num_passes + at, mask=mask).to(tl.uint32)
    return tl.philox(seed, index.to(tl.uint32), position, stream, num_passes)


@triton.jit
def _draw_uniforms(keys, index, uniforms, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    high, low, _, _ = philox(keys, at, tl.load(index + at, mask=mask), mask)
    number = (high >> 5).to(tl.float64) * 2.0**26 + (low >> 6).to(tl.float64)
    tl.store(uniforms + at, number * 2.0**-53, mask=mask)


@triton.jit
def exponential(words):
    """Of rate 1, from 32 bits each. 1 - u is exact, so its logarithm is as good as log1p(-u)."""
    return -tl.log(1.0 - (words.to(tl.float64) + 0.5) * 2.0**-32)
