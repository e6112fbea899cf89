"""Drafts across real tokenizers: byte-level and SentencePiece, in both directions."""

from __future__ import annotations

import pytest

from foredraft import LLM, SamplingParams

PROMPTS = ["The capital of France is", "naïve café — 日本語 🙂:", "def fib(n):\n    "]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True),
]


@pytest.mark.pair
@pytest.mark.parametrize(("target", "draft"), [("gemma3-270m", "smollm2-135m"), ("smollm2-135m", "gemma3-270m")])
def test_the_text_is_plain_decoding_s(target: str, draft: str) -> None:
    with LLM(target, "none", max_model_len=256) as llm:
        plain = [[out.token_ids for out in llm.generate(PROMPTS, params)] for params in PARAMS]
    with LLM(target, f"model:{draft}", max_model_len=256, num_speculative_tokens=4, adaptive=False) as llm:
        for params, expected in zip(PARAMS, plain, strict=True):
            outs = llm.generate(PROMPTS, params)
            assert [out.token_ids for out in outs] == expected
            assert sum(out.speculation.num_accepted_tokens for out in outs) > 5
