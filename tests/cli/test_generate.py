from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from foredraft.cli.main import run
from foredraft.types import SamplingParams

PROMPT = "abcabcabcabc"
ARGS = ("generate", "-m", "tiny", "-p", PROMPT, "-n", "40", "--ignore-eos")


def expected(tiny, prompt: str = PROMPT, *, raw: bool = False, **params):
    """The library's own answer, through the model that the last command opened."""
    fields = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **params})
    llm = tiny[-1]
    return (llm.generate(prompt, fields) if raw else llm.chat([{"role": "user", "content": prompt}], fields))[0]


def test_stdout_is_the_answer_and_stderr_the_rest(tiny, capsys) -> None:
    assert run(ARGS) == 0
    captured = capsys.readouterr()
    assert captured.out == expected(tiny).text + "\n"
    assert captured.err.startswith("[40 tokens, ")


def test_raw_takes_the_text_as_it_is(tiny, capsys) -> None:
    assert run([*ARGS, "--raw"]) == 0
    raw = capsys.readouterr()
    assert raw.out == expected(tiny, raw=True).text + "\n"
    assert run([*ARGS[:2], "templateless", *ARGS[3:]]) == 0
    templateless = capsys.readouterr()
    assert templateless.out == raw.out
    assert templateless.err.startswith("templateless has no chat template: it continues the text as it is")
    assert "chat template" not in raw.err


def test_the_prompt_may_come_from_a_file_or_stdin(tiny, capsys, tmp_path: Path, stdin) -> None:
    assert run(ARGS) == 0
    answer = capsys.readouterr().out
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    rest = ["-n", "40", "--ignore-eos"]
    assert run(["generate", "-m", "tiny", "-f", str(file), *rest]) == 0
    assert capsys.readouterr().out == answer
    for typed in (PROMPT, PROMPT + "\n"):  # echo ends its text with a newline, which is no part of it
        stdin(typed.encode())
        assert run(["generate", "-m", "tiny", "-f", "-", *rest]) == 0
        assert capsys.readouterr().out == answer
        assert tiny[-1].prompts == tiny[0].prompts
    stdin(PROMPT.encode() + b"\n\n")
    assert run(["generate", "-m", "tiny", "-f", "-", *rest, "--raw"]) == 0
    assert tiny[-1].prompts == [PROMPT + "\n"]


