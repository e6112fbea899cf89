"""`foredraft serve` as a process: its ready line, its signals, its refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from time import sleep

import httpx
import pytest

from foredraft.cli.console import Session
from foredraft.cli.main import run
from foredraft.cli.options import EngineOptions, open_llm
from foredraft.errors import EngineUnavailableError
from foredraft.testing import make_tiny_gguf
from tests.server.serving import PATIENCE

TEXT = "/v1/completions"
RUNNING = re.compile(r"num_requests_running\{.*\} [1-9]")
READY = re.compile(r"ready: (http://\S+)/v1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real (tiny) GGUF file."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny_gguf("llama", path)
    return path


class Child:
    """A running `foredraft serve`. Its log so far is in `lines`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def wait_for(self, pattern: re.Pattern[str]) -> str:
        """The first group of the first line that matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := pattern.search(line):
                return match[1]
        raise AssertionError(f"it ended without {pattern.pattern!r}: {self.lines}")

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        return code


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[tuple[subprocess.Popen[str], Timer]] = []

    def start(*args: object, **environment: str) -> Child:
        process = subprocess.Popen(
            [sys.executable, "-m", "foredraft", "serve", *map(str, args)],
            env={**os.environ, "FOREDRAFT_HOME": str(tmp_path / "home"), "FOREDRAFT_OFFLINE": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        timer = Timer(2 * PATIENCE, process.kill)
        timer.start()
        children.append((process, timer))
        return Child(process)

    yield start
    for process, timer in children:
        timer.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_it_serves_until_sigterm(serve: Callable[..., Child], model: Path) -> None:
    child = serve(model, "--port", 0, "--served-model-name", "tiny", "--served-model-name", "alias", "-c", 256)
    url = child.wait_for(READY)
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.get("/health").json() == {"status": "ready"}
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", 256), ("alias", 256)]
        answer = client.post(TEXT, json={"model": "alias", "prompt": "abc", "max_tokens": 8, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 8
    child.process.send_signal(signal.SIGTERM)
    assert child.end() == 0
    assert child.process.stdout is not None
    assert child.process.stdout.read() == ""
    assert not [line for line in child.lines if "Traceback" in line or "error" in line.lower()]
    assert not [line for line in child.lines if "stopping" in line]  # nothing ran
    assert any(f"POST {TEXT} 200 in" in line and "8 completion tokens (length)" in line for line in child.lines)


def test_sigterm_under_load_lets_requests_end(serve: Callable[..., Child], model: Path) -> None:
    child = serve(model, "--port", 0, "--max-num-seqs", 2)
    url = child.wait_for(READY)
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "seed": 1}
    with httpx.Client(base_url=url, timeout=PATIENCE) as client, ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(client.post, TEXT, json=body) for _ in range(5)]
        with client.stream("POST", TEXT, json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        statuses = {answer.result(PATIENCE).status_code for answer in answers}
        assert statuses <= {200, 503}  # what had not come in when the signal did is told to go elsewhere
        texts = {a.result().json()["choices"][0]["text"] for a in answers if a.result().status_code == 200}
        assert len(texts) <= 1
    assert child.end() == 0
    (told,) = [line for line in child.lines if "stopping: " in line]
    assert re.search(r"stopping: [1-6] requests still run, for [0-9]+ s at most, and no more are taken", told)


def test_a_second_signal_stops_at_once(serve: Callable[..., Child], model: Path) -> None:
    child = serve(model, "--port", 0, "-c", 512)
    url = child.wait_for(READY)
    with httpx.Client(base_url=url, timeout=PATIENCE) as client, ThreadPoolExecutor(1) as pool:
        body = {"prompt": ["abc"] * 64, "max_tokens": 400, "ignore_eos": True}
        answer = pool.submit(client.post, TEXT, json=body)
        while not RUNNING.search(client.get("/metrics").text):
            pass
        child.process.send_signal(signal.SIGINT)
        child.process.send_signal(signal.SIGINT)
        assert child.end() == 130
        assert answer.exception(PATIENCE) is not None or answer.result().status_code in (200, 503)
    assert not [line for line in child.lines if "Traceback" in line], child.lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_impatience_does_not_change_how_it_ends(
    serve: Callable[..., Child], model: Path, number: signal.Signals, code: int
) -> None:
    child = serve(model, "--port", 0, "-c", 512)
    child.wait_for(READY)
    while child.process.poll() is None:
        child.process.send_signal(number)
        sleep(0.02)
    assert child.end() == code
    assert not [line for line in child.lines if "Traceback" in line], child.lines


def test_a_port_that_is_taken_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["serve", str(model), "--port", str(port)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"foredraft: error: cannot listen on 127.0.0.1, port {port}: it is taken; choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
        (["--tensor-parallel-size", "2"], 2, "--tensor-parallel-size above 1 is for models of Transformers"),
        (["-d", "ngram", "--draft-model", "x"], 2, "give one of them"),
        (["--draft-model", "x", "--speculative-config", "{}"], 2, "give one of them"),
        (["--api-key", ""], 2, "--api-key is empty"),
        (["--api-key", "schlüssel"], 2, "--api-key takes visible ASCII characters"),
        (["--api-key", " pad "], 2, "--api-key takes visible ASCII characters"),
        (["--served-model-name", "a\nready: http://evil"], 2, r"'a\nready: http://evil' cannot be a model's name"),
        (["--served-model-name", "a", "--served-model-name", "\x1b[31m"], 2, r"'\x1b[31m' cannot be a model's name"),
        (["--served-model-name", ""], 2, "'' cannot be a model's name"),
        (["--served-model-name", "\ud8ff"], 2, r"'\ud8ff' cannot be a model's name"),
        (["--port", "70000"], 2, "--port"),
        (["--stream-interval", "0"], 2, "--stream-interval"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs"),
        (["--kv-cache-tokens", str(10**30)], 2, "--kv-cache-tokens"),
        (["-d", "ngrm"], 2, "did you mean 'ngram'"),
        (["-c", "100000"], 2, "-c/--max-model-len must be at most the model's context"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str
) -> None:
    assert run(["serve", str(model), "--port", "0", *args]) == code
    progress = ("foredraft: loading", "foredraft: repacking")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1
    assert words in lines[0]


def test_a_missing_model_is_one_line_more(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["serve", str(tmp_path / "none.gguf"), "--port", "0"]) == 1
    loading, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"foredraft: loading \S+none\.gguf; until it is ready, http://127\.0\.0\.1:[1-9][0-9]+/v1 answers 503", loading
    )
    assert error.startswith("foredraft: error:")
    assert "none.gguf" in error


def test_a_model_that_still_loads_stops_loading(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    with pytest.raises(EngineUnavailableError):
        open_llm(EngineOptions(str(model)), Session(), lambda: True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_keys_from_the_environment_and_json_lines(serve: Callable[..., Child], model: Path) -> None:
    child = serve(model, "--port", 0, "--log-format", "json", "-d", "none", FOREDRAFT_API_KEY="one two")
    url = child.wait_for(READY)
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        statuses = []
        for key in ("one", "two", "three"):
            headers = {"authorization": f"Bearer {key}"}
            statuses.append(client.post(TEXT, json={"prompt": "secret", "max_tokens": 1}, headers=headers).status_code)
    assert statuses == [200, 200, 401]
    child.process.send_signal(signal.SIGINT)
    assert child.end() == 130
    entries = [json.loads(line) for line in child.lines if not line.startswith("foredraft: repacking")]
    assert [entry["status"] for entry in entries if "status" in entry] == [200, 200, 401]
    assert "secret" not in "".join(child.lines)
    assert "one two" not in "".join(child.lines)
