from __future__ import annotations

import json
import logging
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
