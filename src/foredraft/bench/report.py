"""Figures for people and for programs: a table on the terminal, a JSON object, a page for `benchmarks/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foredraft.bench.figures import Row
from foredraft.bench.machine import Machine
from foredraft.bench.passes import PassCost

if TYPE_CHECKING:
    from rich.table import Table

_ROW_HEADER = (
    "workload", "drafter", "prompts", "tokens/s", "speed-up", "of repeats", "spread", "identical", "acceptance",
    "tokens/pass", "prompt tok/s", "CPU ms/token", "J/token",
)  # fmt: skip
_TERMINAL = ("workload", "drafter", "tokens/s", "speed-up", "of repeats", "identical", "acceptance", "J/token")
_PASS_HEADER = ("context", "rows", "ms", "T(M)/T(1)", "GB/s", "of bandwidth")


def bench_json(machine: Machine, settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """`bench --json`."""
    return {"machine": asdict(machine), "settings": dict(settings), "rows": [row_json(row) for row in rows]}


def row_json(row: Row) -> dict[str, Any]:
    """A row, flat."""
    return {
        "workload": row.workload,
        "drafter": row.drafter,
        **asdict(row.speed),
        "identical": row.identical,
        "num_identical": row.num_identical,
        "num_prompts": row.num_prompts,
        "num_timed": row.num_timed,
        "num_tokens": row.num_tokens,
        **asdict(row.work),
    }


def passes_json(machine: Machine, settings: Mapping[str, Any], costs: Sequence[PassCost]) -> dict[str, Any]:
    """`bench passes --json`."""
    return {"machine": asdict(machine), "settings": dict(settings), "passes": [asdict(cost) for cost in costs]}


def row_cells(row: Row) -> list[str]:
    speed, work = row.speed, row.work
    low, high = number(speed.speedup_min, ".2f"), number(speed.speedup_max, ".2f")
    identical = "yes" if row.identical else f"{row.num_identical} of {row.num_prompts}"
    return [
        row.workload,
        row.drafter,
        str(row.num_prompts),
        number(speed.tokens_per_s, ".1f"),
        number(speed.speedup, ".2f"),
        "" if low == high else f"{low} .. {high}",
        number(speed.spread, ".1%"),
        identical,
        number(work.mean_acceptance_length, ".2f"),
        number(work.tokens_per_pass, ".2f"),
        number(work.prefill_tokens_per_s, ".0f"),
        number(None if work.cpu_s_per_token is None else 1e3 * work.cpu_s_per_token, ".1f"),
        number(work.joules_per_token, ".2f"),
    ]


def pass_cells(cost: PassCost) -> list[str]:
    figures = (f"{cost.ms:.2f}", f"{cost.ratio:.2f}", f"{cost.gb_per_s:.1f}", f"{cost.bandwidth_share:.0%}")
    return [str(cost.context), str(cost.rows), *figures]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def machine_line(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{machine.cpu}, {machine.threads} of {machine.num_cpus} processors, {machine.kernel_set}, "
        f"{machine.read_gb_per_s:.1f} GB/s read, {machine.memory_gb:.0f} GB, {machine.system}; {versions}"
    )


def rows_table(rows: Sequence[Row]) -> Table:
    """What fits on a terminal; the page and the JSON object have the rest."""
    kept = [_ROW_HEADER.index(name) for name in _TERMINAL]
    return _table(_TERMINAL, [[cells[i] for i in kept] for cells in map(row_cells, rows)], num_names=2)


def passes_table(costs: Sequence[PassCost]) -> Table:
    return _table(_PASS_HEADER, [pass_cells(cost) for cost in costs], num_names=0)


def rows_markdown(machine: Machine, command: str, rows: Sequence[Row]) -> str:
    return _page(machine, command, _ROW_HEADER, [row_cells(row) for row in rows])


def passes_markdown(machine: Machine, command: str, costs: Sequence[PassCost]) -> str:
    return _page(machine, command, _PASS_HEADER, [pass_cells(cost) for cost in costs])


def _table(header: Sequence[str], cells: Sequence[Sequence[str]], num_names: int) -> Table:
    """Columns in which no line has anything are left out."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kept = _used_columns(cells)
    for i in kept:
        table.add_column(
            header[i], justify="left" if i < num_names else "right", no_wrap=header[i] != "drafter", overflow="fold"
        )
    for line in cells:
        table.add_row(*(line[i] for i in kept))
    return table


def _page(machine: Machine, command: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    kept = _used_columns(cells)
    lines = [[header[i] for i in kept], ["---"] * len(kept), *([line[i] for i in kept] for line in cells)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"`{command}`\n\n{machine_line(machine)}\n\n{table}\n"


def _used_columns(cells: Sequence[Sequence[str]]) -> list[int]:
    return [i for i, column in enumerate(zip(*cells, strict=True)) if any(column)]
