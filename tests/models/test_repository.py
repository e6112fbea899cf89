"""Repositories with safetensors, and how files of any repository come here, against a hub on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import DownloadError, ModelFileError
from foredraft.models import repository
from foredraft.models.hub import list_models, pull, remove_model, resolve
from foredraft.models.packed_cache import PackedTensor, identify, load_packed

from .servers import LocalHub, local_hub

REPO, SHARDED = "org/Model", "org/Sharded"
SETTINGS = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"[]",
    "tokenizer.model": b"m",
    "chat_template.jinja": b"t",
    "modeling.py": b"code",
}
OTHERS = {
    "README.md": b"r",
    "onnx/model.onnx": b"o",
    "original/model.safetensors": b"x",
    "consolidated.safetensors": b"c",
    "pytorch_model.bin": b"p",
    "pytorch_model.bin.index.json": b"{}",
    ".gitattributes": b"g",
}
WEIGHTS = os.urandom(5000)
SHARDS = {"a-1.safetensors": WEIGHTS[:2000], "a-2.safetensors": WEIGHTS[2000:]}
INDEX = json.dumps({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors", "z": "a-1.safetensors"}}).encode()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREDRAFT_OFFLINE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    files = {
        REPO: {**SETTINGS, **OTHERS, "model.safetensors": WEIGHTS},
        SHARDED: {**SETTINGS, **OTHERS, "model.safetensors.index.json": INDEX, **SHARDS},
    }
    with local_hub(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def left_in(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fetched(hub: LocalHub) -> list[str]:
    """Files whose content was asked for, and from which byte on."""
    asked = [request.split() for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    return [f"{path.rpartition('/')[2]} {start.removeprefix('bytes=')}" for _, path, start in asked]


@pytest.mark.parametrize("repo", [REPO, SHARDED])
def test_what_makes_a_folder_is_fetched_and_nothing_else(
    hub: LocalHub, home: Path, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    folder = resolve(repo, lambda done, total: seen.append((done, total)))
    assert folder == home / "hub" / repo
    assert left_in(folder) == {name: data for name, data in hub.files[repo].items() if name not in OTHERS}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    num_requests = len(hub.requests)
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    assert resolve(repo) == pull(repo) == folder
    assert len(hub.requests) == num_requests


def test_a_download_that_was_cut_goes_on_where_it_ended(hub: LocalHub, home: Path) -> None:
    hub.broken_after = 900
    with pytest.raises(DownloadError, match=r"cannot download org/Model: model.safetensors: .* pull again") as caught:
        resolve(REPO)
    assert "\n" not in str(caught.value)
    part = home / "hub" / REPO / ".parts" / "model.safetensors"
    assert part.read_bytes() == WEIGHTS[:4500]
    (listed,) = list_models()
    assert (listed.name, listed.path) == (REPO, None)
    assert listed.file_bytes == 4500 + sum(map(len, SETTINGS.values()))
    hub.broken_after = None
    hub.requests.clear()
    hub.files[REPO]["config.json"] = b'{"a": 1}'  # what is not whole yet takes the settings of today
    assert left_in(resolve(REPO))["model.safetensors"] == WEIGHTS
    assert "model.safetensors 4500-" in fetched(hub)
    assert (home / "hub" / REPO / "config.json").read_bytes() == b'{"a": 1}'
    assert not part.parent.exists()


def test_whole_shards_are_not_fetched_again(hub: LocalHub, home: Path) -> None:
    folder = resolve(SHARDED)
    (folder / "a-2.safetensors").unlink()
    assert [model.path for model in list_models()] == [None]
    hub.requests.clear()
    assert resolve(SHARDED) == folder
    assert [name for name in fetched(hub) if name.startswith("a-")] == ["a-2.safetensors 0-"]
    assert (folder / "a-2.safetensors").read_bytes() == SHARDS["a-2.safetensors"]


def test_connections_that_break_off_are_taken_up_again(hub: LocalHub) -> None:
    hub.broken_after = 1200
    assert left_in(resolve(REPO))["model.safetensors"] == WEIGHTS
    starts = [name for name in fetched(hub) if name.startswith("model.safetensors")]
    assert starts == [f"model.safetensors {1200 * i}-" for i in range(5)]


@pytest.mark.parametrize("repo", [REPO, "org/GGUF"])
def test_a_part_of_another_file_is_dropped(hub: LocalHub, home: Path, repo: str) -> None:
    hub.files["org/GGUF"] = {"a.gguf": WEIGHTS}
    name = "a.gguf" if repo == "org/GGUF" else "model.safetensors"
    part = home / "hub" / repo / ".parts" / name
    part.parent.mkdir(parents=True)
    part.write_bytes(b"old" * 100)
    path = resolve(repo)
    assert (path if repo == "org/GGUF" else path / name).read_bytes() == WEIGHTS
    assert [start for start in fetched(hub) if start.startswith(name)] == [f"{name} 300-", f"{name} 0-"]


def test_a_file_with_another_hash_is_no_model(hub: LocalHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = repository._list_files(REPO)
    monkeypatch.setattr(repository, "_list_files", lambda repo: listed)
    hub.files[REPO]["model.safetensors"] = WEIGHTS[::-1]
    with pytest.raises(DownloadError, match=r"model.safetensors has the wrong sha256"):
        resolve(REPO)
    assert not list((home / "hub").rglob("*.safetensors"))


def test_only_the_hub_gets_the_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve(REPO).is_dir()
    assert {token for request, token in zip(hub.requests, hub.tokens, strict=True) if "resolve" in request} == {
        "Bearer secret"
    }
    with local_hub(hub.files) as store:
        hub.store = store
        assert left_in(resolve(SHARDED))["a-2.safetensors"] == SHARDS["a-2.safetensors"]
        assert store.requests
        assert set(store.tokens) == {""}


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        (lambda hub: hub.gated.add(SHARDED), DownloadError, "is gated: accept its terms on .* HF_TOKEN"),
        (lambda hub: hub.files[SHARDED].pop("a-2.safetensors"), DownloadError, "has no file a-2.safetensors, which"),
        (lambda hub: hub.files[SHARDED].pop("config.json"), ModelFileError, "neither a .gguf file nor safetensors"),
        (
            lambda hub: hub.files[SHARDED].update(
                {"model.safetensors.index.json": b'{"weight_map": {"x": "../../x.safetensors"}}'}
            ),
            ModelFileError,
            "no map of tensors to files",
        ),
    ],
    ids=["gated", "a shard is missing", "no config", "a way out of the folder"],
)
def test_errors_are_one_line(hub: LocalHub, home: Path, spoil: Any, error: type[Exception], reason: str) -> None:
    spoil(hub)
    with pytest.raises(error, match=reason) as caught:
        resolve(SHARDED)
    assert "\n" not in str(caught.value)
    assert not list((home / "hub").rglob("*.safetensors"))


def test_names_that_lead_out_of_the_folder_are_not_files(hub: LocalHub, home: Path) -> None:
    hub.files[REPO] = {"../x.gguf": b"1", "/x.gguf": b"2", "a/../../x.gguf": b"3", "ok.gguf": b"4"}
    assert resolve(REPO).read_bytes() == b"4"
    assert left_in(home / "hub") == {f"{REPO}/ok.gguf": b"4"}


def test_offline_an_unfinished_folder_is_no_model(hub: LocalHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (resolve(SHARDED) / "a-1.safetensors").unlink()
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    with pytest.raises(DownloadError, match="FOREDRAFT_OFFLINE"):
        resolve(SHARDED)


def test_of_both_kinds_the_gguf_file_comes_first(hub: LocalHub, home: Path) -> None:
    hub.files[REPO]["q/a.gguf"] = b"gguf"
    assert resolve(REPO) == home / "hub" / REPO / "q" / "a.gguf"
    remove_model(REPO)
    folder = resolve(REPO, prefer_folder=True)
    assert folder == home / "hub" / REPO
    assert resolve(f"{REPO}:q/a.gguf") == folder / "q" / "a.gguf"
    assert resolve(REPO) == folder / "q" / "a.gguf"
    assert resolve(REPO, prefer_folder=True) == folder


def test_a_check_comes_before_the_weights(hub: LocalHub, home: Path) -> None:
    def check(folder: Path) -> None:
        assert {name for name in SETTINGS if (folder / name).is_file()} == set(SETTINGS)
        raise ModelFileError("no")

    for repo in (REPO, SHARDED):
        with pytest.raises(ModelFileError, match="no"):
            resolve(repo, check=check)
    assert not list((home / "hub").rglob("*.safetensors"))


def test_a_full_disk_is_one_line(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    del hub
    monkeypatch.setattr("foredraft.models.pull.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(DownloadError, match=r"the disk is full: org/Model needs .* FOREDRAFT_HOME") as caught:
        resolve(REPO)
    assert "\n" not in str(caught.value)


def test_list_and_remove(hub: LocalHub, home: Path) -> None:
    hub.files[REPO]["a.gguf"] = b"gguf"
    folder, file = resolve(REPO, prefer_folder=True), resolve(f"{REPO}:a.gguf")
    tensor = PackedTensor("a", "a", "F32", 1, 2, 8)
    origin = identify(folder, [(folder / "model.safetensors", [(8, 16)])], "q8")
    load_packed(home / "packed", origin, [tensor], lambda tensor, out: None, 1)
    (packed,) = (home / "packed").glob("*.fdp")
    whole, single = list_models()
    assert (whole.name, whole.path, whole.is_removable) == (REPO, folder, True)
    assert whole.file_bytes == len(WEIGHTS) + sum(map(len, SETTINGS.values()))
    assert whole.packed_bytes == packed.stat().st_size
    assert (single.name, single.path, single.file_bytes) == (f"{REPO}:a.gguf", file, 4)

    assert remove_model(f"{REPO}:a.gguf") == 4
    assert [model.name for model in list_models()] == [REPO]
    assert remove_model(REPO) == whole.file_bytes + whole.packed_bytes
    assert list_models() == []
    assert not packed.exists()
    assert not (home / "hub" / "org").exists()
