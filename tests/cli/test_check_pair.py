from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli import check_pair
from foredraft.cli.main import run
from foredraft.drafters.pair import Pair
from foredraft.testing import make_tiny_gguf


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, others whose head is padded otherwise or that are larger, and one of another vocabulary."""
    path = tmp_path_factory.mktemp("pairs")
    make_tiny_gguf("llama", path / "target.gguf", num_layers=3)
    make_tiny_gguf("llama", path / "padded.gguf", num_layers=1, vocab_size=320)
    make_tiny_gguf("llama", path / "large.gguf", num_layers=16)
    make_tiny_gguf("qwen2", path / "other.gguf", num_layers=1, reverse_bytes=True)
    return path


def test_the_same_tokenizer_with_another_head_is_native(models: Path, home: Path, capsys) -> None:
    assert run(["check-pair", str(models / "target.gguf"), str(models / "padded.gguf"), "-t", "1"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith("natively: every token that both can emit has the same bytes")
    assert rest[0].startswith("a pass takes ")
    assert "for one of the target's" not in rest[0]


def test_another_tokenizer_and_what_it_has_to_reach(models: Path, home: Path, capsys) -> None:
    assert run(["check-pair", str(models / "target.gguf"), str(models / "other.gguf"), "-t", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "cross-vocabulary"
    assert "token 0 is" in found["reason"]
    assert found["shared_tokens"] == 1.0
    assert found["draft_tokens_per_token"] == 1.0
    assert found["cost_ratio"] == pytest.approx(found["target_ms"] / found["draft_ms"])
    assert {"break_even_acceptance", "break_even_tokens", "speedup", "speedup_tokens", "warning"} <= found.keys()


def test_a_draft_larger_than_its_target_is_a_warning(models: Path, home: Path, capsys) -> None:
    assert run(["check-pair", str(models / "padded.gguf"), str(models / "large.gguf"), "-t", "1"]) == 0
    assert "\nwarning: the draft is no smaller than its target (a pass reads " in capsys.readouterr().out


def test_an_impossible_pair_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pair = Pair("t", "d", "impossible", "the vocabulary of the draft has no text in it", 0.0)
    monkeypatch.setattr(check_pair, "examine", lambda *_: (pair, None, None))
    assert run(["check-pair", "t", "d"]) == 1
    assert capsys.readouterr().out == "d cannot draft for t: the vocabulary of the draft has no text in it\n"


def test_bad_usage_and_missing_models(models: Path, home: Path, capsys) -> None:
    assert run(["check-pair", "t"]) == 2
    assert run(["check-pair", str(models / "target.gguf"), "no/such.gguf"]) == 1
    assert "such.gguf" in capsys.readouterr().err


def test_the_answer_drafts_across_tokenizers_on_the_core(models: Path, home: Path, capsys) -> None:
    line = [
        "generate",
        "-m",
        str(models / "target.gguf"),
        "--raw",
        "-p",
        "abcabc",
        "-n",
        "24",
        "--ignore-eos",
        "-t",
        "1",
    ]
    texts = []
    for drafter in ("none", f"model:{models / 'other.gguf'}"):
        for more in ([], ["--temp", "1.5", "--seed", "3"]):
            assert run([*line, "-d", drafter, "--no-adaptive", "--json", *more]) == 0
            texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[:2] == texts[2:]
