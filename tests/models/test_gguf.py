from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.gguf import TensorInfo, read_gguf
from foredraft.models.hub import resolve

from .gguf_bytes import (
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    TYPE_F32,
    TYPE_IQ2_XS,
    TYPE_Q4_1,
    U8,
    U16,
    U32,
    U64,
    array,
    entry,
    make_file,
    string,
    tensor,
)

ARCHITECTURE = entry("general.architecture", STRING, "llama")
TWO_TENSORS = [tensor("a", (32, 2), TYPE_Q4_1, 0), tensor("b", (4,), TYPE_F32, 64)]
DATA = bytes(range(80))


@pytest.fixture
def save(tmp_path: Path):
    def save(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return save


def test_values_of_every_type(save):
    values = {
        "u8": (U8, 255),
        "i8": (I8, -128),
        "u16": (U16, 65535),
        "i16": (I16, -32768),
        "u32": (U32, 2**32 - 1),
        "i32": (I32, -(2**31)),
        "f32": (F32, 0.5),
        "bool": (BOOL, True),
        "string": (STRING, "naïve ▁"),
        "u64": (U64, 2**64 - 1),
        "i64": (I64, -(2**63)),
        "f64": (F64, 0.1),
    }
    entries = [entry(key, kind, value) for key, (kind, value) in values.items()]
    entries += [array("list_" + key, kind, [value, value]) for key, (kind, value) in values.items()]
    entries.append(array("empty", STRING, []))
    metadata = read_gguf(save(make_file(entries))).metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}
    assert metadata["bool"] is True
    assert all(metadata["list_" + key] == [value, value] for key, (_, value) in values.items())
    assert metadata["empty"] == []
    assert "absent" not in metadata
    assert len(metadata) == len(entries)


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_read_only_views(save, version):
    file = read_gguf(save(make_file([ARCHITECTURE], TWO_TENSORS, DATA, version=version)))
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.type, a.shape, a.nbytes) == ("Q4_1", (32, 2), 40)
    assert b == TensorInfo("b", "F32", (4,), a.offset + 64, 16)
    view = file.data("b")
    del file
    assert view.dtype == np.uint8
    assert view.tobytes() == DATA[64:80]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_strings_that_are_no_utf8_survive(save):
    raw = b"\xff\xfea"
    text = read_gguf(save(make_file([array("tokens", STRING, [raw, "b"])]))).metadata["tokens"][0]
    assert text.encode("utf-8", "surrogateescape") == raw