def test_json_is_the_documented_object(tiny, capsys) -> None:
    assert run([*ARGS, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value) == [
        *("text", "token_ids", "finish_reason", "usage", "origins", "speculation", "timing"),
        *("model", "drafter", "parameters"),
    ]
    assert list(value["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert list(value["speculation"]) == [
        "num_passes",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_pass",
        "accepted_per_position",
        "by_drafter",
    ]
    assert list(value["timing"]) == ["load_s", "prefill_s", "decode_s", "tokens_per_s"]
    answer = expected(tiny)
    assert value["text"] == answer.text
    assert value["token_ids"] == list(answer.token_ids)
    assert value["origins"] == list(answer.origins)
    assert value["finish_reason"] == "length"
    assert value["timing"]["load_s"] == 0.25
    assert (value["model"], value["drafter"]) == ("tiny", "ngram")
    assert (value["parameters"]["max_tokens"], value["parameters"]["temperature"]) == (40, 0)


def test_json_to_a_file_leaves_the_text_on_stdout(tiny, capsys, tmp_path: Path) -> None:
    target = tmp_path / "answer.json"
    assert run([*ARGS, "--json", str(target)]) == 0
    value = json.loads(target.read_text())
    assert capsys.readouterr().out == value["text"] + "\n"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("target", ["no/x.json", "file/x.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_the_answer(tiny, capsys, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert run([*ARGS, "--json", str(tmp_path / target)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert f"cannot write {tmp_path / target}: " in captured.err


def test_logprobs_are_in_the_object_when_asked_for(tiny, capsys) -> None:
    assert run([*ARGS, "--json", "--logprobs", "2"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert len(value["logprobs"]) == 40
    answer = expected(tiny, logprobs=2)
    tokenizer = tiny[-1].tokenizer
    for entry, original in zip(value["logprobs"], answer.logprobs, strict=True):
        assert (entry["token_id"], entry["logprob"]) == (original.token_id, original.logprob)
        assert [(e["token_id"], e["logprob"]) for e in entry["top"]] == list(original.top)
        for named in (entry, *entry["top"]):
            assert named["token"] == tokenizer.token_bytes(named["token_id"]).decode("utf-8", "replace")


def test_with_and_without_a_drafter_the_answer_is_the_same(tiny, capsys) -> None:
    assert run([*ARGS, "-d", "none", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*ARGS, "--json"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert plain["token_ids"] == drafted["token_ids"]
    assert set(plain["origins"]) == {"target"}
    assert "ngram" in drafted["origins"]


def test_a_prediction_reaches_the_request(tiny, capsys, tmp_path: Path) -> None:
    file = tmp_path / "prediction.txt"
    file.write_text("x = 1\n")
    assert run([*ARGS, "--prediction", str(file)]) == 0
    assert tiny[-1].requests[-1].prediction == "x = 1\n"


def test_trace_rounds_shows_each_round(tiny, capsys) -> None:
    assert run([*ARGS, "--trace-rounds", "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    lines = captured.err.splitlines()[:-1]
    assert len(lines) == value["speculation"]["num_passes"] + 1
    assert "prompt, " in lines[0]
    drafted = [line for line in lines if "ngram " in line]
    assert len(drafted) == value["speculation"]["num_drafts"]
    assert any("accepted " in line for line in drafted)
    assert all("pass " in line and "verify " in line for line in lines)


def test_trace_rounds_keeps_the_answer_in_one_piece(tiny, capsys) -> None:
    assert run(ARGS) == 0
    answer = capsys.readouterr().out
    assert run([*ARGS, "--trace-rounds"]) == 0
    assert capsys.readouterr().out == answer


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "tiny"], "give the prompt with either -p TEXT or -f FILE"),
        (["-m", "tiny", "-p", "a", "-f", "b"], "give the prompt with either"),
        (["-m", "tiny", "-p", ""], "the prompt is empty"),
        (["-m", "tiny", "-p", " \n"], "the prompt is empty"),
        (["-m", "tiny", "-f", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["-m", "tiny", "-f", "/"], "cannot read /: Is a directory"),
        (["-m", "tiny", "-p", "a", "--prediction", "/no/such/file"], "there is none called '/no/such/file'"),
        (["-m", "tiny", "-p", "a", "--prediction", "x = 1"], "--prediction takes a file with the text, and there is"),
        (
            ["-m", "tiny", "-p", "a", "--prediction", "x" * 5000],
            "--prediction takes a file with the text, and there is",
        ),
        (["-m", "tiny", "-p", "a", "--prediction", "/"], "cannot read /: Is a directory"),
        (["-p", "a"], "Missing option '-m'"),
        (["-m", "tiny", "-p", "a", "--logprobs", "2"], "--logprobs are written by --json; give both"),
        (["-m", "tiny", "-p", "a", "--json", "--logprobs", "21"], "21 is not in the range"),
        (["-m", "tiny", "-p", "a", "--top-p", "0"], "--top-p must be above 0"),
    ],
)
def test_bad_usage(tiny, capsys, args: list[str], words: str) -> None:
    assert run(["generate", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_text_that_is_not_utf8_is_refused(tiny, capsys, tmp_path: Path, stdin) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    assert run(["generate", "-m", "tiny", "-f", str(file)]) == 2
    assert f"{file} is not UTF-8 text (byte 3)" in capsys.readouterr().err
    stdin(b"caf\xe9")
    assert run(["generate", "-m", "tiny", "-f", "-"]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context_fails_in_one_line(tiny, capsys) -> None:
    assert run(["generate", "-m", "tiny", "-p", "x" * 600]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.endswith("context holds 512 tokens with the answer: shorten the prompt\n")


def test_what_the_engine_decides_is_shown(tiny, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(text: str) -> None:
        if text == "\n":
            logging.getLogger("foredraft").info("ngram is off")

    monkeypatch.setattr("foredraft.cli.generate.write_answer", decide)
    monkeypatch.setattr("foredraft.cli.generate.note", lambda _: None)
    assert run(ARGS) == 0
    assert capsys.readouterr().err.count("foredraft: ngram is off\n") == 1


def test_ctrl_c_stops_the_answer(tiny, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.cli.generate.write_answer", interrupt)
    assert run(ARGS) == 130
    assert capsys.readouterr().out == ""
