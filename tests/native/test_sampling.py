"""The C++ sampler against the reference: same noise, same tokens, same laws; equal bits on every kernel set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from foredraft import _native
from foredraft.algo.masks import pack_mask
from foredraft.algo.sampler import ArraySampler, Sampler, make_sampler
from foredraft.types import Draft, SamplingParams, Verdict

GREEDY = SamplingParams(temperature=0)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return SamplingParams(
        temperature=pick(0.0, 0.3, 1.0, 1.0, 2.5),
        top_p=pick(1.0, 1.0, 0.9, 0.4),
        top_k=pick(0, 0, 1, 4, 60),
        min_p=pick(0.0, 0.0, 0.05, 0.5),
        presence_penalty=pick(0.0, 0.0, 0.7, -0.5),
        frequency_penalty=pick(0.0, 0.0, 0.4),
        repetition_penalty=pick(1.0, 1.0, 1.4, 0.8),
        logit_bias={int(rng.integers(vocab)): 3.0, 0: -2.0} if rng.random() < 0.3 else {},
        min_tokens=pick(0, 0, 4),
    )


def pair(params: SamplingParams, **options) -> tuple[Sampler, Sampler]:
    """The reference and the native sampler."""
    return make_sampler(params, **options), make_sampler(params, kind="native", **options)


def random_masks(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Few tokens, or all but a few, in each row; one at least that is not the last."""
    allowed = rng.random((count, vocab)) < rng.choice([0.1, 0.97], size=(count, 1))
    allowed[np.arange(count), rng.integers(vocab - 1, size=count)] = True
    return np.stack([pack_mask(row) for row in allowed])


def random_tree(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return [int(rng.integers(-1, i)) if i else -1 for i in range(num_tokens)]


def test_same_tokens_and_verdicts_as_the_reference():
    """Chains and trees, one-hot and sampled, with masks and without, over several passes with tokens between them."""
    rng = np.random.default_rng(0)
    for trial in range(150):
        vocab = int(rng.choice([2, 15, 16, 17, 64, 65, 200]))
        params = random_params(rng, vocab)
        reference, native = pair(
            params,
            vocab_size=vocab,
            prompt=rng.integers(vocab, size=3).tolist(),
            seed=int(rng.integers(2**63)),
            choice=int(rng.integers(100)),
            eos_ids=[vocab - 1],
            method="block" if trial % 2 else "standard",
        )
        for _ in range(3):
            n = int(rng.integers(0, 6))
            sampled, is_tree = rng.random() < 0.5 and n > 0, rng.random() < 0.3
            rows = (rng.normal(size=(1 + n, vocab)) * 2.5).astype(np.float32)
            parents = random_tree(rng, n) if is_tree else list(range(-1, n - 1))
            masks = random_masks(rng, 1 + n, vocab) if rng.random() < 0.5 else None
            knows_masks = rng.random() < 0.7
            probs = [np.zeros((n, vocab), dtype=np.float32) if sampled else None for _ in range(2)]
            tokens: list[int] = []
            for i in range(n):
                row = rows[1 + parents[i]] + (rng.normal(size=vocab) * 0.7).astype(np.float32)
                path, node = [], parents[i]
                while node >= 0:
                    path.insert(0, tokens[node])
                    node = parents[node]
                mask = masks[1 + parents[i]] if masks is not None and knows_masks else None
                expected, got = (
                    sampler.draw(row, path, buffer[i] if buffer is not None else None, mask)
                    for sampler, buffer in zip((reference, native), probs, strict=True)
                )
                assert got[0] == expected[0]
                assert got[1] == pytest.approx(expected[1], abs=1e-6)
                tokens.append(got[0])
            if sampled:
                assert np.allclose(probs[0], probs[1], rtol=0, atol=1e-6)
            expected, got = (
                sampler.verify(rows, Draft(tokens=tokens, parents=parents, probs=buffer), masks)
                for sampler, buffer in zip((reference, native), probs, strict=True)
            )
            assert got == expected
            new = [*(tokens[i] for i in got.accepted), got.token]
            reference.extend(new)
            native.extend(new)


def tie_heavy_rows(rng: np.random.Generator) -> list[np.ndarray]:
    rows = [np.zeros(50), rng.integers(0, 3, 300), rng.integers(0, 2, 5000) * 9.0, np.repeat([4.0, 4.0, -30.0], 699)]
    rows.append(np.where(rng.random(400) < 0.9, -np.inf, 1.0))
    rows.append(rng.normal(size=3000) * 4)
    rows.append(np.linspace(0, -60, 2000))  # further down than the first distances of the filters
    return [row.astype(np.float32) for row in rows]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=1500),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.02),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=8.0, top_p=0.9),
        SamplingParams(temperature=0.05, min_p=0.3, top_k=40, top_p=0.5),
        SamplingParams(temperature=1e-30),
    ],
    ids=lambda p: f"T{p.temperature:g}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_filters_keep_the_same_tokens(params: SamplingParams):
    for logits in tie_heavy_rows(np.random.default_rng(1)):
        vocab = len(logits)
        laws = [np.full(vocab, 9.0, dtype=np.float32) for _ in range(2)]
        for sampler, law in zip(pair(params, vocab_size=vocab, prompt=[], seed=0), laws, strict=True):
            sampler.draw(logits, [], law)
        assert np.allclose(laws[0], laws[1], rtol=1e-4, atol=1e-9)
        # Below the least float there is nothing to keep.
        assert np.array_equal(laws[0] > 1e-36, laws[1] > 1e-36)


