"""The sampler's behaviour with real noise: seeds, order of processing, logprobs, errors; every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.triton_device import DEVICE  # isort: skip  (before any kernel is defined)

import numpy as np
import pytest
import torch

from foredraft.algo.masks import pack_mask
from foredraft.algo.sampler import Sampler, make_sampler
from foredraft.errors import NoTokenError, NumericalError
from foredraft.types import Draft, SamplingParams

VOCAB = 40
EOS = 7


def array_sampler(params: SamplingParams, **options) -> Sampler:
    return make_sampler(params, **{"vocab_size": VOCAB, "prompt": [3, 4], "seed": 11, "eos_ids": [EOS], **options})


def native_sampler(params: SamplingParams, **options) -> Sampler:
    return array_sampler(params, kind="native", **options)


def triton_sampler(params: SamplingParams, **options) -> Sampler:
    return array_sampler(params, kind="triton", device=DEVICE, **options)


quick = pytest.mark.parametrize("make", [array_sampler, native_sampler], ids=["array", "native"])
implementations = pytest.mark.parametrize(
    "make", [array_sampler, native_sampler, triton_sampler], ids=["array", "native", "triton"]
)


def logits_after(context: Sequence[int], width: int = VOCAB, salt: int = 0) -> np.ndarray:
    rng = np.random.default_rng([salt, *context])
    return (rng.normal(size=width) * 2).astype(np.float32)


def decode(make: Callable[..., Sampler], params: SamplingParams, length: int, propose=None, **options) -> list[int]:
    """`length` tokens; `propose(text, sampler)` gives tokens and parents for each pass."""
    sampler = make(params, **options)
    text: list[int] = []
    while len(text) < length:
        tokens, parents = propose(text, sampler) if propose else ([], [])
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        rows = np.stack([logits_after(text), *(logits_after([*text, *path]) for path in paths)])
        verdict = sampler.verify(rows, Draft(tokens=tokens, parents=parents))
        new = [*(tokens[i] for i in verdict.accepted), verdict.token]
        sampler.extend(new)
        text += new
    return text[:length]


def close_draft(text: list[int], sampler: Sampler) -> tuple[list[int], list[int]]:
    """A model that almost agrees, drawing with the target's noise."""
    tokens: list[int] = []
    for _ in range(len(text) % 5):
        context = [*text, *tokens]
        tokens.append(sampler.draw(logits_after(context) + 0.3 * logits_after(context, salt=1), tokens, None)[0])
    return tokens, list(range(-1, len(tokens) - 1))


def foreign_tree(text: list[int], sampler: Sampler) -> tuple[list[int], list[int]]:
    """A tree whose first path is what the target will say, and branches that it will not."""
    first = sampler.draw(logits_after(text), [], None)[0]
    second = sampler.draw(logits_after([*text, first]), [first], None)[0]
    return [(first + 1) % VOCAB, first, 0, second, first], [-1, -1, 0, 1, 3]


SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, frequency_penalty=0.3, min_tokens=9)


def same_seed_same_text(make: Callable[..., Sampler]) -> None:
    for params in (SAMPLED, SamplingParams(temperature=0, presence_penalty=0.4)):
        plain = decode(make, params, 60)
        assert decode(make, params, 60, close_draft) == plain
        assert decode(make, params, 60, foreign_tree) == plain
        assert EOS not in plain[: params.min_tokens]
    assert decode(make, SAMPLED, 60, seed=12) != decode(make, SAMPLED, 60)
    assert decode(make, SAMPLED, 60, choice=1) != decode(make, SAMPLED, 60)


def test_same_seed_same_text_with_any_draft():
    same_seed_same_text(array_sampler)


def test_same_seed_same_text_with_any_draft_native():
    same_seed_same_text(native_sampler)


def test_shared_noise_makes_close_drafts_pass():
    accepted = proposed = 0
    for position in range(40):
        sampler = array_sampler(SamplingParams(), prompt=range(position % 40))
        context = [position]
        token, _ = sampler.draw(logits_after(context) + 0.3 * logits_after(context, salt=1), [], None)
        rows = np.stack([logits_after(context), logits_after([*context, token])])
        accepted += len(sampler.verify(rows, Draft(tokens=[token])).accepted)
        proposed += 1
    assert accepted / proposed > 0.5


