"""From what a user writes after -m to a file on disk.

    path            ./model.gguf, or a folder
    catalogue name  qwen2.5-coder-1.5b        → HOME/models/NAME.gguf, pulled on first use
    hub id          org/repo[:file.gguf]      → HOME/hub/org/repo/file.gguf, pulled on first use;
                    org/repo                  → HOME/hub/org/repo, a folder, where it has safetensors and no GGUF file

HOME is FOREDRAFT_HOME, else XDG_CACHE_HOME/foredraft, else ~/.cache/foredraft. FOREDRAFT_OFFLINE=1 forbids downloads.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import DownloadError, ForedraftError, ModelFileError
from foredraft.models.catalogue import CATALOGUE
from foredraft.models.packed_cache import packed_files, read_origin
from foredraft.models.pull import Progress, locked, parts_directory, progress_bar, pull_entry
from foredraft.models.repository import PARTS, Check, download, has_weights

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::((?:\w[\w.-]*/)*\w[\w.-]*\.gguf))?")


def home_directory() -> Path:
    if home := os.environ.get("FOREDRAFT_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foredraft"


def models_directory() -> Path:
    """Where catalogue models are."""
    return home_directory() / "models"


def hub_directory() -> Path:
    """Where files of hub repositories are."""
    return home_directory() / "hub"


def packed_directory() -> Path:
    """Where repacked weights are kept."""
    return home_directory() / "packed"


def resolve(
    spec: str, progress: Progress | None = None, *, prefer_folder: bool = False, check: Check | None = None
) -> Path:
    """The file, or the folder of Transformers, that a user's name for a model stands for.

    Downloads what is not on disk; `progress` is called meanwhile, by default a bar on stderr shows it. prefer_folder:
    of a repository with GGUF files and safetensors take these. check: called with a folder before its weights come.
    Raises ModelFileError for an unknown name or a missing path, DownloadError, and what `check` raises.
    """
    if spec not in CATALOGUE:
        path = _as_path(spec)
        if path.exists():
            return path
        match = _HUB_ID.fullmatch(spec)
        if match is None or match[1].endswith(".gguf"):
            if spec.endswith(".gguf") or os.sep in spec:
                raise ModelFileError(f"{spec}: no such file; check the path")
            raise _unknown(spec)
    return pull(spec, progress, prefer_folder=prefer_folder, check=check)


def is_hub_id(spec: str) -> bool:
    """Whether a name is `org/repo`, and no path, catalogue name or `.gguf` file of a repository."""
    match = _HUB_ID.fullmatch(spec)
    return match is not None and match[2] is None and spec not in CATALOGUE and not _as_path(spec).exists()


def _as_path(spec: str) -> Path:
    return Path(os.path.expanduser(spec))  # pathlib's own raises where there is no such user


def pull(
    name: str, progress: Progress | None = None, *, prefer_folder: bool = False, check: Check | None = None
) -> Path:
    """The same of a catalogue name or hub id only."""
    match = None if name in CATALOGUE else _HUB_ID.fullmatch(name)
    if name not in CATALOGUE and match is None:
        raise _unknown(name)
    found = models_directory() / f"{name}.gguf" if match is None else _find_in_hub(match[1], match[2], prefer_folder)
    if found is not None and found.exists():
        return found
    _require_online(name)
    with contextlib.nullcontext(progress) if progress is not None else progress_bar(name) as bar:
        if match is None:
            return pull_entry(CATALOGUE[name], models_directory(), bar)
        folder = hub_directory() / match[1]
        return download(
            match[1], match[2], folder, bar, prefer_folder=prefer_folder, check=check or (lambda folder: None)
        )


def find_folder(repo: str) -> Path | None:
    """The folder of Transformers that has come from a repository, if one is whole."""
    folder = hub_directory() / repo
    return folder if has_weights(folder) else None


def _find_in_hub(repo: str, file: str | None, prefer_folder: bool) -> Path | None:
    """What a hub id means of what is on disk; None: the hub has to tell."""
    if file is not None:
        return hub_directory() / repo / file
    folder = find_folder(repo)
    models = [path for path, _ in _hub_models(hub_directory() / repo).values() if path.is_file()]
    if folder is not None and (prefer_folder or not models):
        return folder
    return models[0] if len(models) == 1 else None


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """What a model takes on disk: its file, which is the user's own for a path, and weights repacked from it."""

    name: str  # catalogue name, hub id with its file, or a path
    path: Path | None  # None: only unfinished parts or repacked weights are left of it
    file_bytes: int
    packed_bytes: int
    is_removable: bool  # false for a path outside the cache: only its repacked weights are


