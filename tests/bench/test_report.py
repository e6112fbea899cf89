"""What the JSON and the tables hold."""

import io
import json

import pytest
from rich.console import Console

from foredraft.bench.figures import summarise
from foredraft.bench.machine import Machine
from foredraft.bench.passes import pass_cost
from foredraft.bench.report import bench_json, passes_json, passes_markdown, passes_table, rows_markdown, rows_table
from tests.bench.traces import run, sample, speculation

MACHINE = Machine("Example 9000", 8, 2, "avx2", 33.3, 16.0, "Linux 6", False, {"python": "3.12"})
SAMPLES = [
    sample("none", run()),
    sample("ngram", run(decode_s=0.5, speculation=speculation(2, 8, (2, 1), num_passes=5))),
]
ROWS = summarise(SAMPLES, "none")
COSTS = [pass_cost(4, 512, 0.04, 0.02, weight_bytes=10**9, read_gb_per_s=50.0)]


def test_bench_json_has_the_promised_fields() -> None:
    value = json.loads(json.dumps(bench_json(MACHINE, {"model": "m"}, ROWS)))
    assert value["machine"]["cpu"] == "Example 9000"
    row = value["rows"][1]
    assert (row["workload"], row["drafter"], row["identical"]) == ("w", "ngram", True)
    speeds = [row[name] for name in ("tokens_per_s", "plain_tokens_per_s", "speedup")]
    assert speeds == pytest.approx([20.0, 10.0, 2.0])
    assert (row["mean_acceptance_length"], row["accepted_per_position"]) == (2.5, [2, 1])
    assert row["joules_per_token"] is None


def test_passes_json_has_the_promised_fields() -> None:
    value = json.loads(json.dumps(passes_json(MACHINE, {}, COSTS)))
    promised = {"rows": 4, "context": 512, "ms": 40.0, "ratio": 2.0, "gb_per_s": 25.0, "bandwidth_share": 0.5}
    assert value["passes"] == [promised]


def test_tables_leave_out_what_was_not_measured() -> None:
    text = render(rows_table(ROWS))
    assert "speed-up" in text
    assert "2.00" in text
    assert "J/token" not in text
    assert "50%" in render(passes_table(COSTS))


def render(table: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_pages_name_the_machine_and_the_command() -> None:
    page = rows_markdown(MACHINE, "foredraft bench -m m", ROWS)
    assert page.startswith("`foredraft bench -m m`\n\nExample 9000, 2 of 8 processors")
    header, rule, *lines = page.splitlines()[4:]
    assert {line.count("|") for line in (header, rule, *lines)} == {header.count("|")}
    assert len(lines) == 2
    assert "| 512 | 4 | 40.00 | 2.00 |" in passes_markdown(MACHINE, "x", COSTS)
