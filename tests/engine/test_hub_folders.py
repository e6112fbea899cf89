"""Repositories with safetensors by hub id, through the library's front door and the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.cli.main import run
from foredraft.errors import DownloadError, MissingExtraError, UnsupportedModelError
from foredraft.models.hf import extra
from foredraft.models.hf.model import HFModel
from foredraft.models.hub import hub_directory
from foredraft.models.native import NativeModel
from foredraft.testing import make_tiny_gguf
from tests.models.hf.folders import write_folder
from tests.models.servers import LocalHub, local_hub

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["the cat sat on", "def add(a, b):"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TARGET, DRAFT, BOTH, FOREIGN = "org/target", "org/draft", "org/both", "org/foreign"


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    write_folder(root / "target", settings=SIZES)
    write_folder(root / "draft", "qwen3", seed=4, padding=20, settings=SIZES)
    write_folder(root / "foreign", "gpt2")
    make_tiny_gguf("qwen3", root / "tiny.gguf")
    return {path.stem: path for path in root.iterdir()}


@pytest.fixture
def hub(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREDRAFT_OFFLINE", raising=False)
    files = {f"org/{name}": read(made[name]) for name in ("target", "draft", "foreign")}
    files[BOTH] = files[TARGET] | {"tiny.gguf": made["tiny"].read_bytes()}
    with local_hub(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def answers(model: str | Path, drafter: str = "none", **options: Any) -> list[list[int]]:
    with LLM(model, drafter, threads=1, adaptive=False, **options) as llm:
        return [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("options", [{}, {"quantize": "q4"}, {"quantize": "none"}, {"backend": "native"}], ids=str)
def test_a_hub_id_says_what_its_folder_says(
    hub: LocalHub, made: dict[str, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = f"ngram+model:{DRAFT}"
    assert answers(TARGET, drafter, **options) == answers(made["target"], **options)
    num_requests = len(hub.requests)
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    assert answers(TARGET, drafter, **options) == answers(made["target"], **options)
    assert len(hub.requests) == num_requests


def test_hub_ids_and_files_draft_for_each_other(hub: LocalHub, made: dict[str, Path]) -> None:
    del hub
    assert answers(made["tiny"], f"model:{DRAFT}") == answers(made["tiny"])


def test_what_the_core_lacks_runs_by_transformers(hub: LocalHub, made: dict[str, Path]) -> None:
    with LLM(FOREIGN, "none") as llm:
        assert isinstance(llm.model, HFModel)
        assert Path(llm.model.transformers_model.name_or_path) == hub_directory() / FOREIGN
    assert answers(FOREIGN) == answers(made["foreign"])


def weights_asked_for(hub: LocalHub) -> bool:
    return any(request.startswith("GET") and ".safetensors" in request for request in hub.requests)


def test_what_cannot_run_is_refused_before_its_weights_come(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"does not run 'gpt2' models; .* --backend hf"):
        LLM(FOREIGN, backend="native")
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(MissingExtraError, match=r"does not run 'gpt2' .*pip install"):
        LLM(FOREIGN)
    assert not weights_asked_for(hub)


def test_transformers_takes_the_folder_that_is_here(hub: LocalHub, made: dict[str, Path]) -> None:
    """Without it the hub id is Transformers' own affair."""
    answers(TARGET)
    hub.requests.clear()
    assert answers(TARGET, backend="hf", device="cpu") == answers(made["target"], backend="hf", device="cpu")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "gguf"),
        ({"backend": "native"}, "gguf"),
        ({"quantize": "q8"}, "folder"),
        ({"quantize": "none"}, "folder"),
        ({"dtype": "float32"}, "hf"),
    ],
    ids=str,
)
def test_which_of_both_kinds(hub: LocalHub, made: dict[str, Path], options: dict[str, Any], kind: str) -> None:
    with LLM(BOTH, "none", threads=1, **options) as llm:
        assert isinstance(llm.model, HFModel if kind == "hf" else NativeModel)
        assert llm.model.name == ("tiny" if kind == "gguf" else "both")
        got = [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]
    assert got == answers(made["tiny" if kind == "gguf" else "target"], **options)
    assert weights_asked_for(hub) == (kind != "gguf")


def test_draft_models_take_the_gguf_file_whatever_quantize_says_of_the_target(
    hub: LocalHub, made: dict[str, Path]
) -> None:
    assert answers(made["target"], f"model:{BOTH}", quantize="q8") == answers(made["target"], quantize="q8")
    assert not weights_asked_for(hub)


def test_commands(hub: LocalHub, made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", TARGET]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{hub_directory() / TARGET}\n"
    assert captured.err == f"foredraft: downloading {TARGET}\n"
    (wanted,) = answers(made["target"])[:1]
    assert run(["generate", "-m", TARGET, "-d", f"model:{DRAFT}", "--raw", "-p", PROMPTS[0], "-n", "12", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["token_ids"] == wanted
    assert f"foredraft: pulling {DRAFT}\n" in captured.err
    assert run(["list"]) == 0
    listed = capsys.readouterr().out
    assert f" {TARGET}\n" in listed
    assert f" {DRAFT}\n" in listed
    assert run(["check-pair", TARGET, DRAFT, "--json"]) in (0, 1)
    capsys.readouterr()
    assert run(["rm", TARGET, DRAFT]) == 0
    assert not (hub_directory() / "org").exists()
    assert run(["list"]) == 0
    assert "org/" not in capsys.readouterr().out


def test_errors_are_one_line(
    hub: LocalHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["org/empty"] = {"README.md": b""}
    for model in ("org/absent", "org/empty"):
        assert run(["generate", "-m", model, "-p", "x"]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"foredraft: error: {model} ")
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    with pytest.raises(DownloadError, match="FOREDRAFT_OFFLINE"):
        LLM(TARGET)
