from __future__ import annotations

import numpy as np
import pytest

from foredraft.algo.noise import NoiseKey, Stream, gumbel, token_uniforms
from foredraft.algo.speedup import (
    breakeven_acceptance,
    coupled_acceptance,
    memory_bound_pass,
    ratio_acceptance,
    speedup,
)


def test_speedup_and_breakeven():
    assert speedup([0.8] * 3, pass_cost=1.1, draft_cost=0.6) == pytest.approx(2.952 / 1.7)
    acceptance = breakeven_acceptance(3, pass_cost=1.1, draft_cost=0.6)
    assert speedup([acceptance] * 3, 1.1, 0.6) == pytest.approx(1.0)
    assert breakeven_acceptance(1, pass_cost=1.5, draft_cost=0.6) is None


def test_roofline():
    """70 B in fp16 on 3.35 TB/s."""
    assert memory_bound_pass(140e9, 3.35e12) == pytest.approx(41.8e-3, abs=1e-4)


def test_coupled_acceptance_is_that_of_shared_noise():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    expected = coupled_acceptance(p, q)
    distance = 1 - ratio_acceptance(p, q)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    count, equal = 2500, 0
    for position in range(count):
        noise = gumbel(token_uniforms(NoiseKey(1, Stream.TARGET, position), p))
        equal += np.argmax(np.log(p) + noise) == np.argmax(np.log(q) + noise)
    assert abs(equal / count - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
