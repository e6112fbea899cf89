"""What comes from a repository of the hub: a GGUF file, or the files that make a folder of Transformers.

ORG/REPO/…              files, each whole: it appears by a rename, after its hash was right
ORG/REPO/.parts/…       as much as came of another: a later pull goes on from there
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from foredraft.errors import DownloadError, ModelFileError
from foredraft.models.folder.checkpoint import CONFIG
from foredraft.models.folder.safetensors import INDEX, WEIGHTS, read_index
from foredraft.models.pull import HUB_TIMEOUT_S, Progress, disk_error, fetch_rest, hub_endpoint, locked, sha256

PARTS = ".parts"
#: Files of a folder beside its weights: settings, tokenizers, templates, and code, which runs only if it is trusted.
_SETTINGS = (".json", ".jinja", ".txt", ".model", ".py")
#: How often a connection may break off within a file, as long as each brings something.
_MAX_ATTEMPTS = 5

#: Called with a folder that has its settings, and not yet its weights.
Check = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    path: str
    nbytes: int
    sha256: str | None  # of large files


def has_weights(folder: Path) -> bool:
    """Whether a folder of Transformers is whole: its weights come last."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / WEIGHTS).is_file():
        return True
    try:
        return all((folder / name).is_file() for name in read_index(folder / INDEX).values())
    except ModelFileError:
        return False


def download(
    repo: str, file: str | None, folder: Path, progress: Progress, *, prefer_folder: bool, check: Check
) -> Path:
    """The path of a repository's file, or `folder` with all files of a model of Transformers in it.

    file None: the repository's GGUF file if it has any, else its safetensors; these first with prefer_folder. Raises
    ModelFileError for a repository without either, DownloadError, and what `check` raises.
    """
    _require_reachable()
    files = _list_files(repo)
    if file is None and not (prefer_folder and _is_model(files)):
        file = _choose_gguf(repo, files)
    if file is not None and file not in files:
        raise DownloadError(f"{repo} has no file {file}; see {hub_endpoint()}/{repo}/tree/main")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, folder.name):
            if file is not None:
                _fetch(repo, [files[file]], folder, progress)
                return folder / file
            weights = _find_weights(repo, files, folder)
            settings = [entry for name, entry in files.items() if _is_setting(name) and name != INDEX]
            for entry in settings:  # anew: of the same day as the weights that are still to come
                (folder / entry.path).unlink(missing_ok=True)
            _fetch(repo, [*settings, *weights], folder, progress, lambda: check(folder))
            return folder
    except OSError as error:
        weights = [entry for name, entry in files.items() if name == file or (file is None and _is_weight(name))]
        raise disk_error(repo, sum(entry.nbytes for entry in weights), folder, error) from None


def _is_setting(name: str) -> bool:
    return "/" not in name and name.endswith(_SETTINGS) and not name.endswith(".bin.index.json")