def test_greedy_takes_the_lowest_of_equals():
    for where in ([3, 4], [0, 63], [15, 16, 700], [64, 128], [999]):
        logits = np.full(1000, -1.0, dtype=np.float32)
        logits[where] = 2.0
        for sampler in pair(GREEDY, vocab_size=1000, prompt=[], seed=0):
            assert sampler.verify(logits[None], Draft()).token == where[0]
    below = np.full(20, -5.0, dtype=np.float32)  # less than the padding of a register could be
    assert make_sampler(GREEDY, vocab_size=20, prompt=[], seed=0, kind="native").verify(below[None], Draft()).token == 0


def follows(counts: np.ndarray, law: np.ndarray) -> bool:
    """Chi-square at 1e-6 of false alarm, small cells joined."""
    expected = counts.sum() * law
    small = expected < 8
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return bool(counts[law == 0].sum() == 0 and statistic < chi2.ppf(1 - 1e-6, keep.sum() - 1))


@pytest.mark.parametrize("method", ["walk", "standard", "block"])
def test_fifty_tokens_follow_the_target(method: str):
    """First and second token of 20,000 seeds, drafted by another law: each follows its own processed law."""
    rng = np.random.default_rng(4)
    vocab, num_seeds = 50, 20_000
    params = SamplingParams(temperature=0.7, top_p=0.9)
    target = (rng.normal(size=(3, vocab)) * 1.5).astype(np.float32)
    draft = target[:2] + rng.normal(size=(2, vocab)).astype(np.float32) * 0.5
    probs = None if method == "walk" else np.zeros((2, vocab), dtype=np.float32)
    counts = np.zeros((2, vocab))
    for seed in range(num_seeds):
        sampler = make_sampler(
            params,
            vocab_size=vocab,
            prompt=[],
            seed=seed,
            method="block" if method == "block" else "standard",
            kind="native",
        )
        tokens: list[int] = []
        for i in range(2):
            tokens.append(sampler.draw(draft[i], tokens, None if probs is None else probs[i])[0])
        verdict = sampler.verify(target, Draft(tokens=tokens, probs=probs))
        emitted = [*(tokens[i] for i in verdict.accepted), verdict.token]
        if len(emitted) == 1:
            sampler.extend(emitted)
            emitted.append(sampler.verify(target[1:2], Draft()).token)
        for position in range(2):
            counts[position, emitted[position]] += 1
    reference = ArraySampler(params, vocab_size=vocab, prompt=[], seed=0)
    for position in range(2):
        law = np.zeros(vocab)
        reference.draw(target[position], [], law)
        assert follows(counts[position], law)
        other = np.zeros(vocab)
        reference.draw(draft[position], [], other)
        assert not follows(counts[position], other)  # the test would see the draft's law


