"""pull, list, rm: what they print. What they do is tested with the hub itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli.list import as_text
from foredraft.cli.main import run
from foredraft.models import hub
from foredraft.models.catalogue import CATALOGUE
from foredraft.models.hub import ModelOnDisk


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
    heading, here, empty, hint, *there = capsys.readouterr().out.splitlines()
    assert heading.split() == ["file", "repacked", "in", str(home)]
    assert here.split() == ["2", "MB", "0", "B", "smollm2-135m", *CATALOGUE["smollm2-135m"].note.split()]
    assert (empty, hint) == ("", "foredraft pull gets these:")
    assert [line.split()[2] for line in there[::2]] == [name for name in CATALOGUE if name != "smollm2-135m"]
    assert all(CATALOGUE[line.split()[2]].title in about for line, about in zip(there[::2], there[1::2], strict=True))
    assert max(map(len, [here, *there])) <= 80
    assert run(["list", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in value["models"]] == ["smollm2-135m"]
    assert value["models"][0]["file_bytes"] == 2_000_000
    assert value["models"][0]["path"] == str(home / "models" / "smollm2-135m.gguf")


def test_list_names_what_is_incomplete_and_heads_what_lies_elsewhere(tmp_path: Path) -> None:
    inside = ModelOnDisk("org/model:a.gguf", None, 5_000_000, 0, is_removable=True)
    outside = ModelOnDisk("/gone/b.gguf", None, 0, 7_000_000, is_removable=False)
    first = [f"   file  repacked  in {tmp_path}", "   5 MB       0 B  org/model:a.gguf  (unfinished)"]
    second = ["   file  repacked  elsewhere", "    0 B      7 MB  /gone/b.gguf  (its file is gone)"]
    assert as_text([inside, outside], [], tmp_path).splitlines() == [*first, "", *second]
    assert as_text([inside], [], tmp_path).splitlines() == first
    assert as_text([outside], [], tmp_path).splitlines() == second


def test_list_tells_what_models_are_for_when_all_are_here(capsys, home: Path) -> None:
    (home / "models").mkdir()
    for name in CATALOGUE:
        (home / "models" / f"{name}.gguf").write_bytes(bytes(1_000))
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("qwen2.5-coder-0.5b  a draft for qwen2.5-coder-1.5b")]
    assert not any("foredraft pull" in line for line in lines)
    assert max(map(len, lines[1:])) <= 80


def test_list_of_no_models(tmp_path: Path) -> None:
    assert as_text([], [], tmp_path) == f"no models in {tmp_path} yet\n"
    first, empty, hint, *there = as_text([], list(CATALOGUE.values()), tmp_path).splitlines()
    assert (first, empty, hint) == (f"no models in {tmp_path} yet", "", "foredraft pull gets these:")
    assert len(there) == 2 * len(CATALOGUE)


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