def test_order_of_processing():
    """Bias, penalties, grammar, temperature, min-p, top-k, top-p: two the other way round would keep other tokens."""
    logits = np.log(np.array([0.5, 0.26, 0.14, 0.1], dtype=np.float32))

    def kept(params: SamplingParams, mask: Sequence[int] = range(4)) -> list[int]:
        sampler = make_sampler(params, vocab_size=4, prompt=[], seed=0)
        allowed = pack_mask(np.isin(np.arange(4), mask))
        return np.flatnonzero(np.isfinite(sampler.scores(logits.astype(np.float64), [], allowed))).tolist()

    assert kept(SamplingParams(temperature=0.25, min_p=0.1)) == [0]
    assert kept(SamplingParams(temperature=4.0, min_p=0.6)) == [0, 1, 2, 3]
    assert kept(SamplingParams(min_p=0.25, top_p=0.85)) == [0, 1, 2]
    assert kept(SamplingParams(top_k=2, top_p=0.65)) == [0]
    assert kept(SamplingParams(logit_bias={3: 3.0}, top_k=1)) == [3]
    assert kept(SamplingParams(top_k=1), mask=[2, 3]) == [2]
    assert kept(SamplingParams(min_p=0.5), mask=[2, 3]) == [2, 3]
    assert kept(SamplingParams(top_p=0.55), mask=[1, 2, 3]) == [1, 2]
    # Repetition divides what bias has made positive.
    scores = make_sampler(
        SamplingParams(temperature=0, logit_bias={0: 4.0}, repetition_penalty=2.0), vocab_size=2, prompt=[0], seed=0
    ).scores(np.array([-2.0, 0.0]), [])
    assert scores.tolist() == [1.0, 0.0]


@implementations
def test_bias_can_forbid_what_the_model_wants(make):
    logits = logits_after([1])
    wanted = int(np.argmax(logits))
    draft = Draft(tokens=[wanted])
    rows = np.stack([logits, logits_after([1, wanted])])
    assert make(SamplingParams(temperature=0)).verify(rows, draft).accepted == (0,)
    for params in (
        SamplingParams(temperature=0, logit_bias={wanted: -100}),
        SamplingParams(logit_bias={wanted: -100}),
    ):
        verdict = make(params).verify(rows, draft)
        assert verdict.accepted == ()
        assert verdict.token != wanted


@quick
def test_min_p_holds_under_speculation(make):
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[5, 6]] = 10.0
    rows = np.stack([logits, logits])
    for seed in range(20):
        sampler = make(SamplingParams(min_p=0.05), seed=seed)
        verdict = sampler.verify(rows, Draft(tokens=[9]))
        assert verdict.accepted == ()
        assert verdict.token in (5, 6)


