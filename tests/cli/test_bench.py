"""`bench` and `bench passes` on a real (tiny) GGUF file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from foredraft.cli.main import run
from foredraft.cli.progress import Progress
from foredraft.cli.run_bar import RunBar

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"question_id": 1, "category": "one", "turns": ["abcabcabc", "and again"]},
        {"question_id": 2, "category": "two", "turns": ["xyxyxyxyxy"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_json_has_every_drafter_on_every_workload(model: Path, workload: Path, capsys) -> None:
    drafters = f"ngram,none,ngram+model:{model}"
    args = ["bench", "-m", str(model), "-d", drafters, "--workload", str(workload), "-n", "24", "--runs", "2", "--json"]
    assert run(args) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    places = [(row["workload"], row["drafter"]) for row in value["rows"]]
    assert places == [(w, d) for w in ("one", "two", "all") for d in ("none", "ngram", f"ngram+model:{model}")]
    assert all(row["identical"] is True for row in value["rows"])
    assert all(row["num_prompts"] == {"one": 2, "two": 1, "all": 3}[row["workload"]] for row in value["rows"])
    assert value["machine"]["read_gb_per_s"] > 0
    assert value["settings"]["max_tokens"] == 24
    assert "speed-up" in captured.err


def test_files_are_written_beside_the_table(model: Path, workload: Path, tmp_path: Path, capsys) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    args = ["bench", "-m", str(model), "--workload", str(workload), "-n", "12", "--runs", "1", "--limit", "1"]
    assert run([*args, "--markdown", str(page), "--json", str(figures)]) == 0
    captured = capsys.readouterr()
    assert "speed-up" in captured.out
    assert "speed-up" not in captured.err
    assert "| one | ngram |" in page.read_text()
    assert {row["drafter"] for row in json.loads(figures.read_text())["rows"]} == {"none", "ngram"}


def test_passes(model: Path, capsys) -> None:
    args = ["bench", "passes", "-m", str(model), "--rows", "4,1", "--context", "32,64", "--runs", "2", "--json"]
    assert run(args) == 0
    captured = capsys.readouterr()
    passes = json.loads(captured.out)["passes"]
    assert [(cost["context"], cost["rows"]) for cost in passes] == [(32, 1), (32, 4), (64, 1), (64, 4)]
    assert [cost["ratio"] for cost in passes if cost["rows"] == 1] == [1.0, 1.0]
    assert "T(M)/T(1)" in captured.err


def test_passes_without_json_are_a_table_on_stdout(model: Path, capsys) -> None:
    assert run(["bench", "passes", "-m", str(model), "--rows", "2", "--context", "32", "--runs", "1"]) == 0
    captured = capsys.readouterr()
    assert "T(M)/T(1)" in captured.out
    assert "T(M)/T(1)" not in captured.err


def test_answers_too_short_to_be_timed_are_explained(model: Path, workload: Path, capsys) -> None:
    args = ["bench", "-m", str(model), "--workload", str(workload), "-n", "8", "--runs", "1"]
    assert run(args) == 0
    captured = capsys.readouterr()
    assert "identical" in captured.out
    assert "no speeds for one, two: an answer is timed if it has at least 8 tokens" in captured.err


@pytest.mark.parametrize("kind", [[], ["passes"]])
def test_loading_has_ended_when_the_runs_begin(
    model: Path, workload: Path, kind: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(Progress, "__exit__", lambda *_: events.append("loaded"))
    monkeypatch.setattr(RunBar, "__enter__", lambda bar: events.append("runs") or bar)
    flags = ["--rows", "1", "--context", "32"] if kind else ["--workload", str(workload), "-n", "4"]
    assert run(["bench", *kind, "-m", str(model), "--runs", "1", *flags]) == 0
    assert events == ["loaded", "runs"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bench"], "Missing option '-m'"),
        (["bench", "-m", "{model}", "--workload", "poetry"], "neither a file nor one of chat"),
        (["bench", "-m", "{model}", "--peers", "vllm"], "'vllm' is not one of llama.cpp"),
        (["bench", "-m", "{model}", "--runs", "0"], "Invalid value for '--runs'"),
        (["bench", "-m", "{model}", "-d", "magic"], "'magic' is unknown"),
        (["bench", "passes"], "Missing option '-m'"),
        (["bench", "passes", "-m", "{model}", "--rows", "1,x"], "not of the form 1,2,4"),
        (["bench", "passes", "-m", "{model}", "--context", "100000"], "do not fit"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(model: Path, capsys, args: list[str], words: str) -> None:
    assert run([arg.format(model=model) for arg in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.splitlines()[-1].startswith("foredraft: error:")


def test_help_of_both(capsys) -> None:
    assert run(["bench", "--help"]) == 0
    assert "bench passes --help" in capsys.readouterr().out
    assert run(["bench", "passes", "--help"]) == 0
    assert "--rows" in capsys.readouterr().out


def test_ctrl_c_leaves_nothing(start, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "figures.json"
    target.parent.mkdir()
    args = ["bench", "-m", str(model), "--runs", "1000", "--json", str(target)]
    with start(*args) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if b"runs done" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, output = process.stderr.read(), process.stdout.read()
        assert process.wait(timeout=20) == 130
    assert b"Traceback" not in rest
    assert output == b""
    assert list(target.parent.iterdir()) == []
