"""One table from `foredraft bench --json` files of single workloads, measured one at a time to keep each run short.

for w in chat coding editing summarising maths questions retrieval translation; do
    foredraft bench -m qwen2.5-coder-1.5b -d ngram --workload $w --json $w.json
done
python benchmarks/join_tables.py *.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from foredraft.bench.figures import ALL, Row, Speed, Work, mean_speed
from foredraft.bench.machine import Machine
from foredraft.bench.report import rows_markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    rows = [parse_row(value) for run in runs for value in run["rows"]]
    engines = dict.fromkeys(row.drafter for row in rows)
    rows += [total([row for row in rows if row.drafter == engine]) for engine in engines]
    print(rows_markdown(Machine(**runs[0]["machine"]), " ".join(map(str, args.files)), rows))


def parse_row(value: dict[str, Any]) -> Row:
    def part(kind: type[Any]) -> dict[str, Any]:
        return {field.name: value[field.name] for field in fields(kind) if field.name in value}

    return Row(**part(Row), speed=Speed(**part(Speed)), work=Work(**part(Work)))


def total(rows: list[Row]) -> Row:
    """Over all workloads, each of which weighs the same. What was counted is not in the files run by run."""
    return Row(
        workload=ALL,
        drafter=rows[0].drafter,
        num_prompts=sum(row.num_prompts for row in rows),
        num_identical=sum(row.num_identical for row in rows),
        num_timed=sum(row.num_timed for row in rows),
        num_tokens=sum(row.num_tokens for row in rows),
        speed=mean_speed([row.speed for row in rows]),
        work=Work(None, None, None, (), None, None, None),
    )


if __name__ == "__main__":
    main()
