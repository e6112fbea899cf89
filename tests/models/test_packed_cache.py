"""Packed weights on disk: made once, whole or absent, and never in the way."""

import fcntl
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from foredraft.errors import ModelFileError
from foredraft.models import packed_cache
from foredraft.models.packed_cache import (
    Origin,
    PackedTensor,
    PackedWeights,
    damaged_tensors,
    identify,
    load_packed,
    packed_files,
    read_origin,
)

TENSORS = [
    PackedTensor(name, name, "Q4A", 16, 32 * n, 10_000 * n + 3) for n, name in enumerate(("a", "b", "c"), start=1)
]
ORIGIN = Origin("/models/some model.gguf", "0123456789abcdef", "")
ROOT = Path(__file__).parents[2]
NAME = "some_model-0123456789abcdef.fdp"


def pack(tensor: PackedTensor, packed: np.ndarray) -> None:
    packed[:] = np.arange(len(packed)) % 251 + zlib.crc32(tensor.name.encode()) % 5


def never(tensor: PackedTensor, packed: np.ndarray) -> None:
    raise AssertionError("packed again")


def is_right(weights: PackedWeights) -> bool:
    for tensor in TENSORS:
        expected = np.empty(tensor.nbytes, dtype=np.uint8)
        pack(tensor, expected)
        if not np.array_equal(weights.tensors[tensor.name], expected):
            return False
    return True


def test_first_start_packs_and_second_maps(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    first = load_packed(tmp_path / "new" / "packed", ORIGIN, TENSORS, pack, 2, lambda n, total: done.append((n, total)))
    second = load_packed(tmp_path / "new" / "packed", ORIGIN, TENSORS, never, 2)
    assert is_right(first)
    assert is_right(second)
    assert second.where == str(tmp_path / "new" / "packed" / NAME)
    assert [n for n, _ in done] == sorted(n for n, _ in done)
    assert done[-1] == (60_009, 60_009)
    assert os.listdir(tmp_path / "new" / "packed") == [NAME]
    with pytest.raises(ValueError, match="read-only"):
        second.tensors["a"][0] = 1
    assert all(array.ctypes.data % 4096 == 0 for array in second.tensors.values())
    assert read_origin(Path(second.where)) == ORIGIN
    assert damaged_tensors(Path(second.where)) == []


def test_a_moved_model_keeps_its_packed_weights(tmp_path: Path) -> None:
    load_packed(tmp_path, ORIGIN, TENSORS, pack, 1)
    load_packed(tmp_path, Origin("/elsewhere/some model.gguf", ORIGIN.key, ""), TENSORS, never, 1)


def test_key_follows_size_time_header_and_options(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def key(text: str, when: int = 5, quantize: str | None = None) -> str:
        path.write_text(text)
        os.utime(path, ns=(when, when))
        return identify(path, [(path, [(6, 4)])], quantize).key

    keys = [key("headertail"), key("HEADERtail"), key("headertail+"), key("headertail", 6), key("headertail", 5, "q4")]
    assert len(set(keys)) == 5
    assert key("headertail") == keys[0]


@pytest.mark.parametrize("where", [100, 101, 199, 200, 300, 100_199, 100_200, 134_000, 167_500, 200_199])
def test_key_follows_every_tensor(where: int, tmp_path: Path) -> None:
    """Tensors of 100, 100 000 and 100 000 bytes after a header of 100: same size, header and time, other weights."""
    spans = [(200, 100_000), (100, 100), (100_200, 100_000)]
    raw = bytearray(np.random.default_rng(0).bytes(200_200))

    def key() -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        os.utime(path, ns=(5, 5))
        return identify(path, [(path, spans)], None).key

    before = key()
    raw[where] ^= 1
    assert key() != before


HEADERS = [b"[]", b"{}", b'"text"', b"null", b"{\xff}", b"[" * 100_000, b'{"path": 5}', b"", b"1" * 5000]


@pytest.mark.parametrize("header", HEADERS, ids=[repr(header[:8]) for header in HEADERS])
def test_an_odd_header_with_a_right_checksum_is_unsound(header: bytes, tmp_path: Path) -> None:
    write_header(tmp_path / NAME, header)
    for read in (damaged_tensors, read_origin):
        with pytest.raises(ModelFileError, match="remove the file"):
            read(tmp_path / NAME)
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, pack, 1))
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, never, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", 5),
        ("key", None),
        ("names", {}),
        ("names", [1, 2, 3]),
        ("sizes", [1]),
        ("sizes", ["x"] * 3),
        ("sizes", [-4096, 0, 0]),
        ("checksums", "abc"),
        ("checksums", [1, 2, 3]),
    ],
)
def test_a_header_with_a_field_of_another_type_is_unsound(field: str, value: object, tmp_path: Path) -> None:
    load_packed(tmp_path, ORIGIN, TENSORS, pack, 1)
    raw = (tmp_path / NAME).read_bytes()
    table = json.loads(raw[20 : raw.index(b"\0", 20)])
    write_header(tmp_path / NAME, json.dumps(table | {field: value}).encode())
    with pytest.raises(ModelFileError, match="remove the file"):
        read_origin(tmp_path / NAME)
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, pack, 1))


