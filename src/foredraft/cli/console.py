"""What every command shares about its surroundings: stdout for the answer, stderr for everything else."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from rich.console import Console

#: `--json` without a file name, and `-f -`: the standard streams.
STANDARD_STREAM = "-"


@dataclass(slots=True)
class Session:
    """What one invocation of `foredraft` carries from its flags to its last line."""

    debug: bool = False


def make_console(stream: IO[str]) -> Console:
    """A rich console, plain where `stream` is no terminal. Imported late: rich costs 40 ms."""
    from rich.console import Console

    return Console(file=stream, highlight=False, soft_wrap=not stream.isatty())


def note(text: str) -> None:
    """A line for the person, beside the answer."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def hold_log() -> Iterator[None]:
    """While an answer streams, log lines wait for its end: they would cut it in two where both reach one screen."""
    logger = logging.getLogger("foredraft")
    held = logging.handlers.MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)
    printing, logger.handlers = logger.handlers, [held]
    try:
        yield
    finally:
        logger.handlers = printing
        for record in held.buffer:
            logger.handle(record)


def write_answer(text: str) -> None:
    """A piece of the answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Mapping[str, Any], target: str) -> None:
    """One object, to stdout or to a file."""
    write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", target)


def write_text(text: str, target: str) -> None:
    """To stdout, or to a file that is replaced as a whole or not at all."""
    if target == STANDARD_STREAM:
        write_answer(text)
        return
    path = Path(target)
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise ForedraftError(f"cannot write {target}: {error.strerror or error}") from error


def read_text(source: str) -> str:
    """A text file, or stdin for `-`."""
    name = "standard input" if source == STANDARD_STREAM else source
    try:
        data = sys.stdin.buffer.read() if source == STANDARD_STREAM else Path(source).read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {name}: {error.strerror or error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from error


def format_bytes(count: int) -> str:
    """Decimal units, as model cards and disks count."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
