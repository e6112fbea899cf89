"""Bars for downloads and for the repacking of a model's first start."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from foredraft.cli.console import make_console, note

if TYPE_CHECKING:
    from rich import progress


class Progress:
    """A bar on stderr for each thing that goes on; a line for each where stderr is no terminal.

    Called with what goes on, and how many of how many bytes are done.
    """

    def __init__(self) -> None:
        self._bars: progress.Progress | None = None
        self._tasks: dict[str, progress.TaskID | None] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._begin(what, total)
        task = self._tasks[what]
        if self._bars is not None and task is not None:
            self._bars.update(task, completed=done, total=total)

    def _begin(self, what: str, total: int) -> progress.TaskID | None:
        if not sys.stderr.isatty():
            note(f"foredraft: {what}")
            return None
        if self._bars is None:
            self._bars = _make_bars()
            self._bars.start()
        return self._bars.add_task(what, total=total)


def _make_bars() -> progress.Progress:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=make_console(sys.stderr),
        transient=True,
    )
