"""From what a user writes after -m to a file on disk.

    path            ./model.gguf, or a folder
    catalogue name  qwen2.5-coder-1.5b        → HOME/models/NAME.gguf, pulled on first use
    hub id          org/repo[:file.gguf]      → HOME/hub/org/repo/file.gguf, pulled on first use

HOME is FOREDRAFT_HOME, else XDG_CACHE_HOME/foredraft, else ~/.cache/foredraft. FOREDRAFT_OFFLINE=1 forbids downloads.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import DownloadError, ForedraftError, ModelFileError
from foredraft.models.catalogue import CATALOGUE
from foredraft.models.packed_cache import packed_files, read_origin
from foredraft.models.pull import HUB_TIMEOUT_S, Progress, locked, parts_directory, progress_bar, pull_entry

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


def resolve(spec: str, progress: Progress | None = None) -> Path:
    """The file (or the folder, if `spec` is the path of one) that a user's name for a model stands for.

    Downloads it if it is not on disk; `progress` is called meanwhile, by default a bar on stderr shows it. Raises
    ModelFileError for an unknown name or a missing path, DownloadError.
    """
    if spec in CATALOGUE:
        return pull(spec, progress)
    path = _as_path(spec)
    if path.exists():
        return path
    if (match := _HUB_ID.fullmatch(spec)) and not match[1].endswith(".gguf"):
        return _resolve_hub_id(match[1], match[2])
    if spec.endswith(".gguf") or os.sep in spec:
        raise ModelFileError(f"{spec}: no such file; check the path")
    raise _unknown(spec)


def is_hub_id(spec: str) -> bool:
    """Whether a name is `org/repo`, and no path, catalogue name or `.gguf` file of a repository."""
    match = _HUB_ID.fullmatch(spec)
    return match is not None and match[2] is None and spec not in CATALOGUE and not _as_path(spec).exists()


def _as_path(spec: str) -> Path:
    return Path(os.path.expanduser(spec))  # pathlib's own raises where there is no such user


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a catalogue model or hub id, downloaded unless it is on disk. Raises as `resolve` does."""
    if name not in CATALOGUE:
        if match := _HUB_ID.fullmatch(name):
            return _resolve_hub_id(match[1], match[2])
        raise _unknown(name)
    path = models_directory() / f"{name}.gguf"
    if path.exists():
        return path
    _require_online(name)
    if progress is not None:
        return pull_entry(CATALOGUE[name], models_directory(), progress)
    with progress_bar(name) as bar:
        return pull_entry(CATALOGUE[name], models_directory(), bar)


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
    names = [name for name in CATALOGUE if model_files(name)]
    names += [_hub_name(path) for path in sorted(hub_directory().glob("*/*/**/*.gguf"))]
    own = {name: _own_files(name) for name in names}
    files = {path for paths in own.values() for path in paths}
    elsewhere = {origin: origin for origin in _packed_files() if Path(origin) not in files}
    listed = [_describe(name, own.get(name, []), removable=name in own) for name in [*names, *elsewhere]]
    return sorted(listed, key=lambda model: model.name)


def model_files(name: str) -> list[Path]:
    """Everything in the cache that belongs to a model: its file, unfinished parts, repacked weights.

    `name` is a catalogue name, a hub id, or the path of a model, whose own file is not among them.
    """
    own = _own_files(name)
    origins = {str(path) for path in own} or {os.path.abspath(name)}
    return own + [path for origin, paths in _packed_files().items() if origin in origins for path in paths]


def remove_model(name: str) -> int:
    """Deletes `model_files(name)`; returns the bytes freed. Raises ModelFileError if there is nothing of that name."""
    files = model_files(name)
    if not files:
        if name in CATALOGUE:
            raise ModelFileError(f"{name} is not on disk: nothing to remove")
        raise ModelFileError(f"no model is called {name}; {_close_names(name) or 'foredraft list shows those on disk'}")
    freed = sum(path.stat().st_size for path in files)
    if name in CATALOGUE and models_directory().exists():
        with locked(models_directory(), name):
            _delete(files)
            shutil.rmtree(parts_directory(models_directory(), name), ignore_errors=True)
    else:
        _delete(files)
        if match := _HUB_ID.fullmatch(name):
            _prune_hub(hub_directory() / match[1])
    return freed


