"""Draft lengths against trying all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foredraft.algo.lengths import best_length, best_lengths, expected_tokens, is_worth_another


def test_expected_tokens():
    assert expected_tokens([0.7] * 5) == pytest.approx((1 - 0.7**6) / 0.3)  # 2.94, and not 1 + 0.7 * 5
    assert expected_tokens([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)
    assert expected_tokens([]) == 1


def test_best_length_by_trying_all():
    rng = np.random.default_rng(1)
    for _ in range(50):
        rates = rng.random(6)
        passes, step = 1 + np.cumsum(rng.random(7) * 0.3), rng.random() * 0.4
        rate = [expected_tokens(rates[:k]) / (passes[k] + k * step) for k in range(7)]
        assert best_length(rates, passes, step) == int(np.argmax(rate))
    assert best_length([0.1, 0.1], [1.0, 1.2, 1.4], 0.2) == 0


def test_best_lengths_of_a_batch_by_trying_all():
    rng = np.random.default_rng(2)
    for _ in range(30):
        acceptance = rng.random((3, 3)).tolist()
        passes = 1 + np.cumsum(np.sort(rng.random(10))) * 0.2
        rate = {
            lengths: sum(expected_tokens(acceptance[i][:k]) for i, k in enumerate(lengths)) / passes[sum(lengths)]
            for lengths in product(range(4), repeat=3)
        }
        found = tuple(best_lengths(acceptance, passes, 0.0))
        assert rate[found] == pytest.approx(max(rate.values()))
    assert best_lengths([[0.9, 0.9], [0.05]], [1.0, 1.1, 1.2, 1.3], 0.01) == [2, 0]
    assert best_lengths([[0.9]], [1.0], 0.0) == [0]  # no room in the pass


def test_one_token_more_is_worth_it_while_the_rate_rises():
    passes = [1.0, 1.05, 1.1, 1.6, 2.4]
    acceptance = [0.8, 0.8, 0.8, 0.8]
    best = best_length(acceptance, passes, 0.1)
    worth = [is_worth_another(acceptance[:k], acceptance[k], passes, 0.1) for k in range(4)]
    assert worth == [k < best for k in range(4)]
