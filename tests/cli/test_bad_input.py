"""Bad models, names that are not there, a missing core: one line, the right code, nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.cli.main import run


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No model is on disk, none may be downloaded, and nothing half-written stays."""
    home = tmp_path / "home"
    monkeypatch.setenv("FOREDRAFT_HOME", str(home))
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    yield
    assert [path for path in home.rglob("*") if path.is_file()] == []


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """(exit code, the one line on stderr)."""
    code = run(args)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("foredraft: error: ")
    return code, lines[0].removeprefix("foredraft: error: ")


def generate(model: object, *more: str) -> tuple[str, ...]:
    return ("generate", "-m", str(model), "-p", "hello", *more)


def test_a_missing_file(capsys, tmp_path: Path) -> None:
    code, line = fails(capsys, *generate(tmp_path / "no.gguf"))
    assert code == 1
    assert "no.gguf: no such file" in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "x.gguf"),
        (b"PK\x03\x04" + bytes(100), "give a .gguf file"),
        (b"<!DOCTYPE html><html>", "it looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"GGUF" + bytes(4), "x.gguf"),
        (b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 2, "x.gguf"),
    ],
    ids=["empty", "foreign", "web page", "LFS pointer", "truncated", "hostile counts"],
)
def test_a_file_that_is_no_model(capsys, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    code, line = fails(capsys, *generate(tmp_path / "x.gguf"))
    assert code == 1
    assert words in line


def test_a_directory(capsys, tmp_path: Path) -> None:
    code, line = fails(capsys, *generate(tmp_path))
    assert code == 1
    assert str(tmp_path) in line


def test_an_unknown_name_and_the_close_ones(capsys) -> None:
    code, line = fails(capsys, *generate("smolm2-135m"))
    assert code == 1
    assert "did you mean smollm2-135m" in line


def test_a_model_that_may_not_be_downloaded(capsys) -> None:
    code, line = fails(capsys, *generate("smollm2-135m"))
    assert code == 1
    assert "FOREDRAFT_OFFLINE" in line


@pytest.mark.parametrize("command", [("rm", "smollm2-135m"), ("rm", "nonsense"), ("pull", "nonsense")])
def test_names_that_are_not_there(capsys, command: tuple[str, ...]) -> None:
    assert fails(capsys, *command)[0] == 1


@pytest.mark.parametrize("name", ["generate", "chat", "demo", "doctor"])
def test_without_the_core_one_line_says_what_is_missing(capsys, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "foredraft._native", None)
    args = {"generate": generate("smollm2-135m"), "chat": ("chat", "-m", "smollm2-135m")}.get(name, (name,))
    code = run(args)
    line = capsys.readouterr().err
    assert code == 1
    assert len(line.splitlines()) == 1
    assert "C++20 compiler" in line
    assert "pip install" in line
