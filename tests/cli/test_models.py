"""pull, list, rm: what they print. What they do is tested with the hub itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli.main import run
from foredraft.models import hub
from foredraft.models.catalogue import CATALOGUE


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path))
    return tmp_path


def test_pull_prints_where_each_file_is(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name, progress):
        progress(5, 10)
        progress(10, 10)
        return Path("/models") / name

    monkeypatch.setattr(hub, "pull", pull)
    assert run(["pull", "a", "b"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/models/a\n/models/b\n"
    assert captured.err == "foredraft: downloading a\nforedraft: downloading b\n"


def test_list_shows_the_models_here_and_those_to_be_had(capsys, home: Path) -> None:
    (home / "models").mkdir()
    (home / "models" / "smollm2-135m.gguf").write_bytes(bytes(2_000_000))
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["smollm2-135m", "2", "MB", "0", "B", str(home / "models" / "smollm2-135m.gguf")]
    assert [line.split()[0] for line in lines[2:]] == [name for name in CATALOGUE if name != "smollm2-135m"]
    assert all("foredraft pull gets it" in line for line in lines[2:])
    assert run(["list", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in value["models"]] == ["smollm2-135m"]
    assert value["models"][0]["file_bytes"] == 2_000_000


def test_rm_says_what_it_freed(capsys, home: Path) -> None:
    (home / "models").mkdir()
    (home / "models" / "smollm2-135m.gguf").write_bytes(bytes(2_000_000))
    assert run(["rm", "smollm2-135m"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "smollm2-135m: 2 MB freed\n"
    assert list((home / "models").glob("*.gguf")) == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["rm", "zzz"], "no model is called zzz; foredraft list shows those on disk"),
        (["rm", "smolm2-135m"], "no model is called smolm2-135m; did you mean smollm2-135m?"),
        (
            ["pull", "zzz"],
            f"no model is called zzz; known names: {', '.join(CATALOGUE)}. "
            "A path or a hub id org/repo[:file.gguf] will do too",
        ),
    ],
)
def test_an_unknown_name(capsys, args: list[str], line: str) -> None:
    assert run(args) == 1
    assert capsys.readouterr().err == f"foredraft: error: {line}\n"


@pytest.mark.parametrize("command", ["pull", "rm"])
def test_a_name_is_needed(capsys, command: str) -> None:
    assert run([command]) == 2
    assert "Missing argument 'NAME...'" in capsys.readouterr().err