def list_models() -> list[ModelOnDisk]:
    """All models in the cache, and those elsewhere that have repacked weights in it, by name."""
    cached, packed = _cached_models(), _packed_files()
    listed = []
    for name, (path, files) in cached.items():
        repacked = packed.pop(str(path), [])
        if files or repacked:
            whole = path if path.is_file() or has_weights(path) else None
            listed.append(ModelOnDisk(name, whole, _bytes(files), _bytes(repacked), True))
    for origin, repacked in packed.items():
        path = Path(origin)
        files = [*path.glob("*.safetensors")] if path.is_dir() else [path] if path.exists() else []
        listed.append(
            ModelOnDisk(origin, path if path.exists() else None, _bytes(files), _bytes(repacked), is_removable=False)
        )
    return sorted(listed, key=lambda model: model.name)


def model_files(name: str) -> list[Path]:
    """Everything in the cache that belongs to a model: its files, unfinished parts, repacked weights.

    `name` is a catalogue name, a hub id, which without a file means all of the repository, or the path of a model,
    whose own files are not among them.
    """
    found = [model for other, model in _cached_models().items() if other == name or other.startswith(f"{name}:")]
    origins = {str(path) for path, _ in found} or {os.path.abspath(name)}
    own = [file for _, files in found for file in files]
    return own + [path for origin, paths in _packed_files().items() if origin in origins for path in paths]


def remove_model(name: str) -> int:
    """Deletes `model_files(name)`; returns the bytes freed. Raises ModelFileError if there is nothing of that name."""
    files = model_files(name)
    if not files:
        if name in CATALOGUE:
            raise ModelFileError(f"{name} is not on disk: nothing to remove")
        if Path(name).exists():
            raise ModelFileError(f"nothing repacked from {name} is kept: nothing to remove, and itself it stays")
        raise ModelFileError(f"no model is called {name}; {_close_names(name) or 'foredraft list shows those on disk'}")
    freed = _bytes(files)
    if name in CATALOGUE and models_directory().exists():
        with locked(models_directory(), name):
            _delete(files)
            shutil.rmtree(parts_directory(models_directory(), name), ignore_errors=True)
    else:
        _delete(files)
        if match := _HUB_ID.fullmatch(name):
            _prune_hub(hub_directory() / match[1])
    return freed


def _cached_models() -> dict[str, tuple[Path, list[Path]]]:
    """By name: where a model is once it is whole, and its files and parts of files."""
    found = {}
    for name in CATALOGUE:
        path = (models_directory() / f"{name}.gguf").absolute()
        parts = sorted(parts_directory(models_directory(), name).rglob("*"))
        found[name] = path, [file.absolute() for file in [path, *parts] if file.is_file()]
    for repository in sorted(hub_directory().glob("*/*")):
        found |= _hub_models(repository.absolute())
    return found


def _hub_models(repository: Path) -> dict[str, tuple[Path, list[Path]]]:
    """What has come from a repository: each GGUF file is a model, and all other files together are one."""
    found: dict[str, tuple[Path, list[Path]]] = {}
    repo = "/".join(repository.parts[-2:])
    for file in sorted(repository.rglob("*")):
        place = file.relative_to(repository)
        if place.parts[0] == PARTS:
            place = place.relative_to(PARTS)
        elif place.parts[0].startswith("."):  # notes of the hub's library, a lock
            continue
        if file.is_file():
            is_gguf = place.suffix == ".gguf"
            name, path = (f"{repo}:{place}", repository / place) if is_gguf else (repo, repository)
            found.setdefault(name, (path, []))[1].append(file)
    return found


def _packed_files() -> dict[str, list[Path]]:
    """Repacked weights, unfinished ones too, by the path of their model's file; damaged ones by their own path."""
    found: dict[str, list[Path]] = {}
    for path in packed_files(packed_directory()):
        try:
            origin = read_origin(path).path
        except (ForedraftError, OSError):
            origin = str(path.absolute())
        found.setdefault(origin, []).append(path)
    return found


def _bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _delete(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _prune_hub(repository: Path) -> None:
    """Without a model left in it, the repository's folder and its owner's go too."""
    if repository.is_dir() and not _hub_models(repository):
        shutil.rmtree(repository, ignore_errors=True)
        if repository.parent.is_dir() and not any(repository.parent.iterdir()):
            repository.parent.rmdir()


def _unknown(name: str) -> ModelFileError:
    hint = _close_names(name) or f"known names: {', '.join(CATALOGUE)}."
    return ModelFileError(f"no model is called {name}; {hint} A path or a hub id org/repo[:file.gguf] will do too")


def _close_names(name: str) -> str:
    """A question that offers names like `name`, or nothing."""
    close = difflib.get_close_matches(name, _cached_models(), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _require_online(name: str) -> None:
    if os.environ.get("FOREDRAFT_OFFLINE", "0") not in ("", "0"):
        raise DownloadError(
            f"{name} is not on disk and FOREDRAFT_OFFLINE forbids to download it; unset it and try again"
        )