def _own_files(name: str) -> list[Path]:
    """Files in the cache that are the model, or parts of it; the model first."""
    if name in CATALOGUE:
        parts = parts_directory(models_directory(), name)
        found = [models_directory() / f"{name}.gguf", *sorted(parts.rglob("*"))]
    elif match := _HUB_ID.fullmatch(name):
        found = sorted((hub_directory() / match[1]).glob(match[2] or "**/*.gguf"))
    else:
        found = []
    return [path.absolute() for path in found if path.is_file()]


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


def _describe(name: str, own: Sequence[Path], removable: bool) -> ModelOnDisk:
    packed = sum(path.stat().st_size for path in model_files(name) if path not in own)
    path = own[0] if own else Path(name)
    if (own and path.suffix != ".gguf") or not path.exists():
        return ModelOnDisk(name, None, sum(part.stat().st_size for part in own), packed, removable)
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return ModelOnDisk(name, path, sum(file.stat().st_size for file in files), packed, removable)


def _delete(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _prune_hub(repository: Path) -> None:
    """Without a model left in it, the repository's folder and its owner's go too."""
    if repository.is_dir() and not any(repository.glob("**/*.gguf")):
        shutil.rmtree(repository, ignore_errors=True)
        if repository.parent.is_dir() and not any(repository.parent.iterdir()):
            repository.parent.rmdir()


def _hub_name(path: Path) -> str:
    owner, repository, *file = path.relative_to(hub_directory()).parts
    return f"{owner}/{repository}:{'/'.join(file)}"


def _unknown(name: str) -> ModelFileError:
    hint = _close_names(name) or f"known names: {', '.join(CATALOGUE)}."
    return ModelFileError(f"no model is called {name}; {hint} A path or a hub id org/repo[:file.gguf] will do too")


def _close_names(name: str) -> str:
    """A question that offers names like `name`, or nothing."""
    known = [*CATALOGUE, *(_hub_name(path) for path in hub_directory().glob("*/*/**/*.gguf"))]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _require_online(name: str) -> None:
    if os.environ.get("FOREDRAFT_OFFLINE", "0") not in ("", "0"):
        raise DownloadError(
            f"{name} is not on disk and FOREDRAFT_OFFLINE forbids to download it; unset it and try again"
        )


def _resolve_hub_id(repo: str, file: str | None) -> Path:
    folder = hub_directory() / repo
    on_disk = [folder / file] if file else sorted(folder.glob("**/*.gguf"))
    if len(on_disk) == 1 and on_disk[0].exists():
        return on_disk[0]
    _require_online(repo)
    return _download_from_hub(repo, file, folder)


def _download_from_hub(repo: str, file: str | None, folder: Path) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    _require_reachable(endpoint)
    try:
        if file is None:
            file = _choose(repo, huggingface_hub.HfApi(endpoint=endpoint).list_repo_files(repo))
        return Path(huggingface_hub.hf_hub_download(repo, file, local_dir=folder, endpoint=endpoint))
    except errors.GatedRepoError:
        raise DownloadError(f"{repo} is gated: accept its terms on {endpoint}/{repo} and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{repo} is no path here, and not on {endpoint} or private there: check the name, or set HF_TOKEN"
        ) from None
    except errors.EntryNotFoundError:
        raise DownloadError(f"{repo} has no file {file}; see {endpoint}/{repo}/tree/main") from None
    except errors.HFValidationError:
        raise ModelFileError(f"{repo} is no hub id; write org/repo or org/repo:file.gguf") from None
    except ForedraftError:
        raise
    except Exception as error:  # the library lets those of its HTTP client and of the disk through
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DownloadError(
            f"cannot download {repo}: {reason}; check the network and the disk, and try again"
        ) from None


def _require_reachable(endpoint: str) -> None:
    """One quick question: the library would try again for half a minute."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DownloadError(f"cannot reach {endpoint} ({reason}); check the network or HF_ENDPOINT") from None


def _choose(repo: str, files: Sequence[str]) -> str:
    """The only GGUF file of a repository, or its only Q4_K_M one."""
    models = [file for file in files if file.endswith(".gguf") and "mmproj" not in file]
    usual = [file for file in models if "q4_k_m" in file.lower()]
    for candidates in (models, usual):
        if len(candidates) == 1:
            return candidates[0]
    if not models:
        raise ModelFileError(f"{repo} has no .gguf file; look for a repository whose name ends with GGUF")
    raise ModelFileError(f"{repo} has several models: write {repo}:FILE with one of {', '.join(models)}")
