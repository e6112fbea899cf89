from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from foredraft.cli.console import format_bytes, hold_log, write_json
from foredraft.errors import ForedraftError


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_362_432, "98 MB"), (1_117_320_768, "1.1 GB"), (2e12, "2.0 TB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_json_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_json({"text": "\u00e9"}, str(target))
    assert json.loads(target.read_text("utf-8")) == {"text": "\u00e9"}
    with pytest.raises(ForedraftError, match="cannot write"):
        write_json({}, str(tmp_path / "missing" / "x.json"))
    with pytest.raises(TypeError):
        write_json({"no": object()}, str(target))
    assert json.loads(target.read_text("utf-8")) == {"text": "\u00e9"}
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("old.json", "new.json"):
        file, link = tmp_path / "there" / name, tmp_path / name
        link.symlink_to(file)
        if name == "old.json":
            file.write_text("old")
        write_json({"a": 1}, str(link))
        assert link.is_symlink()
        assert json.loads(file.read_text("utf-8")) == {"a": 1}
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ForedraftError, match="cannot write"):
        write_json({}, str(loop))
    assert loop.is_symlink()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_file_that_a_standard_stream_goes_to_is_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = tmp_path / "log"
    target.write_text("before\n")
    with open(target, "a", encoding="utf-8") as stream:  # as the shell does for >>
        monkeypatch.setattr(sys, name, stream)
        write_json({"a": 1}, str(target))
        stream.write("after\n")
    assert target.read_text("utf-8") == 'before\n{\n  "a": 1\n}\nafter\n'


@pytest.mark.parametrize("linked", [False, True])
def test_a_fifo_is_written_into(tmp_path: Path, linked: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    target = fifo
    if linked:
        target = tmp_path / "link"
        target.symlink_to(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text("utf-8")), daemon=True)
    reader.start()
    write_json({"a": 1}, str(target))
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert target.is_symlink() == linked
    reader.join(timeout=10)
    assert [json.loads(text) for text in read] == [{"a": 1}]


def test_the_mode_of_a_file_is_kept_and_the_umask_makes_a_new_one(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    before = os.umask(0o027)
    try:
        write_json({}, str(target))
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        target.chmod(0o604)
        write_json({}, str(target))
        assert stat.S_IMODE(target.stat().st_mode) == 0o604
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [target]


def test_log_lines_wait_for_the_end_of_an_answer() -> None:
    logger = logging.getLogger("foredraft")
    printed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with hold_log():
            logger.warning("off")
            assert printed == []
        assert printed == ["off"]
    finally:
        logger.removeHandler(handler)
