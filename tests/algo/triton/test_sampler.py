"""The whole sampler against the reference: the same tokens, laws and verdicts, alone and in a batch."""

from __future__ import annotations

from tests.triton_device import DEVICE  # isort: skip  (before any kernel is defined)

import numpy as np
import pytest
import torch

from foredraft.algo.masks import pack_mask
from foredraft.algo.sampler import Check, Sampler, make_sampler, verify_all
from foredraft.errors import NumericalError
from foredraft.types import Draft, SamplingParams, Verdict

VOCAB = 70
EOS = 69


def both(params: SamplingParams, **options) -> list[Sampler]:
    """The reference and the sampler in Triton."""
    return [make_sampler(params, vocab_size=VOCAB, eos_ids=[EOS], kind=k, **options) for k in ("array", "triton")]


def close_rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target and of a draft that nearly agrees."""
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(count, VOCAB)) * 2.5).astype(np.float32)
    return rows, rows + (rng.normal(size=rows.shape) * 0.5).astype(np.float32)


def drafted(
    samplers: list[Sampler], rows: np.ndarray, parents: list[int], is_drawn: bool, masks: np.ndarray | None = None
) -> list[Draft]:
    """Each sampler's draft. They draw alike, which is checked, the second into a tensor on its device."""
    n = len(parents)
    buffers = [np.ones((n, VOCAB), np.float32), torch.ones((n, VOCAB), device=DEVICE)]
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        path, node = [], parent
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        mask = None if masks is None else masks[1 + parent]
        row = [rows[1 + parent], torch.from_numpy(rows[1 + parent]).to(DEVICE)]
        drawn = [
            sampler.draw(own_row, path, buffer[i] if is_drawn else None, mask)
            for sampler, own_row, buffer in zip(samplers, row, buffers, strict=True)
        ]
        assert drawn[0][0] == drawn[1][0]
        assert drawn[0][1] == pytest.approx(drawn[1][1], abs=1e-6)
        tokens.append(drawn[0][0])
    if is_drawn:
        assert np.allclose(buffers[0], buffers[1].cpu().numpy(), rtol=0, atol=1e-6)
    return [Draft(tokens=tokens, parents=parents, probs=buffer if is_drawn else None) for buffer in buffers]


CHAIN, TREE = [-1, 0, 1], [-1, -1, 0, 2]
CASES = [
    (SamplingParams(temperature=0), CHAIN, False),
    (SamplingParams(temperature=0, presence_penalty=0.5), TREE, False),
    (SamplingParams(top_p=0.9, temperature=0.8), CHAIN, False),
    (SamplingParams(min_p=0.05, logit_bias={3: 2.0}), TREE, False),
    (SamplingParams(), CHAIN, True),
    (SamplingParams(temperature=0.9, min_p=0.01, frequency_penalty=0.4), CHAIN, True),
    (SamplingParams(top_k=20, min_tokens=2), CHAIN, True),
    (SamplingParams(repetition_penalty=1.3), TREE, True),
]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(("params", "parents", "is_drawn"), CASES)
def test_same_tokens_and_verdicts(params: SamplingParams, parents: list[int], is_drawn: bool, method: str):
    """Over two passes, one of them under a grammar's masks."""
    samplers = both(params, prompt=[1, 2], seed=2**63 + 9, choice=3, method=method)
    rng = np.random.default_rng(3)
    for seed in range(2):
        rows, draft_rows = close_rows(seed, 1 + len(parents))
        masks = np.stack([pack_mask(rng.random(VOCAB) < 0.8) for _ in rows]) if seed else None
        drafts = drafted(samplers, draft_rows, parents, is_drawn, masks)
        own_rows = (rows, torch.from_numpy(rows).to(DEVICE))
        found = [s.verify(own, d, masks) for s, own, d in zip(samplers, own_rows, drafts, strict=True)]
        assert found[0] == found[1]
        for sampler in samplers:
            sampler.extend([*(drafts[0].tokens[i] for i in found[0].accepted), found[0].token])


def test_a_batch_gives_what_each_gives_alone():
    """Sequences of all rules and lengths together, one of which is broken: it ends, the others are not touched."""
    wishes = [
        (SamplingParams(temperature=0), CHAIN, False, "standard"),
        (SamplingParams(seed=5, top_p=0.9), [], False, "standard"),
        (SamplingParams(seed=6), TREE, False, "standard"),
        (SamplingParams(), CHAIN, True, "standard"),
        (SamplingParams(), CHAIN[:1], True, "block"),
        (SamplingParams(temperature=0.5), CHAIN[:2], True, "block"),
        (SamplingParams(), TREE, True, "standard"),
        (SamplingParams(), CHAIN[:1], False, "standard"),
    ]
    expected: list[Verdict | NumericalError] = []
    checks = []
    for i, (params, parents, is_drawn, method) in enumerate(wishes):
        samplers = both(params, prompt=[1] * (1 + i), seed=i, method=method)
        rows, draft_rows = close_rows(i, 1 + len(parents))
        drafts = drafted(samplers, draft_rows, parents, is_drawn)
        if i == len(wishes) - 1:
            rows[0, 7] = np.nan
        expected += verify_all([Check(samplers[0], rows, drafts[0])])
        checks.append(Check(samplers[1], torch.from_numpy(rows).to(DEVICE), drafts[1]))
    found = verify_all(checks)
    assert found[:-1] == expected[:-1]
    assert isinstance(found[-1], NumericalError)
    assert str(found[-1]) == str(expected[-1])


def test_rows_of_both_kinds_are_read():
    """A draft on the CPU core gives numpy rows to the sampler of a target on a GPU; its laws come back the same way."""
    reference, sampler = both(SamplingParams(), prompt=[4], seed=8)
    row, probs = close_rows(2, 1)[0][0], np.ones((2, VOCAB + 3), np.float16)
    token, probability = sampler.draw(row[:60], [], probs[0])
    assert (token, probability) == pytest.approx(reference.draw(row[:60], [], probs[1]), abs=1e-6)
    assert np.array_equal(probs[0], probs[1])
    assert probs[0, 60:].sum() == 0


def test_padding_is_never_chosen():
    _, sampler = both(SamplingParams(), prompt=[], seed=1, vocab_limit=10)
    row = torch.zeros((2, VOCAB), device=DEVICE)
    row[:, 10:] = 20
    assert sampler.verify(row[:1], Draft()).token < 10
    assert sampler.draw(row[0], [], None)[0] < 10
    probs = torch.full((1, VOCAB), 0.5, device=DEVICE)
    assert sampler.verify(row, Draft(tokens=[40], probs=probs)).accepted == ()
