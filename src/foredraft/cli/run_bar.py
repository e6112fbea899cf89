"""The bar of a measurement: on a terminal how far it is and how long it will take, elsewhere a line a workload."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from foredraft.cli.console import make_console, note

if TYPE_CHECKING:
    from rich import progress


class RunBar:
    """Counts steps of which there are `total`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._group = ""
        self._bars: progress.Progress | None = None

    def __enter__(self) -> RunBar:
        if sys.stderr.isatty():
            from rich import progress

            columns = (
                "{task.description}",
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bars = progress.Progress(*columns, console=make_console(sys.stderr), transient=True)
            self._bars.add_task("warming up", total=self._total)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, group: str, detail: str) -> None:
        """A step is done. `group`: the part of the whole it belongs to; `detail`: which one it was."""
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], advance=1, description=f"{group} {detail}")
        elif group != self._group:
            note(f"foredraft: {group} ({self._done} of {self._total} runs done)")
        self._done += 1
        self._group = group