@quick
def test_frequency_penalty_counts_every_token_of_an_accepted_block(make):
    """A draft that is always accepted is penalised as plain decoding is."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[0] = 5.0
    params = SamplingParams(temperature=0, frequency_penalty=1.0)

    def text(gamma: int) -> list[int]:
        sampler = make(params)
        tokens: list[int] = []
        while len(tokens) < 12:
            draft: list[int] = []
            for _ in range(gamma):
                draft.append(sampler.draw(logits, draft, None)[0])
            verdict = sampler.verify(np.stack([logits] * (gamma + 1)), Draft(tokens=draft))
            assert len(verdict.accepted) == gamma
            new = [*draft, verdict.token]
            sampler.extend(new)
            tokens += new
        return tokens[:12]

    assert text(0) == text(1) == text(3) == text(5)
    # 5, 4, 3, 2, 1 and the tie at 0, which the lowest id wins; then token 1 joins in.
    assert text(0)[:7] == [0, 0, 0, 0, 0, 0, 1]


@implementations
def test_logprobs_are_of_the_raw_logits(make):
    logits = logits_after([2])
    plain = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    best = np.argsort(-logits)[:5]
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={1: 50.0}, repetition_penalty=1.5)
    scored = make(params).logprobs(logits, 1, 5)
    assert scored.token_id == 1
    assert scored.logprob == pytest.approx(plain[1], abs=1e-5)
    assert [token for token, _ in scored.top] == best.tolist()
    assert [value for _, value in scored.top] == pytest.approx(plain[best], abs=1e-5)
    assert make(params).logprobs(logits, 1, 0).top == ()
    # Ties: the lowest ids.
    assert [token for token, _ in make(params).logprobs(np.zeros(VOCAB, np.float32), 1, 3).top] == [0, 1, 2]


@implementations
def test_draw_tells_the_probability(make):
    logits = logits_after([3])
    law = np.exp(logits.astype(np.float64))
    law /= law.sum()
    token, probability = make(SamplingParams(temperature=0)).draw(logits, [], None)
    assert token == np.argmax(law)
    assert probability == pytest.approx(law[token], rel=1e-5)
    for probs in (None, np.zeros(VOCAB, np.float32)):
        token, probability = make(SamplingParams()).draw(logits, [], probs)
        assert probability == pytest.approx(law[token], rel=1e-5)
        if probs is not None:
            assert probs == pytest.approx(law, rel=1e-5)


@implementations
def test_logits_without_numbers_are_refused_where_they_are_needed(make):
    sound = logits_after([4])
    for broken in (np.nan, np.inf):
        damaged = sound.copy()
        damaged[9] = broken
        for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9)):
            with pytest.raises(NumericalError, match="not finite"):
                make(params).verify(damaged[None], Draft())
            with pytest.raises(NumericalError):
                make(params).draw(damaged, [], None)
            # Behind a token that is rejected nobody looks.
            wrong = (int(np.argmin(sound)) + 0) % VOCAB
            make(params).verify(np.stack([sound, damaged]), Draft(tokens=[wrong]))
    with pytest.raises(NumericalError):
        make(SamplingParams()).verify(np.full((1, VOCAB), -np.inf, dtype=np.float32), Draft())
    with pytest.raises(NumericalError):
        make(SamplingParams()).logprobs(np.full(VOCAB, np.nan, dtype=np.float32), 0, 1)


def mask_of(*tokens: int) -> np.ndarray:
    return pack_mask(np.isin(np.arange(VOCAB), tokens))


@quick
def test_only_what_the_mask_allows_is_chosen(make):
    rows = np.stack([logits_after([7]), logits_after([7, 8])])
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2, frequency_penalty=1.0)):
        for seed in range(10):
            sampler = make(params, seed=seed)
            assert sampler.draw(rows[0], [], None, mask_of(33)) == (33, 1.0)
            law = np.ones(VOCAB, dtype=np.float32)
            assert sampler.draw(rows[0], [], law, mask_of(5, 39))[0] in (5, 39)
            assert set(np.flatnonzero(law)) <= {5, 39}
            masks = np.stack([mask_of(5, 39), mask_of(0, 1)])
            verdict = sampler.verify(rows, Draft(tokens=[5]), masks)
            assert verdict.token in ((0, 1) if verdict.accepted else (39,))
            assert sampler.verify(rows, Draft(tokens=[6], probs=np.ones((1, VOCAB), np.float32)), masks).accepted == ()


@implementations
def test_a_mask_may_leave_nothing_and_hides_no_broken_number(make):
    row = logits_after([9])
    row[3] = -np.inf
    sampler = make(SamplingParams())
    with pytest.raises(NoTokenError):
        sampler.verify(row[None], Draft(), mask_of()[None])
    with pytest.raises(NoTokenError):
        sampler.draw(row, [], None, mask_of(3))
    row[4] = np.nan
    with pytest.raises(NumericalError, match="not finite"):
        sampler.verify(row[None], Draft(), mask_of(5)[None])
    with pytest.raises(ValueError, match="words"):
        sampler.draw(row, [], None, np.zeros(3, dtype=np.uint32))
    for wrong in (np.zeros((1, 3), dtype=np.uint32), np.zeros((2, 2), dtype=np.uint32)):
        with pytest.raises(ValueError, match=r"words|masks"):
            sampler.verify(row[None], Draft(), wrong)


@implementations
def test_shapes_and_ids_are_checked(make):
    rows = np.stack([logits_after([5])] * 3)
    sampler = make(SamplingParams())
    for draft in (
        Draft(tokens=[1]),
        Draft(tokens=[1, VOCAB]),
        Draft(tokens=[1, -1]),
        Draft(tokens=[1, 2], parents=[-1, 1]),
        Draft(tokens=[1, 2], parents=[-1]),
        Draft(tokens=[1, 2], probs=np.ones((1, VOCAB), dtype=np.float32)),
        Draft(tokens=[1, 2], probs=np.zeros((2, VOCAB), dtype=np.float32)),
    ):
        with pytest.raises(ValueError, match=r"."):
            sampler.verify(rows, draft)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.extend([VOCAB])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.draw(rows[0], [-1], None)
    with pytest.raises(ValueError, match="too narrow"):
        sampler.draw(rows[0], [], np.zeros(VOCAB - 1, dtype=np.float32))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        make(SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ValueError, match=r"."):
        sampler.logprobs(rows[0][:-1], 1, 1)


@implementations
def test_padded_vocabularies(make):
    """Draft heads with more or fewer rows than the target's; rows past `vocab_limit` are padding."""
    for params in (SamplingParams(temperature=0), SamplingParams()):
        wide = np.concatenate([logits_after([6]), np.full(8, 50.0, dtype=np.float32)])
        for probs in (None, np.zeros(VOCAB + 8, dtype=np.float32)):
            token, _ = make(params).draw(wide, [], probs)
            assert token < VOCAB
            assert probs is None or probs[VOCAB:].sum() == 0
        narrow = logits_after([6])[: VOCAB - 8]
        for probs in (None, np.ones(VOCAB, dtype=np.float32), np.ones(VOCAB - 8, dtype=np.float32)):
            token, _ = make(params).draw(narrow, [], probs)
            assert token < VOCAB - 8
            assert probs is None or probs[VOCAB - 8 :].sum() == 0
            if probs is not None:
                rows = np.stack([logits_after([6]), logits_after([6, token])])
                make(params).verify(rows, Draft(tokens=[token], probs=probs[None]))
        limited = make(params, vocab_limit=10)
        favoured = logits_after([6])
        favoured[10:] += 20
        assert limited.draw(favoured, [], None)[0] < 10
        assert limited.verify(favoured[None], Draft()).token < 10


