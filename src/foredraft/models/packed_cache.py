"""Repacked weights on disk, so that only a model's first start pays for the repacking.

    "FDPACKED" | u32 layout version, header bytes, crc32 of the header | header: JSON | pad | tensor | pad | tensor ...

Tensors begin on pages and the file is mapped read-only: starting costs the header, and processes share the pages.
At every start magic, version, the header's checksum, its table against the one that this model must have, and the
size of the file are checked. The tensors' own checksums are checked by `foredraft doctor` (`damaged_tensors`), since
reading them all costs as much as repacking. A damaged tensor makes wrong text but no wrong access: shapes come from
the model file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError

#: Part of every key and header: raise it when native/formats/packed.h changes what the bytes mean.
LAYOUT_VERSION = 1

_MAGIC = b"FDPACKED"
_PREFIX = struct.Struct("<8sIII")
_PAGE = 4096
_CHUNK = 1 << 20
_MAX_HEADER = 1 << 26
#: Of each tensor of a model file so many bytes at so many places, its first and last ones among them, go into the key.
_SAMPLE, _SAMPLES = 4096, 4

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix of n outputs by k inputs in one of the core's formats; `source` is its name in the model file."""

    name: str
    source: str
    format: str
    n: int
    k: int
    nbytes: int


#: Fills a tensor's packed bytes, [nbytes]. Called from several threads, each time for another tensor.
Pack = Callable[[PackedTensor, NDArray[np.uint8]], None]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The packed bytes of every tensor, read-only, and where they are: a path, or "memory"."""

    tensors: Mapping[str, NDArray[np.uint8]]
    where: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What packed weights were made from; equal origins have equal packed weights."""

    path: str
    key: str
    quantize: str


#: A file, and where tensors lie in it: (offset, bytes) from its start.
Part = tuple[str | os.PathLike[str], Sequence[tuple[int, int]]]


