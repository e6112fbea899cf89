"""Unseeded sampling through the whole engine follows the target's law, whichever rule verifies.

The law of the first tokens is computed exactly from the model's own logits; many runs are compared by chi-square. Seeds
are a fixed list, so the outcome never changes by chance.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, product

import numpy as np
import pytest
from scipy.stats import chisquare

from foredraft.algo import filters
from foredraft.drafters.model import ModelDrafter
from foredraft.engine import generator as generator_module
from foredraft.engine.generator import Generator
from foredraft.models.base import Rows
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import SamplingParams

VOCAB, LENGTH, RUNS = 5, 3, 3000
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(temperature=4.0, top_k=4, max_tokens=LENGTH, ignore_eos=True, n=100)


def model(seed: int) -> TinyModel:
    return TinyModel(VOCAB, 64, 400, seed=seed, kinship=2.0)


def exact_law() -> dict[tuple[int, ...], float]:
    """Probability of each text of LENGTH tokens under the target alone."""
    target, law = model(0), {}
    for text in product(range(VOCAB), repeat=LENGTH):
        logits = target.forward([Rows(np.array([0], np.int32), 0, [*PROMPT, *text], num_logits=LENGTH + 1)])
        p = 1.0
        for row, token in zip(logits[:LENGTH].astype(np.float64), text, strict=True):
            scores = filters.apply_top_k(filters.apply_temperature(row, PARAMS.temperature), PARAMS.top_k)
            p *= float(filters.softmax(scores)[token])
        law[text] = p
    return law


@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drafted", [True, False], ids=["draft", "plain"])
def test_the_law_of_whole_texts(monkeypatch: pytest.MonkeyPatch, drafted: bool, method: str, native: bool) -> None:
    seeds = count(1)
    monkeypatch.setattr(generator_module.secrets, "randbits", lambda bits: next(seeds) * 0x9E3779B97F4A7C15 % 2**bits)
    drafters = [ModelDrafter("model", model(9), VOCAB)] if drafted else []
    gen = Generator(
        model(0), ByteTokenizer(), drafters, num_speculative_tokens=2, adaptive=False,
        rejection_sample_method=method, max_num_seqs=50, native=native,
    )  # fmt: skip
    outs = [o for _ in range(RUNS // PARAMS.n) for o in gen.generate(PROMPT, PARAMS)]
    if drafted:
        rate = sum(o.speculation.num_accepted_tokens for o in outs) / sum(o.speculation.num_draft_tokens for o in outs)
        assert 0.2 < rate < 0.95
    law = exact_law()
    seen = Counter(tuple(o.token_ids) for o in outs)
    assert all(law[text] > 0 for text in seen)
    common = [text for text in law if RUNS * law[text] >= 8]
    observed = [seen[text] for text in common]
    expected = [RUNS * law[text] for text in common]
    observed.append(RUNS - sum(observed))
    expected.append(RUNS - sum(expected))
    assert chisquare(observed, expected).pvalue > 1e-3
