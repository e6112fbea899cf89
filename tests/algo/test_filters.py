"""Filters against the plainest possible statement of each, on numpy and on torch, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.algo import filters


def kept(logits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def descending(logits: np.ndarray) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def rows() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    smooth = [rng.normal(size=n) * 2 for n in (1, 2, 7, 40)]
    tied = [np.zeros(8), rng.integers(0, 3, 30).astype(float), np.array([1.0, 1, 0, 1])]
    masked = np.array([-np.inf, 0.0, -np.inf, 1.0, 1.0])
    return [*smooth, *tied, masked]


def test_top_k():
    for logits in rows():
        alive = int(np.isfinite(logits).sum())
        for k in (-1, 0, 1, 2, 5, 100):
            expected = descending(logits)[: k if k > 0 else len(logits)][:alive]
            assert kept(filters.apply_top_k(logits, k)) == sorted(expected)


def test_top_p_keeps_the_fewest_that_reach_it():
    for logits in rows():
        weights = np.exp(logits - logits.max())
        for top_p in (1e-9, 0.1, 0.3, 0.5, 0.75, 0.999):
            expected, mass = [], 0.0
            for i in descending(logits):
                if expected and mass >= top_p * weights.sum():
                    break
                expected.append(i)
                mass += weights[i]
            assert kept(filters.apply_top_p(logits, top_p)) == sorted(i for i in expected if np.isfinite(logits[i]))


def test_top_p_reached_exactly():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert kept(filters.apply_top_p(logits, 0.5)) == [0]
    assert kept(filters.apply_top_p(logits, 0.75)) == [0, 1]
    assert kept(filters.apply_top_p(logits, 0.76)) == [0, 1, 2]


def test_min_p():
    for logits in rows():
        weights = np.exp(logits - logits.max())
        for min_p in (0.01, 0.2, 0.5, 1.0):
            expected = [i for i in range(len(logits)) if weights[i] >= min_p]
            assert kept(filters.apply_min_p(logits, min_p)) == expected


def test_ties_keep_the_lowest_ids():
    logits = np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(filters.apply_top_k(logits, 2)) == [1, 2]
    assert kept(filters.apply_top_k(logits, 4)) == [0, 1, 2, 3]
    assert kept(filters.apply_top_p(np.zeros(10), 0.3)) == [0, 1, 2]
    assert filters.top_tokens(logits, 3) == [1, 2, 3]


def test_temperature():
    logits = np.array([1.0, 3.0, 2.0])
    assert filters.softmax(filters.apply_temperature(logits, 0.5)) == pytest.approx(filters.softmax(logits * 2))
    # However small, it leaves numbers: all the mass goes to the greatest.
    assert filters.softmax(filters.apply_temperature(logits, 1e-300)).tolist() == [0, 1, 0]


def test_penalties():
    logits = np.array([2.0, -2.0, 2.0, -2.0, 1.0])
    counts, seen = np.array([3, 1, 0, 0, 0]), np.array([True, True, True, False, False])
    penalised = filters.apply_penalties(logits, counts, seen, presence=0.5, frequency=0.25, repetition=2.0)
    assert penalised.tolist() == [1 - 0.75 - 0.5, -4 - 0.25 - 0.5, 1.0, -2.0, 1.0]


def test_bias_and_mask():
    logits = np.array([1.0, 2.0, 3.0])
    assert filters.apply_logit_bias(logits, np.array([0.0, 5.0, -100.0])).tolist() == [1, 7, -97]
    assert kept(filters.mask_tokens(logits, np.array([True, False, False]))) == [1, 2]


def test_log_softmax():
    assert np.exp(filters.log_softmax(np.array([1000.0, 1001.0, -np.inf]))).sum() == pytest.approx(1)


def test_torch_keeps_the_same_tokens():
    for logits in rows():
        other = torch.asarray(logits)
        for apply, value in (
            (filters.apply_top_k, 3),
            (filters.apply_top_p, 0.6),
            (filters.apply_min_p, 0.3),
            (filters.apply_temperature, 0.7),
        ):
            assert np.allclose(apply(logits, value), apply(other, value).numpy(), rtol=1e-12, atol=0)
        assert filters.top_tokens(logits, 4) == filters.top_tokens(other, 4)
