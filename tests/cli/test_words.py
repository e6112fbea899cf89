"""Figures in words."""

from __future__ import annotations

import pytest

from foredraft.cli.words import summarise
from foredraft.types import Completion, SpeculationStats, Timing, Usage


def completion(num_tokens: int, tokens_per_s: float, num_drafts: int = 0) -> Completion:
    spec = SpeculationStats(3, num_drafts, 8, 6, 0.75, 4.0, 2.5, (2, 2), {})
    timing = Timing(load_s=0.5, prefill_s=0.25, decode_s=1.0, tokens_per_s=tokens_per_s)
    ids, origins = [1] * num_tokens, ["target"] * num_tokens
    return Completion(0, "", ids, "stop", Usage(5, num_tokens), origins, spec, timing)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (completion(1, 0.0), "[1 token; first token after 0.25 s, loaded in 0.50 s]"),
        (completion(9, 8.04), "[9 tokens, 8.0 tokens/s; first token after 0.25 s, loaded in 0.50 s]"),
        (
            completion(9, 8.04, num_drafts=2),
            "[9 tokens, 8.0 tokens/s; 2.50 tokens a pass, 6 of 8 drafted tokens accepted (75%); "
            "first token after 0.25 s, loaded in 0.50 s]",
        ),
    ],
    ids=["one token has no speed", "plain", "drafted"],
)
def test_the_line_under_an_answer(answer: Completion, line: str) -> None:
    assert summarise(answer) == line