def _is_weight(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")


def _is_model(files: Mapping[str, RepositoryFile]) -> bool:
    """Whether they make a folder of Transformers."""
    return CONFIG in files and (WEIGHTS in files or INDEX in files)


def _choose_gguf(repo: str, files: Mapping[str, RepositoryFile]) -> str | None:
    """The only GGUF file of a repository, or its only Q4_K_M one; None where it has safetensors instead."""
    models = [name for name in files if name.endswith(".gguf") and "mmproj" not in name]
    usual = [name for name in models if "q4_k_m" in name.lower()]
    for candidates in (models, usual):
        if len(candidates) == 1:
            return candidates[0]
    if models:
        raise ModelFileError(f"{repo} has several models: write {repo}:FILE with one of {', '.join(models)}")
    if _is_model(files):
        return None
    raise ModelFileError(
        f"{repo} has neither a .gguf file nor safetensors with a {CONFIG}; Transformers may read it: --backend hf"
    )


def _find_weights(repo: str, files: Mapping[str, RepositoryFile], folder: Path) -> list[RepositoryFile]:
    if WEIGHTS in files:
        return [files[WEIGHTS]]
    (folder / INDEX).unlink(missing_ok=True)
    _fetch(repo, [files[INDEX]], folder, lambda done, total: None)
    names = sorted(set(read_index(folder / INDEX).values()))
    if absent := [name for name in names if name not in files]:
        raise DownloadError(f"{repo} has no file {absent[0]}, which its {INDEX} lists; it is no whole model")
    return [files[name] for name in names]


def _fetch(
    repo: str,
    files: Sequence[RepositoryFile],
    folder: Path,
    progress: Progress,
    before_weights: Callable[[], None] = lambda: None,
) -> None:
    """Those that are not there yet, in order. Raises DownloadError, OSError."""
    missing = [entry for entry in files if not _is_there(entry, folder)]
    done, total = 0, sum(entry.nbytes for entry in missing)
    checked = False
    for entry in missing:
        if not checked and _is_weight(entry.path):
            before_weights()
            checked = True
        _fetch_one(repo, entry, folder, partial(_report, progress, done, total))
        done += entry.nbytes


def _report(progress: Progress, before: int, total: int, nbytes: int) -> None:
    progress(before + nbytes, total)


def _is_there(entry: RepositoryFile, folder: Path) -> bool:
    path = folder / entry.path
    return path.is_file() and path.stat().st_size == entry.nbytes


def _fetch_one(repo: str, entry: RepositoryFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
    part = folder / PARTS / entry.path
    part.parent.mkdir(parents=True, exist_ok=True)
    if entry.sha256 is None:  # nothing would tell whether a part is of this file
        part.unlink(missing_ok=True)
    try:
        for is_new in (not part.exists(), True):
            _fetch_part(repo, entry, part, on_bytes)
            if entry.sha256 is None or sha256([part]) == entry.sha256:
                path = folder / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, path)
                return
            part.unlink()  # it went on from a part of another file: once more without it
            if is_new:
                break
        raise DownloadError(f"cannot download {repo}: {entry.path} has the wrong sha256; pull again")
    finally:
        _prune(part.parent, folder)


def _fetch_part(repo: str, entry: RepositoryFile, part: Path, on_bytes: Callable[[int], None]) -> None:
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        before = part.stat().st_size if part.exists() else 0
        try:
            fetch_rest(_request(repo, entry.path), part, entry.nbytes, on_bytes)
            return
        except DownloadError as error:
            if attempt == _MAX_ATTEMPTS or not part.exists() or part.stat().st_size <= before:
                raise DownloadError(
                    f"cannot download {repo}: {entry.path}: {error}; check the network and pull again, from there on"
                ) from None


def _prune(parts: Path, folder: Path) -> None:
    """Folders of parts that hold none."""
    while parts != folder and not any(parts.iterdir()):
        parts.rmdir()
        parts = parts.parent


def _list_files(repo: str) -> dict[str, RepositoryFile]:
    import huggingface_hub
    from huggingface_hub.hf_api import RepoFile

    with _in_one_line(repo):
        listed = list(huggingface_hub.HfApi(endpoint=hub_endpoint()).list_repo_tree(repo, recursive=True))
    files = [entry for entry in listed if isinstance(entry, RepoFile) and _is_inside(entry.path)]
    return {
        entry.path: RepositoryFile(entry.path, entry.size, None if entry.lfs is None else entry.lfs.sha256)
        for entry in files
    }


def _is_inside(path: str) -> bool:
    """Whether a name that the hub gives stays in the repository's folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and not any(part.startswith(".") for part in parts)


def _request(repo: str, file: str) -> urllib.request.Request:
    """For a file, from where the hub keeps it; only the hub itself gets the user's token."""
    import huggingface_hub

    endpoint = hub_endpoint()
    with _in_one_line(repo):
        url = huggingface_hub.hf_hub_url(repo, file, endpoint=endpoint)
        location = huggingface_hub.get_hf_file_metadata(url).location
    request = urllib.request.Request(location)
    if (token := huggingface_hub.get_token()) and urlsplit(location).netloc == urlsplit(endpoint).netloc:
        request.add_header("Authorization", f"Bearer {token}")
    return request


@contextmanager
def _in_one_line(repo: str) -> Iterator[None]:
    """What the hub's library raises, in foredraft's words."""
    from huggingface_hub import errors

    endpoint = hub_endpoint()
    try:
        yield
    except errors.GatedRepoError:
        raise DownloadError(f"{repo} is gated: accept its terms on {endpoint}/{repo} and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{repo} is no path here, and not on {endpoint} or private there: check the name, or set HF_TOKEN"
        ) from None
    except errors.HFValidationError:
        raise ModelFileError(f"{repo} is no hub id; write org/repo or org/repo:file.gguf") from None
    except Exception as error:  # the library lets those of its HTTP client through
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DownloadError(f"cannot download {repo}: {reason}; check the network and try again") from None


def _require_reachable() -> None:
    """One quick question: the library would try again for half a minute."""
    endpoint = hub_endpoint()
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DownloadError(f"cannot reach {endpoint} ({reason}); check the network or HF_ENDPOINT") from None
