"""Unseeded sampling on a real model, drafted by itself at 4 bits: the law of two tokens, by chi-square."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from foredraft import LLM, SamplingParams
from foredraft.algo import filters
from foredraft.engine import generator as generator_module
from foredraft.models.base import LanguageModel, Rows

RUNS = 1536
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=3, ignore_eos=True, n=128)
PROMPT = "My favourite animal is the"


def next_law(model: LanguageModel, tokens: list[int]) -> Any:
    """The target's own law [vocab] after `tokens`, in float64."""
    blocks = np.arange(4, dtype=np.int32)
    scores = model.forward([Rows(blocks, 0, tokens)])[0].astype(np.float64)
    return filters.softmax(filters.apply_top_p(filters.apply_temperature(scores, PARAMS.temperature), PARAMS.top_p))


@pytest.mark.real
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_law_of_the_second_and_third_token(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    seeds = count(1)
    monkeypatch.setattr(generator_module.secrets, "randbits", lambda bits: next(seeds) * 0x9E3779B97F4A7C15 % 2**bits)
    with LLM(
        "smollm2-135m", "model:smollm2-135m", num_speculative_tokens=2, adaptive=False, max_model_len=64,
        rejection_sample_method=method, draft_vocab="full", enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        prompt = llm.tokenizer.encode(PROMPT)
        outs = [o for _ in range(RUNS // PARAMS.n) for o in llm.generate(prompt, PARAMS)]
        assert sum(o.speculation.num_accepted_tokens for o in outs) > RUNS / 2
        # The first token comes from the prompt's pass; those after it are conditioned on the most frequent one.
        first, _ = Counter(o.token_ids[0] for o in outs).most_common(1)[0]
        pairs = [(o.token_ids[1], o.token_ids[2]) for o in outs if o.token_ids[0] == first]
        second = next_law(llm.model, [*prompt, first])
        law = {}
        for t in np.flatnonzero(second):
            third = next_law(llm.model, [*prompt, first, int(t)])
            law |= {(int(t), int(u)): float(second[t] * third[u]) for u in np.flatnonzero(third)}
    seen = Counter(pairs)
    assert set(seen) <= set(law)
    common = [pair for pair in law if len(pairs) * law[pair] >= 5]
    observed = [seen[pair] for pair in common]
    expected = [len(pairs) * law[pair] for pair in common]
    observed.append(len(pairs) - sum(observed))
    expected.append(len(pairs) - sum(expected))
    assert len(common) >= 8
    assert chisquare(observed, expected).pvalue > 1e-3
