"""What every command shares about its surroundings: stdout for the answer, stderr for everything else."""

from __future__ import annotations

import codecs
import errno
import io
import json
import logging
import logging.handlers
import os
import secrets
import stat
import sys
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
STDIN_NAME = "standard input"
STDOUT_NAMES = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


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
    is_utf8 = target != STANDARD_STREAM or codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    write_text(json.dumps(value, ensure_ascii=not is_utf8, indent=2) + "\n", target)


def write_text(text: str, target: str) -> None:
    """To stdout, or to a file that is replaced as a whole or not at all.

    A link stays and what it names is written; a pipe, a device, or the file that stdout or stderr goes to is written
    into.
    """
    for stream in (sys.stdout, sys.stderr):
        if target == STANDARD_STREAM or is_file_of(stream, target):
            stream.write(text)
            stream.flush()
            return
    try:
        mode = _mode_of(target)
        if mode is None or stat.S_ISREG(mode):
            _replace_file(Path(target).resolve(), text, mode)
        else:
            with open(target, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
    except OSError as error:
        raise ForedraftError(f"cannot write {target}: {error.strerror or error}") from error


def check_target(target: str) -> None:
    """Raises ForedraftError where `write_text` could not write, before there is anything to lose."""
    try:
        mode = _mode_of(target)
        is_replaced = mode is None or stat.S_ISREG(mode)
        place = Path(target).resolve().parent if is_replaced else Path(target)
        if not is_replaced and place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.stat(place)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ForedraftError(f"cannot write {target}: {error.strerror or error}") from error


def _mode_of(target: str) -> int | None:
    """None: there is no such file."""
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def is_file_of(stream: IO[str], target: str) -> bool:
    """Whether a standard stream was redirected to this regular file."""
    try:
        status = os.stat(target)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(stream.fileno()))
    except OSError:  # no such file, or no descriptor
        return False


def _replace_file(path: Path, text: str, mode: int | None) -> None:
    """By a rename. mode: of the file that was there; None: there was none, and the umask decides."""
    scratch = path.with_name(f".{secrets.token_hex(8)}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            if mode is not None:
                os.fchmod(descriptor, stat.S_IMODE(mode))
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink()
        raise


def prepare_streams() -> None:
    """Gives the process three streams that can be used without a thought.

    Python leaves out those that were closed at its start. Their descriptors are taken here, before a model file gets
    one: a closed stdout becomes a pipe without a reader, a closed stdin one that cannot be read, a closed stderr the
    null device. A character that stdout's encoding lacks is replaced, and an ASCII stdin is read as UTF-8.
    """
    if sys.stdin is None:
        _take(0, os.open(os.devnull, os.O_WRONLY))
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.close(reader)
        _take(1, writer)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        _take(2, os.open(os.devnull, os.O_WRONLY))
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")


def _take(number: int, descriptor: int) -> None:
    """Moves a descriptor to a number of the standard streams."""
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)


def read_text(source: str) -> str:
    """A text file, or stdin for `-`."""
    name = STDIN_NAME if source == STANDARD_STREAM else source
    try:
        data = sys.stdin.buffer.read() if source == STANDARD_STREAM else Path(source).read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {name}: {error.strerror or error}") from error
    return _decode(data, name)


def read_lines() -> Iterator[str]:
    """The lines of stdin, without their ends."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield _decode(line, f"line {number} of {STDIN_NAME}").rstrip("\r\n")


def _decode(data: bytes, name: str) -> str:
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
