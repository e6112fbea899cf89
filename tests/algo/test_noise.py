from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.algo.noise import NoiseKey, Stream, gumbel, philox, token_uniforms, uniform


def test_philox_known_answers():
    """The published vectors of Philox4x32-10."""
    pi_and_more = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, expected in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi_and_more, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox((np.array([counter[0]]), *counter[1:]), seed)
        assert tuple(int(w[0]) for w in words) == expected


def test_every_part_of_the_key_matters():
    keys = [
        NoiseKey(1, Stream.TARGET, 5),
        NoiseKey(2, Stream.TARGET, 5),
        NoiseKey(1 + 2**40, Stream.TARGET, 5),
        NoiseKey(1, Stream.DRAFT, 5),
        NoiseKey(1, Stream.TARGET, 6),
        NoiseKey(1, Stream.TARGET, 5, choice=1),
        NoiseKey(1, Stream.TARGET, 5, num_passes=1),
    ]
    assert len({uniform(key) for key in keys}) == len(keys)
    assert len({uniform(keys[0], index) for index in range(100)}) == 100
    rows = [token_uniforms(key, np.zeros(200)) for key in keys]
    assert len(np.unique(rows)) == len(keys) * 200
    # The first tokens' noise does not depend on how many there are.
    assert np.array_equal(token_uniforms(keys[0], np.zeros(37)), rows[0][:37])


def test_uniforms_are_uniform_and_open_at_both_ends():
    u = token_uniforms(NoiseKey(7, Stream.TARGET, 0), np.zeros(1 << 16))
    assert u.min() > 0
    assert u.max() < 1
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    chi_square = ((counts - 1024.0) ** 2 / 1024.0).sum()
    assert 25 < chi_square < 115  # 63 degrees of freedom: beyond 5 sigma on either side
    singles = [uniform(NoiseKey(7, Stream.ACCEPT, i)) for i in range(2000)]
    assert 0 <= min(singles) < 0.01 < 0.99 < max(singles) < 1


def test_gumbel_is_finite_where_uniforms_end():
    ends = np.array([0.5, 2.0**32 - 0.5]) / 2.0**32
    assert gumbel(ends) == pytest.approx([33 * np.log(2), -np.log(33 * np.log(2))], rel=1e-9)


def test_torch_gives_the_same_numbers():
    key = NoiseKey(2**63 + 11, Stream.TARGET, 1 << 33, choice=3, num_passes=9)
    assert np.array_equal(token_uniforms(key, np.zeros(500)), token_uniforms(key, torch.zeros(500)).numpy())
