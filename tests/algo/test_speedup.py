from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foredraft.algo.noise import NoiseKey, Stream, gumbel, token_uniforms
from foredraft.algo.speedup import (
    best_length,
    best_lengths,
    breakeven_acceptance,
    coupled_acceptance,
    expected_tokens,
    expected_tokens_by_position,
    memory_bound_pass,
    ratio_acceptance,
    speedup,
)


def test_expected_tokens():
    assert expected_tokens(0.7, 5) == pytest.approx(2.9412, abs=1e-4)  # and not 1 + 0.7 * 5
    assert expected_tokens(0.7, 5) == pytest.approx(expected_tokens_by_position([0.7] * 5))
    assert expected_tokens(1.0, 3) == 4
    assert expected_tokens(0.0, 3) == 1
    assert expected_tokens_by_position([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)


def test_speedup_and_breakeven():
    assert speedup([0.8] * 3, pass_cost=1.1, draft_cost=0.6) == pytest.approx(2.952 / 1.7)
    acceptance = breakeven_acceptance(3, pass_cost=1.1, draft_cost=0.6)
    assert speedup([acceptance] * 3, 1.1, 0.6) == pytest.approx(1.0)
    assert breakeven_acceptance(1, pass_cost=1.5, draft_cost=0.6) is None


def test_best_length_by_trying_all():
    rng = np.random.default_rng(1)
    for _ in range(50):
        rates = rng.random(6)
        passes = 1 + np.cumsum(rng.random(7) * 0.3)
        drafts = np.arange(7) * rng.random() * 0.4
        rate = [expected_tokens_by_position(rates[:k]) / (passes[k] + drafts[k]) for k in range(7)]
        assert best_length(rates, passes, drafts) == int(np.argmax(rate))
    assert best_length([0.1, 0.1], [1.0, 1.2, 1.4], [0.0, 0.2, 0.4]) == 0


def test_best_lengths_of_a_batch_by_trying_all():
    rng = np.random.default_rng(2)
    for _ in range(30):
        acceptance = rng.random((3, 3)).tolist()
        passes = 1 + np.cumsum(np.sort(rng.random(10))) * 0.2
        rate = {
            lengths: sum(expected_tokens_by_position(acceptance[i][:k]) for i, k in enumerate(lengths))
            / passes[sum(lengths)]
            for lengths in product(range(4), repeat=3)
        }
        found = tuple(best_lengths(acceptance, passes, 0.0))
        assert rate[found] == pytest.approx(max(rate.values()))
    assert best_lengths([[0.9, 0.9], [0.05]], [1.0, 1.1, 1.2, 1.3], 0.01) == [2, 0]
    assert best_lengths([[0.9]], [1.0], 0.0) == [0]  # no room in the pass


def test_roofline():
    """70 B in fp16 on 3.35 TB/s."""
    assert memory_bound_pass(140e9, 3.35e12) == pytest.approx(41.8e-3, abs=1e-4)


def test_coupled_acceptance_is_that_of_shared_noise():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    expected = coupled_acceptance(p, q)
    distance = 1 - ratio_acceptance(p, q)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    count, equal = 4000, 0
    for position in range(count):
        noise = gumbel(token_uniforms(NoiseKey(1, Stream.TARGET, position), p))
        equal += np.argmax(np.log(p) + noise) == np.argmax(np.log(q) + noise)
    assert abs(equal / count - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