def test_every_kernel_set_gives_the_same_bits():
    rng = np.random.default_rng(6)
    sets = _native.kernel_sets()
    assert "portable" in sets
    wide = (rng.normal(size=(4, 5003)) * 6).astype(np.float32)
    wide[1] *= 20
    wide[2, ::7] = -np.inf
    wide[3] = rng.integers(0, 4, 5003)
    for params in (
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.95),
        SamplingParams(temperature=3.0, top_k=900, min_p=1e-3, frequency_penalty=0.5),
    ):
        results = []
        for name in sets:
            sampler = make_sampler(params, vocab_size=5003, prompt=[1, 2], seed=9, kind="native", kernel_set=name)
            probs = np.zeros((3, 5003), dtype=np.float32)
            found: list[tuple[object, ...]] = []
            tokens: list[int] = []
            for i in range(3):
                found.append(sampler.draw(wide[i], tokens, None))
                found.append(sampler.draw(wide[i] * 0.9, tokens, probs[i]))
                tokens.append(int(found[-1][0]))
            found.append((sampler.verify(wide, Draft(tokens=tokens, probs=probs)),))
            found.append((sampler.verify(wide, Draft(tokens=[f[0] for f in found[:6:2]])),))
            masks = random_masks(np.random.default_rng(2), 4, 5003)
            found.append((sampler.verify(wide, Draft(tokens=tokens, probs=probs), masks),))
            found.append(sampler.draw(wide[0], [], probs[0], masks[0]))
            found += [(sampler.logprobs(row, 5, 7),) for row in wide]
            results.append((found, probs.tobytes()))
        assert all(result == results[0] for result in results)


def test_seeds_of_every_sign_and_size():
    logits = np.random.default_rng(7).normal(size=(1, 100)).astype(np.float32)
    for seed in (0, 1, -1, 2**63, 2**64 - 1, -(2**63)):
        tokens = [s.verify(logits, Draft()).token for s in pair(SamplingParams(), vocab_size=100, prompt=[], seed=seed)]
        assert tokens[0] == tokens[1]


def test_arguments_may_be_numpy_and_results_are_plain():
    sampler = make_sampler(GREEDY, vocab_size=8, prompt=np.array([1, 2]), seed=0, kind="native")
    rows = np.eye(8, dtype=np.float32)[[3, 4, 5]]
    sampler.extend(np.array([1], dtype=np.int64))
    verdict = sampler.verify(rows, Draft(tokens=np.array([3, 4], dtype=np.int32), parents=np.array([-1, 0])))
    assert verdict == Verdict((0, 1), 5)
    assert type(verdict.token) is int
    # Neither another type nor strided rows are read as something else.
    for wrong in (rows.astype(np.float64), rows[:, ::2]):
        with pytest.raises((TypeError, ValueError)):
            sampler.verify(wrong, Draft(tokens=[3, 4]))
    with pytest.raises((TypeError, ValueError)):
        sampler.verify(rows, Draft(tokens=[3.5, 4]))


def test_native_fields_come_from_the_parameters():
    """Each field reaches the C++ side: changing it changes the law."""
    logits = np.linspace(2, -2, 30).astype(np.float32)
    base = SamplingParams()
    laws = []
    for params in (
        base,
        replace(base, temperature=0.5),
        replace(base, top_p=0.5),
        replace(base, top_k=3),
        replace(base, min_p=0.5),
        replace(base, presence_penalty=1.0),
        replace(base, frequency_penalty=1.0),
        replace(base, repetition_penalty=2.0),
        replace(base, logit_bias={4: 2.0}),
        replace(base, min_tokens=9),
    ):
        expected, law = np.zeros((2, 30), dtype=np.float32)
        for sampler, out in zip(
            pair(params, vocab_size=30, prompt=[1], seed=0, eos_ids=[0]), (expected, law), strict=True
        ):
            sampler.extend([2, 2, 3])
            sampler.draw(logits, [2], out)
        assert np.allclose(expected, law, atol=1e-6)
        laws.append(law.tobytes())
    assert len(set(laws)) == len(laws)