def identify(path: str | os.PathLike[str], parts: Sequence[Part], quantize: str | None) -> Origin:
    """The origin of a model, a file or a folder at `path`, whose tensors are in the files of `parts`.

    The key is a hash of, for every file, size, time of change, all before the first tensor, and samples of every
    tensor. Other weights get another key even where the header and the time are the same, as in an archive's files; an
    edit of a few weights between the samples is told by the time alone.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, spans in parts:
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{LAYOUT_VERSION} {status.st_size} {status.st_mtime_ns} {quantize}\n".encode())
            digest.update(file.read(min(offset for offset, _ in spans)))
            for offset, nbytes in sorted(spans):
                for i in range(_SAMPLES):
                    begin = max(nbytes - _SAMPLE, 0) * i // (_SAMPLES - 1)
                    digest.update(os.pread(file.fileno(), min(_SAMPLE, nbytes), offset + begin))
    return Origin(os.path.abspath(path), digest.hexdigest(), quantize or "")


def load_packed(
    directory: Path | None,
    origin: Origin,
    tensors: Sequence[PackedTensor],
    pack: Pack,
    num_threads: int,
    progress: Progress | None = None,
) -> PackedWeights:
    """The packed weights from the cache in `directory`; packed now, and kept there, if they are not.

    Of several processes that start at once one packs and the others wait for it. Without a directory, or with one that
    cannot hold them (full, read-only), the weights stay in memory; the latter is logged.
    """
    if directory is not None:
        path = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', Path(origin.path).stem)}-{origin.key}.fdp"
        try:
            if not _is_sound(path, origin, tensors):
                _write(path, origin, tensors, pack, num_threads, progress)
            return _map(path, tensors)
        except OSError as error:
            reason = error.strerror or str(error)
            logging.getLogger(__name__).warning(
                "cannot keep packed weights in %s (%s): they stay in memory, and the next start repacks",
                directory,
                reason,
            )
    arena = mmap.mmap(-1, _offsets([tensor.nbytes for tensor in tensors], 0)[-1])
    _fill(arena, 0, tensors, pack, num_threads, progress)
    return PackedWeights(_views(arena, 0, tensors), "memory", len(arena))


def packed_files(directory: Path) -> list[Path]:
    """Packed weights in the cache, and what killed processes left of theirs; not what one is packing now."""
    return sorted([*directory.glob("*.fdp"), *filter(_is_abandoned, directory.glob("*.part"))])


def damaged_tensors(path: Path) -> list[str]:
    """Names of the tensors whose bytes no longer have the checksum they were written with. Reads the whole file.

    Raises ModelFileError if it is not packed weights of this version, or not all of them.
    """
    damaged = []
    with open(path, "rb") as file:
        header, begin = _read_header(file.fileno())
        offsets = _offsets(header["sizes"], begin)
        if os.fstat(file.fileno()).st_size != offsets[-1]:
            raise ModelFileError("packed weights cut short or grown; remove the file and they are made again")
        for name, offset, size, checksum in zip(
            header["names"], offsets, header["sizes"], header["checksums"], strict=False
        ):
            file.seek(offset)
            if f"{_crc32(file, size):08x}" != checksum:
                damaged.append(name)
    return damaged


def read_origin(path: Path) -> Origin:
    """What packed weights were made from. Raises ModelFileError if it is not packed weights of this version."""
    with open(path, "rb") as file:
        header, _ = _read_header(file.fileno())
    return Origin(header["path"], header["key"], header["quantize"])


def _crc32(file: IO[bytes], size: int) -> int:
    """Of the next `size` bytes."""
    checksum = 0
    while size > 0 and (chunk := file.read(min(_CHUNK, size))):
        checksum = zlib.crc32(chunk, checksum)
        size -= len(chunk)
    return checksum


def _align(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _offsets(sizes: Sequence[int], begin: int) -> list[int]:
    """[tensors + 1] where each tensor begins, and the end of the last."""
    return list(accumulate(map(_align, sizes), initial=begin))


def _views(arena: mmap.mmap, begin: int, tensors: Sequence[PackedTensor]) -> dict[str, NDArray[np.uint8]]:
    offsets = _offsets([tensor.nbytes for tensor in tensors], begin)
    return {
        tensor.name: np.frombuffer(arena, dtype=np.uint8, count=tensor.nbytes, offset=offset)
        for tensor, offset in zip(tensors, offsets, strict=False)
    }


def _make_header(origin: Origin, tensors: Sequence[PackedTensor], checksums: Sequence[int]) -> bytes:
    """Everything before the first tensor. Its length does not depend on the checksums."""
    table = _table(origin, tensors) | {"checksums": [f"{checksum:08x}" for checksum in checksums]}
    text = json.dumps(table).encode()
    prefix = _PREFIX.pack(_MAGIC, LAYOUT_VERSION, len(text), zlib.crc32(text))
    return (prefix + text).ljust(_align(_PREFIX.size + len(text)), b"\0")


def _table(origin: Origin, tensors: Sequence[PackedTensor]) -> dict[str, Any]:
    return {
        "path": origin.path,
        "key": origin.key,
        "quantize": origin.quantize,
        "names": [tensor.name for tensor in tensors],
        "formats": [tensor.format for tensor in tensors],
        "shapes": [[tensor.n, tensor.k] for tensor in tensors],
        "sizes": [tensor.nbytes for tensor in tensors],
    }


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """The header, and where the first tensor begins."""
    problem = ModelFileError("not packed weights of this version of foredraft; remove the file and they are made again")
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise problem
    magic, version, size, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC or version != LAYOUT_VERSION or size > _MAX_HEADER:
        raise problem
    text = os.pread(descriptor, size, _PREFIX.size)
    if zlib.crc32(text) != checksum:
        raise problem
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        raise problem from None
    if not _is_header(header):
        raise problem
    return header, _align(_PREFIX.size + size)


def _is_header(header: Any) -> bool:
    """Whether it has the fields of `_make_header`, of their types: a right checksum says nothing of who wrote it."""
    if not isinstance(header, dict):
        return False
    names, sizes, checksums = (header.get(field) for field in ("names", "sizes", "checksums"))
    return (
        all(isinstance(header.get(field), str) for field in ("path", "key", "quantize"))
        and isinstance(names, list)
        and isinstance(sizes, list)
        and isinstance(checksums, list)
        and len(names) == len(sizes) == len(checksums)
        and all(isinstance(text, str) for text in names + checksums)
        and all(isinstance(size, int) and size >= 0 for size in sizes)
    )


def _is_sound(path: Path, origin: Origin, tensors: Sequence[PackedTensor]) -> bool:
    """Whether the file is there, whole, and holds these tensors of this origin, wherever the model file lay then."""
    try:
        with open(path, "rb") as file:
            header, begin = _read_header(file.fileno())
            size = os.fstat(file.fileno()).st_size
    except (FileNotFoundError, ModelFileError):
        return False
    expected = _table(origin, tensors) | {"path": header["path"], "checksums": header["checksums"]}
    return header == expected and size == _offsets(header["sizes"], begin)[-1]


def _map(path: Path, tensors: Sequence[PackedTensor]) -> PackedWeights:
    with open(path, "rb") as file:
        _, begin = _read_header(file.fileno())
        arena = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arena.madvise(mmap.MADV_WILLNEED)
    return PackedWeights(_views(arena, begin, tensors), str(path), len(arena))


def _write(
    path: Path,
    origin: Origin,
    tensors: Sequence[PackedTensor],
    pack: Pack,
    num_threads: int,
    progress: Progress | None,
) -> None:
    """Pack into a file beside `path` and rename it. Whatever stops this leaves neither file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with _exclusive(part) as descriptor:
        if _is_sound(path, origin, tensors):  # another process packed while this one waited
            part.unlink()
            return
        try:
            begin = len(_make_header(origin, tensors, [0] * len(tensors)))
            size = _offsets([tensor.nbytes for tensor in tensors], begin)[-1]
            os.ftruncate(descriptor, 0)  # a process that was killed may have left something
            _reserve(descriptor, size, path.parent)
            arena = mmap.mmap(descriptor, size)
            arena[:begin] = _make_header(origin, tensors, [0] * len(tensors))  # whose it is, should we be killed
            checksums = _fill(arena, begin, tensors, pack, num_threads, progress)
            arena[:begin] = _make_header(origin, tensors, checksums)
            arena.flush()
            os.fsync(descriptor)  # before the rename: after a power cut the file is whole or is not there
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    _remove_superseded(path, origin)


