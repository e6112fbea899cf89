"""Randomness as a function: Philox4x32-10 (Salmon et al., SC 2011), keyed by what a number is for.

No generator has a state, so a token's noise does not depend on how many numbers were drawn before it: the same seed
gives the same text with or without speculation, in any batch.

    key      (seed low, seed high)
    counter  (index, absolute position, choice << 8 | stream, pass)

For noise over a vocabulary, token t has word t // 16 % 4 of index t // 64 * 16 + t % 16: 16 neighbours take one word
each of 16 counters. For single numbers `index` is the draft node. `pass` counts the verifications of a sequence and
stays 0 for the target's own noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from array_api_compat import array_namespace

from foredraft.types import Array

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class Stream(IntEnum):
    """What a number is for; numbers of different streams are independent."""

    TARGET = 0  # the target's own choice of a token, which a coupled draft shares
    DRAFT = 1  # a draft that is verified by the ratio test or by block verification
    ACCEPT = 2  # the tests of those drafts
    RESIDUAL = 3  # the token that follows what they accepted


@dataclass(frozen=True, slots=True)
class NoiseKey:
    seed: int
    stream: Stream
    position: int  # absolute: tokens of the sequence before the one to be drawn
    choice: int = 0
    num_passes: int = 0


def philox(counter: tuple[Array, int, int, int], seed: int) -> tuple[Array, Array, Array, Array]:
    """Four words of 32 random bits for each counter; counter[0] is an int64 array, and so are the words.

    Products are taken in halves, so that 63 bits suffice.
    """
    c0, c1, c2, c3 = counter[0], counter[1] + 0 * counter[0], counter[2] + 0 * counter[0], counter[3] + 0 * counter[0]
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def token_uniforms(key: NoiseKey, like: Array) -> Array:
    """One uniform a token, in the open interval (0, 1), of 32 bits: [vocab] of the kind and width of `like` [vocab]."""
    xp = array_namespace(like)
    vocab = like.shape[0]
    indices = xp.reshape(xp.arange((vocab + 63) // 64 * 16, dtype=xp.int64, device=like.device), (-1, 16))
    words = xp.stack(philox(_counter(key, indices), key.seed), axis=1)  # [vocab / 64, 4, 16]
    return (xp.astype(xp.reshape(words, (-1,))[:vocab], xp.float64) + 0.5) / 2.0**32


def gumbel(uniforms: Array) -> Array:
    """Standard Gumbel noise. The best values come from uniforms near 0, where numbers are dense."""
    xp = array_namespace(uniforms)
    return -xp.log(-xp.log1p(-uniforms))


def uniform(key: NoiseKey, index: int = 0) -> float:
    """One number in [0, 1), of 53 bits."""
    w0, w1, _, _ = (int(w[0]) for w in philox(_counter(key, np.asarray([index], dtype=np.int64)), key.seed))
    return ((w0 >> 5) * 2**26 + (w1 >> 6)) / 2.0**53


def _counter(key: NoiseKey, first: Array) -> tuple[Array, int, int, int]:
    return first, key.position & _MASK, (key.choice << 8 | key.stream) & _MASK, key.num_passes & _MASK


def _multiply(a: int, b: Array) -> tuple[Array, Array]:
    """High and low 32 bits of a * b."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