def write_header(path: Path, header: bytes) -> None:
    prefix = struct.pack("<8sIII", b"FDPACKED", packed_cache.LAYOUT_VERSION, len(header), zlib.crc32(header))
    path.write_bytes((prefix + header).ljust(8192, b"\0"))


@pytest.mark.parametrize("damage", ["header", "truncated", "longer", "empty", "version", "other tensors"])
def test_unsound_file_is_made_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / NAME
    if damage == "version":
        monkeypatch.setattr(packed_cache, "LAYOUT_VERSION", 0)
    load_packed(tmp_path, ORIGIN, TENSORS[:2] if damage == "other tensors" else TENSORS, pack, 1)
    monkeypatch.undo()
    raw = bytearray(path.read_bytes())
    if damage == "header":
        raw[200] ^= 1
    sizes = {"truncated": len(raw) - 4096, "empty": 0}
    path.write_bytes(bytes(raw[: sizes.get(damage)]) + b"x" * (damage == "longer"))
    if damage != "other tensors":
        with pytest.raises(ModelFileError, match="remove the file"):
            damaged_tensors(path)
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, pack, 1))
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, never, 1))


def test_a_flipped_bit_is_found_on_demand(tmp_path: Path) -> None:
    load_packed(tmp_path, ORIGIN, TENSORS, pack, 1)
    with open(tmp_path / NAME, "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte ^ 4]))
    assert damaged_tensors(tmp_path / NAME) == ["c"]


def test_no_room_on_the_disk_means_memory_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the kernel refuses files beyond this
    try:
        with caplog.at_level(logging.WARNING):
            weights = load_packed(tmp_path, ORIGIN, TENSORS, pack, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert weights.where == "memory"
    assert is_right(weights)
    assert os.listdir(tmp_path) == []
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "too large" in caplog.text


def test_unusable_directory_means_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert load_packed(tmp_path / "file", ORIGIN, TENSORS, pack, 1).where == "memory"
    assert is_right(load_packed(None, ORIGIN, TENSORS, pack, 1))


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_packed(tmp_path, ORIGIN, TENSORS, pack, 1, interrupt)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_used_up(tmp_path: Path) -> None:
    (tmp_path / NAME).with_suffix(".part").write_bytes(b"x" * 500_000)
    assert is_right(load_packed(tmp_path, ORIGIN, TENSORS, pack, 1))
    assert os.listdir(tmp_path) == [NAME]


def kill_while_packing(directory: Path, origin: Origin) -> Path:
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from tests.models.test_packed_cache import Origin, TENSORS, load_packed, pack

        def kill(done, total):
            os.kill(os.getpid(), signal.SIGKILL)

        load_packed(Path(sys.argv[1]), Origin(*sys.argv[2:]), TENSORS, pack, 1, kill)
    """
    arguments = [str(directory), origin.path, origin.key, origin.quantize]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (part,) = directory.glob("*.part")
    return part


def test_what_a_killed_process_left_is_known_as_its_models(tmp_path: Path) -> None:
    part = kill_while_packing(tmp_path, ORIGIN)
    assert packed_files(tmp_path) == [part]
    assert read_origin(part) == ORIGIN
    with open(part, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process that packs
        assert packed_files(tmp_path) == []
    load_packed(tmp_path, Origin(ORIGIN.path, "4" * 16, ""), TENSORS, pack, 1)
    assert os.listdir(tmp_path) == [f"some_model-{'4' * 16}.fdp"]


def test_newer_weights_of_the_same_file_replace_older_ones(tmp_path: Path) -> None:
    others = [Origin("/other/some model.gguf", "2" * 16, ""), Origin(ORIGIN.path, "3" * 16, "q4")]
    for origin in (ORIGIN, *others, Origin(ORIGIN.path, "4" * 16, "")):
        load_packed(tmp_path, origin, TENSORS, pack, 1)
    assert sorted(os.listdir(tmp_path)) == [f"some_model-{digit * 16}.fdp" for digit in "234"]


def test_of_two_processes_one_packs(tmp_path: Path) -> None:
    program = """if True:
        import sys, time
        from pathlib import Path
        from tests.models.test_packed_cache import ORIGIN, TENSORS, is_right, load_packed, pack

        def slow(tensor, packed):
            with open(sys.argv[1] + "/log", "a") as log:
                log.write(tensor.name)
            time.sleep(0.3)
            pack(tensor, packed)

        weights = load_packed(Path(sys.argv[1]) / "packed", ORIGIN, TENSORS, slow, 1)
        sys.exit(not (is_right(weights) and weights.where != "memory"))
    """
    both = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT) for _ in range(2)]
    try:
        assert [process.wait(timeout=60) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    assert (tmp_path / "log").read_text() == "abc"
    assert os.listdir(tmp_path / "packed") == [NAME]
