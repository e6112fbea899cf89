"""The commands of docs/server.md and README as they stand there, by `curl` itself."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import PATIENCE, Server, running_server

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"
MODEL = "qwen2.5-coder-1.5b"


def commands() -> list[str]:
    pages = ((ROOT / name).read_text().replace("\\\n", " ") for name in ("README.md", "docs/server.md"))
    return [match for page in pages for match in re.findall(r"^(?:\$ )?(curl (?:[^'\n]|'[^']*')*)$", page, re.M)]


def is_chat(answer: dict[str, Any]) -> bool:
    return bool(answer["choices"][0]["message"]["content"])


#: What an answer holds, by path.
HOLDS: dict[str, Callable[[Any], bool]] = {
    "/v1/chat/completions": is_chat,
    "/v1/completions": lambda answer: bool(answer["choices"][0]["text"]),
    "/v1/models": lambda answer: [card["id"] for card in answer["data"]] == [MODEL],
    f"/v1/models/{MODEL}": lambda answer: answer["id"] == MODEL,
    "/tokenize": lambda answer: answer["tokens"] == list(b"good morning"),
    "/detokenize": lambda answer: answer["prompt"] == bytes([70, 78, 78, 67]).decode(),
    "/health": lambda answer: answer == {"status": "ready"},
    "/live": lambda answer: answer == {"status": "live"},
    "/version": lambda answer: set(answer) == {"version"},
    "/openapi.json": lambda answer: "/v1/chat/completions" in answer["paths"],
}


@pytest.fixture(scope="module")
def named() -> Iterator[Server]:
    with running_server(model_names=(MODEL,)) as server:
        yield server


def path_of(command: str) -> str:
    return next(word for word in shlex.split(command) if word.startswith(ADDRESS)).removeprefix(ADDRESS)


def curl(server: Server, command: str) -> str:
    words = shlex.split(command.replace(ADDRESS, server.url))
    done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_path_is_shown_streamed_and_not() -> None:
    shown = commands()
    assert {path_of(command) for command in shown} == {*HOLDS, "/metrics"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert {'"stream": true' in command for command in shown if path_of(command) == path} == {True, False}


@pytest.mark.parametrize("command", commands())
def test_command(named: Server, command: str) -> None:
    written = curl(named, command)
    if path_of(command) == "/metrics":
        assert "foredraft:num_requests_running" in written
    elif '"stream": true' in command:
        *events, end = (line for line in written.splitlines() if line)
        assert end == "data: [DONE]"
        pieces = [piece for event in events for piece in json.loads(event.removeprefix("data: "))["choices"]]
        assert "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)
        assert pieces[-1]["finish_reason"] in ("stop", "length")
    else:
        assert HOLDS[path_of(command)](json.loads(written)), written