def _fill(
    arena: mmap.mmap,
    begin: int,
    tensors: Sequence[PackedTensor],
    pack: Pack,
    num_threads: int,
    progress: Progress | None,
) -> list[int]:
    """Pack every tensor to its place, several at a time. Returns their checksums."""
    views = _views(arena, begin, tensors)

    def fill_one(tensor: PackedTensor) -> int:
        pack(tensor, views[tensor.name])
        return zlib.crc32(views[tensor.name].data)

    total, done = sum(tensor.nbytes for tensor in tensors), 0
    if progress is not None:
        progress(done, total)
    executor = ThreadPoolExecutor(num_threads)
    try:
        futures = {executor.submit(fill_one, tensor): tensor for tensor in tensors}
        for future in as_completed(futures):
            future.result()
            done += futures[future].nbytes
            if progress is not None:
                progress(done, total)
        return [future.result() for future in futures]
    finally:
        executor.shutdown(cancel_futures=True)


def _reserve(descriptor: int, size: int, directory: Path) -> None:
    """Give the file its size and its place on the disk, or raise OSError: a write to a mapping cannot report it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    if shutil.disk_usage(directory).free < size + (64 << 20):  # macOS has no such call
        raise OSError("No space left on device")
    os.ftruncate(descriptor, size)


@contextmanager
def _exclusive(part: Path) -> Iterator[int]:
    """An open descriptor of `part` that no other process holds; waits for one that does."""
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The holder before us has renamed or removed the file it locked: then this lock guards nothing.
            if part.exists() and os.path.samestat(os.fstat(descriptor), os.stat(part)):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_abandoned(part: Path) -> bool:
    """Whether no process packs into it."""
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # locked, or gone
        return False


def _remove_superseded(path: Path, origin: Origin) -> None:
    """Remove what was packed, wholly or in part, from an earlier content of the same model file."""
    for other in packed_files(path.parent):
        try:
            found = read_origin(other)
        except (OSError, ModelFileError):
            continue
        if other != path and (found.path, found.quantize) == (origin.path, origin.quantize):
            other.unlink(missing_ok=True)
