"""`foredraft.hf.generate` where rows stay on the model's device: the texts of the CPU, draw for draw."""

from __future__ import annotations

from tests.triton_device import DEVICE  # isort: skip  (before any kernel is defined)

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import foredraft.hf
from foredraft.algo.triton.sampler import TritonSampler
from foredraft.engine import step
from foredraft.errors import NoTokenError, NumericalError
from tests.hf.calls import drafter
from tests.models.hf.zoo import make_model, prompts

ON_DEVICE = ["array", "triton"]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, processed": {"do_sample": False, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "top_k": 0},
    "filtered": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
}


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def generated(spec: str, **options: Any) -> Any:
    """One set of arguments, with the scores that every token was chosen by."""
    target, given = make_model("llama").to(DEVICE), drafter(spec)
    if "assistant_model" in given:
        given["assistant_model"] = make_model("llama", seed=1).to(DEVICE)
    wanted = {"max_new_tokens": 7, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.manual_seed(5)
    return foredraft.hf.generate(target, **moved(prompts()), adaptive=False, **given, **wanted | options)


@pytest.mark.parametrize("spec", ["ngram", "model"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_draws_and_scores(options: dict[str, Any], spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    together = TritonSampler.verify_together
    monkeypatch.setattr(
        TritonSampler,
        "verify_together",
        staticmethod(lambda checks: decided.append(len(checks)) or together(checks)),
    )
    monkeypatch.setenv("FOREDRAFT_SAMPLER", "native")
    wanted = generated(spec, **options)
    assert not decided
    for kind in ON_DEVICE:
        monkeypatch.setenv("FOREDRAFT_SAMPLER", kind)
        got = generated(spec, **options)
        assert got.sequences.equal(wanted.sequences)
        for ours, theirs in ((got.scores, wanted.scores), (got.logits, wanted.logits)):
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs))
    assert max(decided) == 4  # the batch by one launch


@pytest.mark.parametrize(("kind", "stay"), [("native", False), ("array", True), ("triton", True)])
def test_where_rows_are_read(kind: str, stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SAMPLER", kind)
    rows: list[Any] = []
    verify_all = step.verify_all
    monkeypatch.setattr(
        step, "verify_all", lambda checks: rows.extend(check.logits for check in checks) or verify_all(checks)
    )
    generated("ngram", do_sample=False)
    assert rows
    assert all((isinstance(row, torch.Tensor) and row.device.type == DEVICE) == stay for row in rows)


class _Spoils(LogitsProcessor):
    def __init__(self, value: float) -> None:
        self._value = value

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self._value)


@pytest.mark.parametrize("kind", ["native", *ON_DEVICE])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("value", "error"), [(-torch.inf, NoTokenError), (torch.inf, NumericalError), (torch.nan, NumericalError)]
)
def test_processors_that_leave_no_law(
    kind: str, do_sample: bool, value: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_SAMPLER", kind)
    with pytest.raises(error):
        generated("ngram", do_sample=do_sample, logits_processor=LogitsProcessorList([_Spoils(value)]))


@pytest.mark.parametrize("kind", ["native", *ON_DEVICE])
def test_a_model_that_says_no_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SAMPLER", kind)
    target = make_model("llama").to(DEVICE)
    inputs = moved(prompts((0,)))
    foredraft.hf.generate(target, **inputs, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        target.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(NumericalError, match="not finite"):
        foredraft.hf.generate(target, **inputs, max_new_tokens=4, do_sample=False)
