"""The words of the generator are the reference's, bit for bit."""

from __future__ import annotations

from .launches import DEVICE, keys_of, on_device  # isort: skip  (before any kernel is defined)

from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from foredraft.algo import noise as reference
from foredraft.algo.noise import NoiseKey, Stream
from foredraft.algo.triton import laws, noise
from foredraft.types import SamplingParams

from .launches import filters_of, laws_of

SEEDS = (0, 1, 2**31, 2**32 + 7, 2**63 + 5, 2**64 - 1)


@triton.jit
def write_words(keys, index, words, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    mask = at < count
    word0, word1, word2, word3 = noise.philox(keys, at, tl.load(index + at, mask=mask), mask)
    tl.store(words + 4 * at, word0, mask=mask)
    tl.store(words + 4 * at + 1, word1, mask=mask)
    tl.store(words + 4 * at + 2, word2, mask=mask)
    tl.store(words + 4 * at + 3, word3, mask=mask)


def some_keys() -> list[NoiseKey]:
    keys = [
        NoiseKey(seed, stream, position, choice, num_passes)
        for seed, (stream, position, choice, num_passes) in product(
            SEEDS,
            [(Stream.TARGET, 0, 0, 0), (Stream.RESIDUAL, 2**32 + 3, 127, 9), (Stream.ACCEPT, 2**32 - 1, 1, 2**31)],
        )
    ]
    return keys


def test_words_are_the_references():
    keys = some_keys()
    index = [7919 * i % 2**20 for i in range(len(keys))]
    words = torch.zeros((len(keys), 4), dtype=torch.int64, device=DEVICE)
    write_words[1,](keys_of(keys), on_device(index, np.int64), words, len(keys), BLOCK=32)
    expected = [
        [int(w[0]) for w in reference.philox(reference._counter(key, np.asarray([i])), key.seed)]
        for key, i in zip(keys, index, strict=True)
    ]
    assert words.tolist() == expected


def test_uniforms_are_the_references():
    keys = some_keys() * 4  # more than one program's share
    index = list(range(len(keys)))
    uniforms = noise.draw_uniforms(keys_of(keys), on_device(index, np.int64)).tolist()
    assert uniforms == [reference.uniform(key, i) for key, i in zip(keys, index, strict=True)]


@pytest.mark.parametrize("vocab", [2, 16, 17, 65, 130])
def test_every_token_has_its_own_word(vocab: int, monkeypatch: pytest.MonkeyPatch):
    """Equal weights: the least uniform wins, which integers decide."""
    monkeypatch.setattr(laws, "MAX_BLOCK", 64)
    keys = [NoiseKey(SEEDS[i % len(SEEDS)], Stream.TARGET, 3 * i, i % 5) for i in range(24)]
    flat = laws_of(np.ones((len(keys), vocab)))
    winners = laws.race(flat, filters_of([SamplingParams()] * len(keys)), keys_of(keys))
    best = winners.value.argmax(dim=1, keepdim=True)
    expected = [int(np.argmin(reference.token_uniforms(key, np.empty(vocab)))) for key in keys]
    assert winners.token.gather(1, best)[:, 0].tolist() == expected
