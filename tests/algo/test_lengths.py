"""Draft lengths against trying all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foredraft.algo.lengths import best_length, best_lengths, expected_tokens, worth_growing


def test_expected_tokens():
    assert expected_tokens([0.7] * 5) == pytest.approx((1 - 0.7**6) / 0.3)  # 2.94, and not 1 + 0.7 * 5
    assert expected_tokens([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)
    assert expected_tokens([]) == 1


def test_best_length_by_trying_all():
    rng = np.random.default_rng(1)
    for _ in range(50):
        rates = rng.random(6)
        passes, step, tokens = 1 + np.cumsum(rng.random(7) * 0.3), rng.random() * 0.4, rng.integers(1, 4)
        rate = [(tokens - 1 + expected_tokens(rates[:k])) / (passes[k] + k * step) for k in range(7)]
        assert best_length(rates, passes, step, tokens) == int(np.argmax(rate))
        assert best_lengths([rates], passes, tokens, [0.25 * step], 0.75 * step) == [int(np.argmax(rate))]
    assert best_length([0.1, 0.1], [1.0, 1.2, 1.4], 0.2) == 0


@pytest.mark.parametrize("draft_s", [0.0, 0.15])
@pytest.mark.parametrize("contexts", [0.0, 0.1])
def test_best_lengths_of_a_batch_by_trying_all(draft_s: float, contexts: float):
    rng = np.random.default_rng(2)
    for _ in range(60):
        acceptance = rng.random((3, 3)).tolist()
        passes = 1 + np.cumsum(rng.random(10)) * 0.2  # any shape
        row_s = rng.random(3) * contexts

        rate = {}
        for lengths in product(range(4), repeat=3):
            tokens = sum(expected_tokens(rates[:k]) for rates, k in zip(acceptance, lengths, strict=True))
            rate[lengths] = tokens / (passes[sum(lengths)] + max(lengths) * draft_s + np.dot(lengths, row_s))
        found = rate[tuple(best_lengths(acceptance, passes, 3.0, row_s, draft_s))]
        assert found == pytest.approx(max(rate.values()), rel=1e-9 if contexts == 0 else 0.01)
        assert found >= rate[0, 0, 0]


def test_drafts_share_their_passes_and_the_rows_that_there_are():
    assert best_lengths([[0.9, 0.9], [0.05]], [1.0, 1.1, 1.2, 1.3], 2.0, [0, 0], 0.01) == [2, 0]
    # one sure text is not worth deep drafts while two others gain as much from the same pass
    assert best_lengths([[0.9] * 3, [0.9], [0.9]], [1.0] * 6, 3.0, [0, 0, 0], 0.3) == [1, 1, 1]
    assert best_lengths([[0.9], [0.9]], [1.0], 2.0, [0, 0]) == [0, 0]  # no room in the pass
    assert best_lengths([[0.9], [0.8]], [1.0, 1.0], 2.0, [0, 0]) == [1, 0]
    assert best_lengths([[], []], [1.0], 2.0, [0, 0]) == [0, 0]
    assert best_lengths([], [1.0], 0.0, []) == []


def test_the_longer_context_pays_more_for_a_row():
    assert best_lengths([[0.9] * 2, [0.9] * 2], [1.0] * 5, 2.0, [0.0, 0.6], 0.0) == [2, 0]


def test_one_token_more_is_worth_it_while_the_rate_rises():
    passes = [1.0, 1.05, 1.1, 1.6, 2.4]
    acceptance = [0.8, 0.8, 0.8, 0.8]
    best = best_length(acceptance, passes, 0.1)

    def grows(k: int) -> bool:
        gain = expected_tokens(acceptance[: k + 1]) - expected_tokens(acceptance[:k])
        return bool(worth_growing([gain], passes, expected_tokens(acceptance[:k]), k, k * 0.1, [0.0], 0.1))

    assert [grows(k) for k in range(4)] == [k < best for k in range(4)]


def test_the_likeliest_drafts_grow_and_share_the_draft_pass():
    flat = [1.0] * 10
    assert worth_growing([0.2, 0.9], flat, 2.0, 0, 0.0, [0.0, 0.0], 0.3) == [1, 0]  # 1 alone would pay, both pay more
    assert worth_growing([0.2, 0.2], flat, 2.0, 0, 0.0, [0.0, 0.0], 0.3) == []
    assert worth_growing([0.2] * 4, flat, 2.0, 0, 0.0, [0.0] * 4, 0.3) == [0, 1, 2, 3]
    assert worth_growing([0.9, 0.9], [1.0, 1.0, 9.0], 2.0, 0, 0.0, [0.0, 0.0], 0.1) == [0]
    assert worth_growing([0.9, 0.9], flat, 2.0, 0, 0.0, [0.9, 0.0], 0.1) == [1]
    assert worth_growing([0.9], [1.0, 1.0], 2.0, 1, 0.0, [0.0], 0.0) == []  # no room in the pass
    assert worth_growing([], flat, 2.0, 0, 0.0, [], 0.1) == []
