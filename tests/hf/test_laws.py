"""Sampled texts: the law at every position is the one that `generate` draws from after the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from tests.hf.calls import DRAFTERS, ours
from tests.models.hf.zoo import PAD, model, prompts

PROMPT_LENGTH = 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.6, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta": {"eta_cutoff": 0.02, "top_k": 0},
    "renormalised": {"top_k": 5, "renormalize_logits": True},
    "repetition": {"repetition_penalty": 1.6},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "top_k": 4},
    "at least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 60))},
    "at least in all": {"min_length": 17, "eos_token_id": list(range(3, 60))},
    "forced end": {"forced_eos_token_id": 7},
    "bad words": {"bad_words_ids": [[t] for t in range(3, 40)] + [[50, 51]]},
    "biases": {"sequence_bias": [[[5], 4.0], [[6, 7], 3.0]]},
    "suppressed": {"suppress_tokens": list(range(3, 50)), "begin_suppress_tokens": list(range(50, 60))},
    "growing end": {"exponential_decay_length_penalty": (3, 1.8), "eos_token_id": 9},
    "allowed only": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 20 + row, 40 + len(ids) % 7]},
    "many ends": {"eos_token_id": list(range(3, 20)), "top_k": 0},
}


class Script:
    """Stands for `torch.multinomial` in `generate`: draws what it is told, and keeps the laws."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens  # [rows, new]
        self.laws: list[torch.Tensor] = []

    def __call__(self, probs: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
        self.laws.append(probs.clone())
        return self.tokens[:, len(self.laws) - 1][:, None]


def both(monkeypatch: pytest.MonkeyPatch, spec: str, arguments: dict[str, Any]) -> tuple[Any, Any, Script]:
    """Our sampled texts, and `generate` made to write them."""
    torch.manual_seed(3)
    got = ours(model("llama"), spec, **arguments, return_dict_in_generate=True, output_scores=True)
    script = Script(got.sequences[:, PROMPT_LENGTH:])
    monkeypatch.setattr(torch, "multinomial", script)
    return got, model("llama").generate(**arguments), script


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_law_at_every_position_is_generates(
    options: dict[str, Any], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**prompts(), "do_sample": True, "max_new_tokens": 14, **options}
    got, plain, script = both(monkeypatch, spec, arguments)
    assert plain.equal(got.sequences)  # ends, padding and lengths are where `generate` has them
    assert len(script.laws) == len(got.scores)
    for step, (law, scores) in enumerate(zip(script.laws, got.scores, strict=True)):
        is_text = script.tokens[:, step] != PAD
        torch.testing.assert_close(scores[is_text].softmax(dim=-1), law[is_text], atol=1e-5, rtol=1e-3)


def test_sampled_texts_stop_where_generate_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([int(row[-1]) % 5 == 0 for row in ids])

    arguments = {
        **prompts(),
        "do_sample": True,
        "max_new_tokens": 14,
        "stopping_criteria": StoppingCriteriaList([stop]),
    }
    got, plain, _ = both(monkeypatch, "ngram+model", arguments)
    assert plain.equal(got.sequences)
    assert (got.sequences[:, PROMPT_LENGTH:] == PAD).any()
