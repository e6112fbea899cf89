"""Safetensors files: named tensors, mapped read-only.

    u64 length of the header | header: JSON | data

The header is {name: {"dtype", "shape", "data_offsets": [begin, end]}}, and "__metadata__" with texts; offsets count
from the start of the data, which the tensors fill without holes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, UnsupportedModelError

#: All weights in one file, or which file has which.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
#: What the format allows.
_MAX_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"

#: Types that the core reads -> bytes of an element; ggml has the same names for them.
READ_TYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. `shape` has the slowest axis first, as in the file: a matrix is (outputs, inputs)."""

    type: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsFile:
    """An open file, whose header has been checked. The mapping lives as long as this or any array of `view`.

    Raises ModelFileError for a missing, truncated or malformed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_file(path)
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: no such file; download it, or check the path") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = getattr(error, "strerror", None) or error
            raise ModelFileError(f"{path}: {reason}; download it again") from None
        self.nbytes = len(self._map)
        try:
            self.tensors = _read_tensors(self._map)
        except ModelFileError as error:
            raise ModelFileError(f"{path}: not a sound safetensors file: {error}") from None

    def view(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor, read-only, not copied."""
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def drop_pages(self, tensor: StoredTensor) -> None:
        """Give the memory of the whole pages that hold a tensor back; a later read fetches them again."""
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def check_is_file(path: str | os.PathLike[str]) -> None:
    """Raises ModelFileError for what is there and is none: a pipe would be waited for."""
    if Path(path).exists() and not Path(path).is_file():
        raise ModelFileError(f"{os.fspath(path)}: no regular file; check the path")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ModelFileError."""
    check_is_file(path)
    try:
        text = Path(path).read_bytes()
        value = json.loads(text)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; download it, or check the path") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        raise ModelFileError(f"{path}: {_no_json(text)}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds no JSON object; download it again")
    return value


def _no_json(text: bytes) -> str:
    if text.startswith(_LFS_POINTER):
        return "a Git LFS pointer; fetch the file itself with `git lfs pull`"
    return "not JSON; download it again"


def _read_tensors(data: mmap.mmap) -> dict[str, StoredTensor]:
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise ModelFileError("it is a Git LFS pointer: fetch the file itself with `git lfs pull`")
    if len(data) < _LENGTH.size:
        raise ModelFileError("it is cut short; download it again")
    (size,) = _LENGTH.unpack(data[: _LENGTH.size])
    begin = _LENGTH.size + size
    if size > _MAX_HEADER:
        raise ModelFileError(f"a header of {size} bytes; give a .safetensors file")
    if begin > len(data):
        raise ModelFileError("it is cut short within its header; download it again")
    try:
        header = json.loads(data[_LENGTH.size : begin], object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise ModelFileError("its header is no JSON; download it again") from None
    if not isinstance(header, dict):
        raise ModelFileError("its header is no JSON object; download it again")
    header.pop("__metadata__", None)
    tensors = {name: _read_tensor(name, entry, begin) for name, entry in header.items()}
    _check_cover(tensors, begin, len(data))
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _read_tensor(name: str, entry: Any, data_begin: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ModelFileError(f"the entry of tensor {name[:80]} is malformed; download it again")
    begin, end = offsets
    if begin > end or (kind in READ_TYPES and math.prod(shape) * READ_TYPES[kind] != end - begin):
        raise ModelFileError(f"tensor {name[:80]} of {kind} {shape} in {end - begin} bytes; download it again")
    return StoredTensor(kind, shape, data_begin + begin, end - begin)


def _counts(values: Any) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on, if it is one."""
    if (
        not isinstance(values, list)
        or len(values) > 16
        or not all(type(value) is int and 0 <= value < 2**63 for value in values)
    ):
        return None
    return tuple(values)


def _check_cover(tensors: Mapping[str, StoredTensor], begin: int, end: int) -> None:
    """Tensors lie one behind the other, up to the end of the file."""
    at = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            raise ModelFileError(f"tensor {name[:80]} begins at {tensor.offset}, not at {at}; download it again")
        at += tensor.nbytes
    if at > end:
        raise ModelFileError(f"it is cut short: {end} of {at} bytes; download it again")
    if at < end:
        raise ModelFileError(f"{end - at} bytes behind its last tensor; download it again")


def open_shards(folder: Path) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    """Every tensor of a folder by name: those of model.safetensors, or of the files that its index lists.

    Raises ModelFileError, UnsupportedModelError where the weights are of another kind.
    """
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.exists():
        file = SafetensorsFile(whole)
        return {name: (file, tensor) for name, tensor in file.tensors.items()}
    if index.exists():
        return _open_index(index)
    if any(folder.glob("pytorch_model*.bin")):
        raise UnsupportedModelError(f"{folder}: its weights are pickled (.bin), and only safetensors are read")
    raise ModelFileError(f"{folder}: no {whole.name} and no {index.name}; download the weights too")


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, in the folder of the index. Raises ModelFileError."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(map(_is_file_name, places.values())):
        raise ModelFileError(f"{index}: no map of tensors to files; download it again")
    return places


def _open_index(index: Path) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    places = read_index(index)
    files = {name: SafetensorsFile(index.parent / name) for name in sorted(set(places.values()))}
    tensors = {}
    for name, place in places.items():
        file = files[place]
        if name not in file.tensors:
            raise ModelFileError(f"{file.path}: tensor {name[:80]} is missing, which {index.name} says is there")
        tensors[name] = (file, file.tensors[name])
    return tensors


def _is_file_name(value: Any) -> bool:
    """One of the folder itself: an index is no way out of it."""
    return isinstance(value, str) and value.endswith(".safetensors") and os.path.basename(value) == value
