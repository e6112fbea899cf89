"""The command as users run it: a process, on a real (tiny) GGUF file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foredraft.cli.main import run

pytestmark = pytest.mark.usefixtures("home")


def test_the_same_text_with_and_without_speculation(model: Path, capsys) -> None:
    args = ["generate", "-m", str(model), "-p", "abcabcabc", "-n", "60", "--ignore-eos", "--json", "--no-adaptive"]
    answers = []
    for more in (["-d", "none"], ["-d", "ngram"], ["-d", f"ngram+model:{model}", "-k", "4"], ["-d", f"model:{model}"]):
        assert run([*args, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)
    assert "model" in answers[-1]["origins"]


def test_every_engine_flag_is_taken(model: Path, capsys) -> None:
    flags = (
        "-t 1 -c 256 --kv-cache-dtype f32 --draft-quantize none --draft-vocab full -k 2 "
        "--rejection-sample-method block --temp 0.8 --seed 3"
    )
    args = ["generate", "-m", str(model), "-d", f"model:{model}", "-p", "abc", "-n", "8", *flags.split(), "--json"]
    assert run(args) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] <= 8


def test_debug_prints_the_plan_of_the_memory(model: Path, capsys) -> None:
    assert run(["generate", "-m", str(model), "-p", "abc", "-n", "2", "--debug"]) == 0
    err = capsys.readouterr().err
    assert "packed weights" in err
    assert "KV cache" in err


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_json_to_dev_stdout_is_json_to_stdout(model: Path, tmp_path: Path, mode: str) -> None:
    target = tmp_path / "out.json"
    args = ["generate", "-m", str(model), "-p", "abc", "-n", "4", "--json", "/dev/stdout"]
    with open(target, mode) as stdout:
        subprocess.run([sys.executable, "-m", "foredraft", *args], stdout=stdout, check=True, timeout=60)
    assert json.loads(target.read_text())["usage"]["prompt_tokens"] > 0


def test_torch_stays_out(model: Path) -> None:
    script = (
        "import sys\nfrom foredraft.cli.main import run\n"
        f"code = run(['generate', '-m', {str(model)!r}, '-p', 'abc', '-n', '4'])\n"
        "sys.exit(code or 3 * bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-d", "ngrm"], 2, "'ngrm' is unknown; did you mean 'ngram'?"),
        (["-d", "model"], 2, "'model' needs its name"),
        (["-d", "ngram+ngram"], 2, "names a drafter twice"),
        (["-d", "model:smolm2-135m"], 1, "did you mean smollm2-135m"),
        (["-c", "100000"], 2, "-c/--max-model-len must be at most the model's context of 512 tokens"),
        (["-d", "none+ngram"], 2, "'none' cannot be joined with others"),
        (["-d", "ngram+none"], 2, "'none' cannot be joined with others"),
        (["-p", "x" * 600], 1, "with the answer: shorten the prompt"),
        (["-p", "x" * 100, "-c", "64"], 1, "shorten the prompt, or raise max_model_len (-c), at most 512"),
        (["--logit-bias", "100000=1"], 2, "--logit-bias names token 100000, outside 0 .. 262"),
        (["-k", "65"], 2, "65 is not in the range"),
    ],
)
def test_what_only_the_model_can_refuse(model: Path, capsys, args: list[str], code: int, words: str) -> None:
    prompt = [] if "-p" in args else ["-p", "abc"]
    assert run(["generate", "-m", str(model), *prompt, *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("foredraft: repacking")]
    assert len(lines) == 1
    assert words in lines[0]


def test_k_0_is_plain_decoding(model: Path, capsys) -> None:
    assert run(["generate", "-m", str(model), "-p", "abcabc", "-n", "20", "-k", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"]["num_drafts"] == 0


def test_list_and_rm_know_what_was_repacked(model: Path, capsys, home: Path) -> None:
    assert run(["generate", "-m", str(model), "-p", "abc", "-n", "2"]) == 0
    capsys.readouterr()
    assert run(["list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["models"]
    assert listed["name"] == str(model)
    assert listed["packed_bytes"] > 0
    assert run(["list"]) == 0
    assert str(model) in capsys.readouterr().out
    assert run(["rm", str(model)]) == 0
    assert model.exists()
    assert list(home.rglob("*.fdp")) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_waits_ends_it_quietly(
    start, model: Path, home: Path, number: signal.Signals, code: int
) -> None:
    with start("chat", "-m", model, "-n", "4", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)  # it answers: so it is up, and will wait for the next turn
        process.send_signal(number)
        assert process.wait(30) == code
        assert b"Traceback" not in process.stderr.read()
    assert {path.suffix for path in home.rglob("*") if path.is_file()} <= {".fdp"}


def test_ctrl_c_while_it_answers_ends_at_once_and_quietly(start, model: Path, home: Path) -> None:
    with start("generate", "-m", model, "-p", "abc", "-n", "400", "--ignore-eos", "-d", "none") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(30) in (0, 130)  # 0: the tiny model was done before the signal came
        assert time.monotonic() - began < 10
        assert b"Traceback" not in process.stderr.read()
    assert {path.suffix for path in home.rglob("*") if path.is_file()} <= {".fdp"}


def test_a_reader_that_goes_away_ends_it_quietly(start, model: Path) -> None:
    with start("generate", "-m", model, "-p", "abc", "-n", "400", "--ignore-eos") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(30) in (0, 1)
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert "error" not in errors


@pytest.mark.parametrize(
    ("closed", "code", "line"),
    [
        ("2>&-", 0, ""),
        (">&-", 1, ""),
        (">&- 2>&-", 1, ""),
        ("<&-", 2, "foredraft: error: cannot read standard input"),
        ("<&- >&- 2>&-", 2, ""),
    ],
)
def test_closed_streams_end_without_a_traceback(model: Path, closed: str, code: int, line: str) -> None:
    script = f'exec "$0" -m foredraft generate -m "$1" -f - -n 4 {closed}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, str(model)], input=b"abc", capture_output=True, timeout=60, check=False
    )
    errors = done.stderr.decode()
    assert done.returncode == code
    assert "Traceback" not in errors
    assert len([text for text in errors.splitlines() if "error" in text]) == (1 if line else 0)
    assert line in errors


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_terminal_without_the_characters_of_an_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "foredraft", "generate", "-m", str(model), "-p", "d\u00e9j\u00e0", *flags]
    more = ["-n", "60", "--ignore-eos", "--temp", "1.5", "--seed", "1"]
    done = subprocess.run([*command, *more], capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0
    assert done.stdout.isascii()
    text = json.loads(done.stdout)["text"] if flags else done.stdout.decode()
    assert ("\ufffd" if flags else "?") in text


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_it_still_imports_is_quiet(name: str, code: int) -> None:
    """It arrives in a weak reference's callback, which swallows exceptions; the import system has such callbacks."""
    script = f"""
import signal, sys, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            dying = {{1}}
            reference = weakref.ref(dying, lambda _: signal.raise_signal(signal.{name}))
            del dying
sys.meta_path.insert(0, Interrupt())
from foredraft.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
