"""Processed rows against the filters that are their reference, in one block of the vocabulary and in several."""

from __future__ import annotations

from .launches import DEVICE, filters_of, keys_of, on_device  # isort: skip  (before any kernel is defined)

import numpy as np
import pytest

from foredraft.algo import filters as reference
from foredraft.algo.noise import NoiseKey, Stream, gumbel, token_uniforms
from foredraft.algo.triton import laws
from foredraft.types import SamplingParams

assert DEVICE


def processed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law of one row."""
    scores = logits.astype(np.float64)
    if params.is_greedy:
        return (np.arange(len(scores)) == np.argmax(scores)).astype(np.float64)
    scores = reference.apply_temperature(scores, params.temperature)
    scores = reference.apply_min_p(scores, params.min_p) if params.min_p > 0 else scores
    scores = reference.apply_top_k(scores, params.top_k)
    return reference.softmax(reference.apply_top_p(scores, params.top_p) if params.top_p < 1 else scores)


def make_laws(rows: np.ndarray, params: list[SamplingParams]) -> laws.Laws:
    logits = on_device(rows, np.float32)
    return laws.make_laws(logits, laws.find_best(logits), filters_of(params), cuts_k=True, cuts_p=True)


def normalised(made: laws.Laws) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a row that has lost all tokens compares unequal
        return made.weights.cpu().numpy() / made.sums.cpu().numpy().sum(axis=1, keepdims=True)


def awkward_rows(vocab: int) -> np.ndarray:
    """Ties in and across blocks, excluded tokens, one allowed token, both zeros, and no ties at all."""
    rng = np.random.default_rng(vocab)
    rows = np.stack(
        [
            np.zeros(vocab),
            rng.integers(0, 3, vocab) * 2.0,
            np.where(rng.random(vocab) < 0.8, -np.inf, rng.integers(0, 2, vocab)),
            np.where(np.arange(vocab) == vocab - 1, 0.0, -np.inf),
            np.where(np.arange(vocab) % 2 == 0, 0.0, -0.0),
            rng.normal(size=vocab) * 4,
            -rng.random(vocab) * 1e-6 + 30,
        ]
    )
    rows[2, vocab // 2] = 1.0
    return rows.astype(np.float32)


FILTERS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=8.0, top_p=0.9),
    SamplingParams(temperature=0.3, min_p=0.02, top_k=9, top_p=0.5),
    SamplingParams(temperature=1e-30),
]


def laws_agree(vocab: int, params: list[SamplingParams]) -> None:
    rows = awkward_rows(vocab)
    grid = [(row, p) for row in rows for p in params]
    got = normalised(make_laws(np.stack([row for row, _ in grid]), [p for _, p in grid]))
    for law, (row, p) in zip(got, grid, strict=True):
        expected = processed(row, p)
        assert np.array_equal(law > 0, expected > 0), p
        assert np.allclose(law, expected, rtol=1e-12, atol=0), p


@pytest.mark.parametrize("params", FILTERS, ids=lambda p: f"T{p.temperature:g}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_laws_are_the_references(params: SamplingParams):
    laws_agree(21, [params])


def test_laws_over_several_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(laws, "MAX_BLOCK", 64)
    laws_agree(130, [SamplingParams(top_k=40), SamplingParams(temperature=2.0, min_p=0.01, top_p=0.6)])


def test_a_row_is_the_same_in_any_company():
    rows, params = awkward_rows(33), FILTERS[4:9:4]
    for row in rows[[1, 5]]:
        for p in params:
            alone = make_laws(row[None], [p])
            among = make_laws(np.stack([rows[0], row, rows[6]]), [FILTERS[0], p, FILTERS[3]])
            assert alone.weights[0].equal(among.weights[1])
            assert alone.sums[0].equal(among.sums[1])


def test_what_is_not_finite_shows():
    rows = np.zeros((4, 70), dtype=np.float32)
    rows[0, 69], rows[1, 3], rows[2] = np.nan, np.inf, -np.inf
    best = laws.find_best(on_device(rows, np.float32)).value.amax(dim=1)
    assert best.tolist() == [np.inf, np.inf, -np.inf, 0]


def noise_agrees(vocab: int, num_keys: int) -> None:
    """The race takes the token that the reference's Gumbel noise makes the greatest."""
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(num_keys, vocab)) * 2).astype(np.float32)
    params = [SamplingParams(temperature=0.8, min_p=0.02 * (i % 2)) for i in range(num_keys)]
    keys = [NoiseKey(11 * i, Stream.TARGET, i, i % 3) for i in range(num_keys)]
    made = make_laws(rows, params)
    winners = laws.race(made, filters_of(params), keys_of(keys))
    got = winners.token.gather(1, winners.value.argmax(dim=1, keepdim=True))[:, 0].tolist()
    for row, p, key, token in zip(rows, params, keys, got, strict=True):
        with np.errstate(divide="ignore"):
            scores = np.log(processed(row, p))
        assert token == int(np.argmax(scores + gumbel(token_uniforms(key, scores))))


def test_samples_are_the_references(monkeypatch: pytest.MonkeyPatch):
    noise_agrees(50, 20)
    monkeypatch.setattr(laws, "MAX_BLOCK", 64)
    noise_agrees(200, 6)


def test_a_real_vocabulary_in_several_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(laws, "MAX_BLOCK", 2**15)
    noise_agrees(151_936, 2)
    row = np.random.default_rng(2).normal(size=(1, 151_936)).astype(np.float32) * 3
    row[0, [5, 40_000, 151_935]] = row.max()  # ties across blocks
    for params in (SamplingParams(top_k=2), SamplingParams(temperature=0.9, top_p=0.95), SamplingParams(temperature=0)):
        law, expected = normalised(make_laws(row, [params]))[0], processed(row[0], params)
        assert np.array_equal(law > 0, expected > 0)
        assert np.allclose(law, expected, rtol=1e-11, atol=0)
