from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.cli import demo
from foredraft.cli.main import run
from foredraft.testing import ByteTokenizer
from foredraft.types import SamplingParams


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT", "abcabcabcabc")
    monkeypatch.setattr(demo, "PARAMS", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))


def test_both_speeds_acceptance_and_the_verdict(tiny, short, capsys) -> None:
    assert run(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "identical: yes"
    assert lines[-4].startswith("plain: ")
    assert lines[-3].startswith("speculative: ")
    assert "drafted tokens accepted" in lines[-2]
    assert [request.num_speculative_tokens for request in tiny[-1].requests[:2]] == [0, None]


def test_drafts_are_made_whatever_they_cost(tiny, short) -> None:
    assert run(["demo"]) == 0
    assert not tiny[-1].options.adaptive


def test_the_factor_where_drafts_saved_passes() -> None:
    assert demo.describe_gain(1.53, 3.0) == "1.53 times plain"
    assert demo.describe_gain(1.53, 1.0) == "no draft paid: the difference is noise"


def test_without_drafts_no_factor_is_claimed(tiny, short, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PARAMS", replace(demo.PARAMS, num_speculative_tokens=0))
    assert run(["demo"]) == 0
    speculative, acceptance, verdict = capsys.readouterr().out.splitlines()[-3:]
    assert speculative.endswith("tokens/s, no draft paid: the difference is noise")
    assert acceptance == "acceptance:  no drafts, 1.00 tokens a pass"
    assert verdict == "identical: yes"


def test_a_difference_is_said_and_fails(tiny, short, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo.run_interleaved

    def broken(*args):
        plain, speculative = honest(*args)
        return plain, [replace(run, token_ids=(*run.token_ids[:-1], 0)) for run in speculative]

    monkeypatch.setattr(demo, "run_interleaved", broken)
    assert run(["demo"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "identical: no"


def test_tokens_have_the_colour_of_their_source(tiny) -> None:
    llm = demo.open_llm(demo.EngineOptions("tiny"), None)
    answer = llm.generate(list(b"abcabcabc"), SamplingParams(temperature=0, max_tokens=20))[0]
    answer = replace(answer, text="caf\u00e9", token_ids=(*"caf\u00e9".encode(), ByteTokenizer.EOS))
    answer = replace(answer, origins=("target", "ngram", "ngram", "target", "model", "target"))
    text = demo.coloured(ByteTokenizer(), answer)
    assert text.plain == "caf\u00e9"
    colours = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert colours == {"c": "none", "a": "green", "f": "green", "\u00e9": "cyan"}
