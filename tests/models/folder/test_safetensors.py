"""Safetensors files: those of the library, and hostile ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import ModelFileError
from foredraft.models.folder.safetensors import SafetensorsFile

SOUND: dict[str, dict[str, Any]] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(range(32))


def write(path: Path, header: Any, data: bytes = DATA, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return SOUND | {"a": SOUND["a"] | changes}


def test_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.ones(5, dtype=np.float16),
        "scalar": np.array(3.0, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert file.tensors[name].shape == tensor.shape
        assert file.view(file.tensors[name]).tobytes() == tensor.tobytes()
        file.drop_pages(file.tensors[name])
        assert file.view(file.tensors[name]).tobytes() == tensor.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        file.view(file.tensors["half"])[0] = 1


def test_a_view_outlives_its_file(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "m", SOUND))
    view = file.view(file.tensors["b"])
    del file
    assert view.tobytes() == DATA[24:]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{", "its header is no JSON"),
        (b"[]", "its header is no JSON object"),
        (b"\xff\xfe", "its header is no JSON"),
        (b"[" * 50_000, "its header is no JSON"),
        (b'{"a": {}, "a": {}}', "its header is no JSON"),
        ({"a": 3}, "the entry of tensor a is malformed"),
        (entry(dtype=3), "malformed"),
        (entry(shape=None), "malformed"),
        (entry(shape=[-1, -6]), "malformed"),
        (entry(shape=[True, 6]), "malformed"),
        (entry(shape=[1] * 17), "malformed"),
        (entry(shape=[2.0, 3]), "malformed"),
        (entry(data_offsets=[0]), "malformed"),
        (entry(data_offsets=[24, 0]), "tensor a of F32"),
        (entry(shape=[2, 4]), "tensor a of F32 (2, 4) in 24 bytes"),
        (entry(shape=[2**62, 2**62]), "in 24 bytes"),
        (entry(dtype="F16"), "tensor a of F16 (2, 3) in 24 bytes"),
        (entry(data_offsets=[8, 32]), "tensor a begins at"),
        ({"a": SOUND["a"]}, "8 bytes behind its last tensor"),
        ({"b": SOUND["b"]}, "tensor b begins at"),
        (SOUND | {"c": {"dtype": "U8", "shape": [9], "data_offsets": [32, 41]}}, "it is cut short: "),
    ],
)
def test_headers_that_lie(header: Any, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", header)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: not a sound safetensors file: ")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400


def test_types_that_the_core_does_not_read_are_only_listed(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F8_E4M3", "shape": [32], "data_offsets": [0, 32]}}
    assert SafetensorsFile(write(tmp_path / "m", header)).tensors["x"].type == "F8_E4M3"


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 1000])
def test_a_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a sound safetensors file"):
        SafetensorsFile(write(tmp_path / "m", SOUND, length=length))


def test_no_part_of_a_file_is_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m", SOUND)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            SafetensorsFile(path)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelFileError, match=str(path)):
            SafetensorsFile(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("F32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "a"]), inner),
    max_leaves=8,
)


@given(header=st.binary(max_size=60) | st.dictionaries(st.text(max_size=3), _JSON, max_size=3))
def test_whatever_the_header_is(header: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.safetensors", header)
    try:
        file = SafetensorsFile(path)
    except ModelFileError:
        return
    for tensor in file.tensors.values():
        assert tensor.offset + tensor.nbytes <= file.nbytes