def test_dropped_pages_come_back(save):
    size = 1 << 20
    file = read_gguf(save(make_file([], [tensor("a", (size // 4,), TYPE_F32, 0)], b"\x07" * size)))
    file.drop_pages("a")
    assert (file.data("a") == 7).all()


def test_own_alignment(save):
    content = make_file(
        [entry("general.alignment", U32, 64)],
        [tensor("a", (4,), TYPE_F32, 0), tensor("b", (4,), TYPE_F32, 64)],
        DATA,
        alignment=64,
    )
    assert read_gguf(save(content)).data("b").tobytes() == DATA[64:80]


def with_counts(num_tensors: int, num_entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)


def raw_value(kind: int, payload: bytes) -> bytes:
    return string("key") + struct.pack("<I", kind) + payload


HOSTILE = {
    "empty file": (b"", "ends inside the magic number"),
    "foreign file": (b"PK\x03\x04" + bytes(64), "does not begin with 'GGUF'; give a .gguf file"),
    "web page": (b"<!DOCTYPE html>" + bytes(64), "web page"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "cut after the version": (b"GGUF\x03\x00\x00\x00", "ends inside the tensor count"),
    "2^63 tensors": (with_counts(2**63, 0), "claims 9223372036854775808 tensors"),
    "2^63 entries": (with_counts(0, 2**63), "claims 9223372036854775808 metadata entries"),
    "more entries than bytes": (with_counts(0, 60000), "ends inside a metadata key"),
    "more tensors than bytes": (with_counts(1000000, 0), "ends inside a tensor's name"),
    "key of 2^64-1 bytes": (with_counts(0, 1) + struct.pack("<Q", 2**64 - 1), "claims 18446744073709551615 bytes"),
    "string longer than the file": (make_file([raw_value(STRING, struct.pack("<Q", 1000))]), "ends inside|claims 1000"),
    "array longer than the file": (make_file([raw_value(9, struct.pack("<IQ", U32, 2**62))]), "claims 46116860"),
    "string array longer than the file": (make_file([raw_value(9, struct.pack("<IQ", STRING, 2**40))]), "claims 1099"),
    "array of arrays": (make_file([raw_value(9, struct.pack("<IQ", 9, 1))]), "array of arrays"),
    "value type 99": (make_file([raw_value(99, b"")]), "unknown value type 99"),
    "array of type 99": (make_file([raw_value(9, struct.pack("<IQ", 99, 1))]), "unknown value type 99"),
    "key twice": (make_file([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' occurs twice"),
    "alignment 0": (make_file([entry("general.alignment", U32, 0)]), "general.alignment"),
    "alignment 48": (make_file([entry("general.alignment", U32, 48)]), "general.alignment"),
    "alignment 2^31": (make_file([entry("general.alignment", U32, 2**31)]), "general.alignment"),
    "alignment of another type": (make_file([entry("general.alignment", STRING, "32")]), "general.alignment"),
    "no dimensions": (make_file([], [tensor("a", (), TYPE_F32, 0)], DATA), "number of dimensions: 0"),
    "5 dimensions": (make_file([], [tensor("a", (1,) * 5, TYPE_F32, 0)], DATA), "number of dimensions: 5"),
    "axis of 0": (make_file([], [tensor("a", (0, 4), TYPE_F32, 0)], DATA), "impossible shape"),
    "overflowing shape": (make_file([], [tensor("a", (2**31 - 1,) * 4, TYPE_F32, 0)], DATA), "impossible shape"),
    "overflowing axis": (make_file([], [tensor("a", (2**63, 2), TYPE_F32, 0)], DATA), "impossible shape"),
    "rows that split a block": (make_file([], [tensor("a", (33,), TYPE_Q4_1, 0)], DATA), "no multiple of 32"),
    "tensor type 4, removed": (make_file([], [tensor("a", (32,), 4, 0)], DATA), "unknown type 4"),
    "tensor type 2^31": (make_file([], [tensor("a", (32,), 2**31, 0)], DATA), "unknown type 2147483648"),
    "unaligned offset": (make_file([], [tensor("a", (4,), TYPE_F32, 8)], DATA), "unaligned offset"),
    "offset past the end": (make_file([], [tensor("a", (4,), TYPE_F32, 96)], DATA), "past the end of the file"),
    "offset 2^64-32": (make_file([], [tensor("a", (4,), TYPE_F32, 2**64 - 32)], DATA), "past the end of the file"),
    "truncated data": (make_file([], TWO_TENSORS, DATA[:-1]), "'b' reaches past the end of the file"),
    "no data": (make_file([], TWO_TENSORS)[:-1], "past the end of the file"),
    "overlap": (make_file([], [TWO_TENSORS[0], tensor("b", (4,), TYPE_F32, 32)], DATA), "'a' and 'b' overlap"),
    "same place": (make_file([], [TWO_TENSORS[0], tensor("b", (4,), TYPE_F32, 0)], DATA), "overlap"),
    "tensor twice": (make_file([], [TWO_TENSORS[0], tensor("a", (4,), TYPE_F32, 64)], DATA), "'a' occurs twice"),
}


@pytest.mark.parametrize(("content", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_is_refused_in_one_line(save, content, reason):
    with pytest.raises(ModelFileError, match=reason) as caught:
        read_gguf(save(content))
    assert "\n" not in str(caught.value)


UNSUPPORTED = {
    "version 1": (make_file([], version=1), "version 1; versions 2 and 3"),
    "version 4": (make_file([], version=4), "version 4; versions 2 and 3"),
    "big-endian": (make_file([], version=3 << 24), "big-endian"),
    "IQ2_XS": (make_file([], [tensor("a\n\x1b[31m", (256,), TYPE_IQ2_XS, 0)], DATA), r"'a\?\?\[31m' is IQ2_XS.*Q4_K_M"),
    "split file": (make_file([entry("split.count", U16, 3)]), "one of 3 parts"),
}


@pytest.mark.parametrize(("content", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_unsupported_file_is_refused_in_one_line(save, content, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        read_gguf(save(content))
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_sound_file_is_refused(save):
    content = make_file([ARCHITECTURE, array("tokens", STRING, ["a", "bc"])], TWO_TENSORS, DATA)
    for size in range(len(content)):
        with pytest.raises(ModelFileError):
            read_gguf(save(content[:size]))
    read_gguf(save(content))


def test_paths_that_are_no_files(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path, Path(os.devnull)):
        with pytest.raises(ModelFileError, match=str(path)):
            read_gguf(path)


def test_a_name_that_is_no_utf8(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.gguf")
    with open(path, "wb") as file:
        file.write(make_file([ARCHITECTURE]))
    assert read_gguf(os.fsdecode(path)).metadata["general.architecture"] == "llama"


@pytest.mark.real
def test_real_file_equals_the_gguf_package():
    path = resolve("smollm2-135m")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for theirs_tensor in theirs.tensors:
        info = ours.tensors[theirs_tensor.name]
        assert (info.type, info.shape) == (theirs_tensor.tensor_type.name, tuple(theirs_tensor.shape.tolist()))
        assert (info.offset, info.nbytes) == (theirs_tensor.data_offset, theirs_tensor.n_bytes)


@pytest.mark.pair
def test_a_large_header_with_its_lists_takes_under_300_ms():
    path = resolve("qwen2.5-coder-1.5b")
    times = []
    for _ in range(3):
        start = time.process_time()
        values = dict(read_gguf(path).metadata)
        times.append(time.process_time() - start)
    assert min(times) < 0.3
    assert len(values["tokenizer.ggml.tokens"]) == 151936