def test_torch_rows_give_the_same_tokens():
    """The reference takes the arrays of the hf backend, and chooses as it does on numpy's."""
    params = SamplingParams(top_p=0.9, top_k=20, frequency_penalty=0.2, logit_bias={2: 1.0}, min_tokens=2)
    for method in ("standard", "block"):
        results = []
        for convert in (np.asarray, torch.asarray):
            sampler = array_sampler(params, method=method)
            found = []
            for step in range(10):
                tokens: list[int] = []
                probs = convert(np.zeros((3, VOCAB), dtype=np.float32))
                for i in range(3):
                    row = logits_after([step, *tokens], salt=1) * 0.3 + logits_after([step, *tokens])
                    tokens.append(sampler.draw(convert(row), tokens, probs[i, :])[0])
                rows = convert(np.stack([logits_after([step, *tokens[:i]]) for i in range(4)]))
                verdict = sampler.verify(rows, Draft(tokens=tokens, probs=probs))
                found.append((tuple(tokens), verdict))
                sampler.extend([*(tokens[i] for i in verdict.accepted), verdict.token])
            results.append(found)
        assert results[0] == results[1]


@implementations
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_runners_up_are_the_likeliest_others(make: Callable[..., Sampler], temperature: float) -> None:
    sampler = make(SamplingParams(temperature=temperature, logit_bias={5: -50.0}))
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[[5, 9, 12, 20, 31]] = [4.0, 3.0, 2.0, 2.0, 1.0]
    found = sampler.runners_up(logits, [], 3, 0.0)
    assert [token for token, _ in found] == [12, 20, 31]  # 9 is the best, 5 is held down
    assert [odds for _, odds in found] == pytest.approx(np.exp([-1.0, -1.0, -2.0]))
    assert [token for token, _ in sampler.runners_up(logits, [], 3, 0.2)] == [12, 20]
    assert [token for token, _ in sampler.runners_up(logits, [], 1, 0.0)] == [12]
    allowed = np.isin(np.arange(VOCAB), [5, 20, 31])
    assert [token for token, _ in sampler.runners_up(logits, [], 9, 0.01, pack_mask(allowed))] == [31]
    assert sampler.runners_up(logits, [], 0, 0.0) == []


@implementations
def test_runners_up_pay_for_repetition_along_the_path(make: Callable[..., Sampler]) -> None:
    sampler = make(SamplingParams(temperature=0, repetition_penalty=10.0))
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[[9, 12, 20]] = [3.0, 2.0, 1.0]
    assert [token for token, _ in sampler.runners_up(logits, [12], 1, 0.0)] == [20]
    with pytest.raises(NumericalError):
        sampler.runners_up(np.full(VOCAB, np.nan, np.float32), [], 1, 0.0)
