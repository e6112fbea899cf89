"""GGUF files: metadata and quantised tensors, mapped read-only.

The format is ggml's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header is checked by the C++ core
before anything is used; tensors are views on the mapping, so opening a file reads its header only.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, NativeCoreError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` has the fastest axis first, as in the file: a matrix is (inputs, outputs)."""

    name: str
    type: str  # ggml's name: "F32", "Q4_K" …
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class Metadata(Mapping[str, Any]):
    """The entries of the header. A value is made when it is asked for, and not kept: a vocabulary is a long list.

    Arrays are lists. Strings that are no UTF-8 hold lone surrogates (PEP 383: encode them with "surrogateescape").
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._index = {key: i for i, key in enumerate(native.keys())}

    def __getitem__(self, key: str) -> Any:
        return self._native.value(self._index[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class GGUFFile:
    """An open GGUF file. The mapping lives as long as this object or any array that `data` returned."""

    def __init__(self, path: str, native: Any) -> None:
        self.path = path
        self._native = native
        self.nbytes: int = native.nbytes
        self.metadata = Metadata(native)
        self.tensors = {info.name: info for info in (TensorInfo(*fields) for fields in native.tensors())}

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor in its own type, [nbytes], read-only, not copied. Raises KeyError."""
        info = self.tensors[name]
        view: NDArray[np.uint8] = self._native.view(info.offset, info.nbytes)
        return view

    def parts(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """What packed weights depend on: files, and the spans in them, (offset, bytes), that hold tensors."""
        return [(self.path, [(info.offset, info.nbytes) for info in self.tensors.values()])]

    def drop_pages(self, name: str) -> None:
        """Give the memory that holds a tensor's pages back; a later read fetches them from the disk again."""
        info = self.tensors[name]
        self._native.drop_pages(info.offset, info.nbytes)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open and check a GGUF file (versions 2 and 3).

    Raises ModelFileError for a missing, truncated or malformed file, UnsupportedModelError for a sound one that cannot
    be read here (a tensor type, a version, a part of a split file), NativeCoreError without the C++ core.
    """
    core = load_core()
    shown = os.fspath(path)
    try:
        native = core.GgufFile(os.fsencode(path))
    except FileNotFoundError:
        raise ModelFileError(f"{shown}: no such file; check the path") from None
    except OSError as error:
        raise ModelFileError(
            f"{shown}: {error.strerror or error}; a model is one regular, readable .gguf file"
        ) from None
    except core.GgufMalformed as error:
        raise ModelFileError(f"{shown}: not a sound GGUF file: {error}; {_cure(shown)}") from None
    except core.GgufUnsupported as error:
        raise UnsupportedModelError(f"{shown}: {error}") from None
    file = GGUFFile(shown, native)
    if (parts := file.metadata.get("split.count", 1)) != 1:
        raise UnsupportedModelError(
            f"{shown}: it is one of {parts} parts of a split GGUF file; join them with llama.cpp's `gguf-split --merge`"
        )
    return file


def load_core() -> Any:
    """The compiled module. Raises NativeCoreError if it was not built."""
    try:
        return importlib.import_module("foredraft._native")
    except ImportError as error:
        raise NativeCoreError(
            f"the C++ core of foredraft is missing ({error}); install a C++20 compiler (g++ or clang) and run "
            "`pip install --force-reinstall --no-deps .` in foredraft's folder again"
        ) from None


def _cure(path: str) -> str:
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: fetch the file itself with `git lfs pull`"
    if start.lstrip()[:1] == b"<":
        return "it looks like a web page: download the file itself"
    if not start.startswith(b"GGUF"):
        return "give a .gguf file"
    return "download it again"
