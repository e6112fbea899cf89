"""`foredraft bench`: plain against speculative against peers. `foredraft bench passes`: what a pass costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foredraft.cli.console import STANDARD_STREAM, make_console, note, write_json, write_text
from foredraft.cli.options import EngineOptions, debug_option, engine_options, json_option, make_llm, parse_target
from foredraft.cli.run_bar import RunBar
from foredraft.types import MAX_THREADS

if TYPE_CHECKING:
    from rich.table import Table

    from foredraft.bench.figures import Row
    from foredraft.bench.machine import Meter
    from foredraft.bench.peers import PeerSettings
    from foredraft.engine.llm import LLM

PLAIN = "none"
#: Context of peers, which take the memory for it at once, unless -c says otherwise.
PEER_CONTEXT = 8192
#: Of tables in files.
LINE_WIDTH = 120


class BenchCommand(click.Command):
    """`bench`, and under it `bench passes`, which has other flags."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["passes"]:
            return passes.make_context(f"{info_name} passes", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def parse_names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    return split_names(value or "")


def split_names(text: str) -> list[str]:
    """`a,b`, each once."""
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def parse_numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not of the form 1,2,4", ctx, param)
    return sorted({int(part) for part in parts})


markdown_option = click.option(
    "--markdown", "markdown_target", metavar="FILE", callback=parse_target, help="Write the table as Markdown."
)


@click.command(
    "bench", cls=BenchCommand, epilog="`foredraft bench passes --help`: measure what a pass over several rows costs."
)
@engine_options
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME|FILE.jsonl",
    help="chat, coding, editing, summarising, maths, questions, retrieval, translation or all; may be repeated. "
    "[default: all]",
)
@click.option("-n", "--max-tokens", type=click.IntRange(1), default=192, show_default=True, help="Longest answer.")
@click.option("--limit", type=click.IntRange(1), help="Prompts of each workload. [default: all]")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Repeats of every prompt.")
@click.option("--peers", callback=parse_names, metavar="NAME,...", help="Other engines: llama.cpp, transformers.")
@json_option
@markdown_option
@debug_option
def command(
    options: EngineOptions,
    workloads: Sequence[str],
    max_tokens: int,
    limit: int | None,
    runs: int,
    peers: list[str],
    json_target: str | None,
    markdown_target: str | None,
) -> None:
    """Measure drafters (-d A,B) and peers against plain decoding: same prompts, same run, greedy."""
    from foredraft.bench.figures import Sample, summarise
    from foredraft.bench.library import LibraryEngine
    from foredraft.bench.machine import Meter, command_line, describe_machine, find_energy_counters
    from foredraft.bench.measure import Engine, count_runs, measure
    from foredraft.bench.peers import check_peers, make_peer
    from foredraft.bench.report import bench_json, rows_markdown, rows_table
    from foredraft.bench.workloads import load_workload
    from foredraft.cli.progress import Progress

    packages = check_peers(peers)
    prompts = [prompt for name in workloads or ("all",) for prompt in load_workload(name, limit)]
    machine = describe_machine(options.threads, packages)
    meter = Meter(find_energy_counters())
    drafters = [PLAIN, *(name for name in split_names(options.drafter) if name != PLAIN)]
    # No prefix is kept from one prompt to the next, so that each is computed and timed.
    alone = replace(options, max_num_seqs=1, enable_prefix_caching=False)
    with ExitStack() as stack:
        with Progress() as progress:
            llms = [stack.enter_context(make_llm(replace(alone, drafter=drafter), progress)) for drafter in drafters]
        others = [make_peer(name, peer_settings(options, llms[0], machine.threads, meter)) for name in peers]
        engines: list[Engine] = [LibraryEngine(name, llm, meter) for name, llm in zip(drafters, llms, strict=True)]
        engines += others
        bar = stack.enter_context(RunBar(count_runs(engines, prompts, runs)))

        def on_sample(sample: Sample) -> None:
            bar.advance(sample.workload, sample.engine)

        samples = measure(
            engines, prompts, llms[0].render_chat, max_tokens=max_tokens, num_repeats=runs, on_sample=on_sample
        )
    rows = summarise(samples, PLAIN)
    show(rows_table(rows), json_target)
    warn_of_differences(rows, drafters)
    explain_missing_speeds(rows)
    if markdown_target is not None:
        write_text(rows_markdown(machine, command_line(), rows), markdown_target)
    if json_target is not None:
        settings = {
            "model": options.model,
            "max_tokens": max_tokens,
            "runs": runs,
            "temperature": 0,
            "peers": {peer.name: peer.description for peer in others},
        }
        write_json(bench_json(machine, settings, rows), json_target)


@click.command("passes")
@click.option("-m", "--model", required=True, help="A .gguf file, a catalogue name, or a hub id org/repo[:file.gguf].")
@click.option("--rows", default="1,2,4,6,8,16", show_default=True, callback=parse_numbers, help="Rows of a pass.")
@click.option(
    "--context", "contexts", default="512,4096", show_default=True, callback=parse_numbers, help="Tokens before."
)
@click.option("--runs", type=click.IntRange(1), default=15, show_default=True, help="Repeats of every pass.")
@click.option("-t", "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads. [default: processors we may use]")
@click.option("--kv-cache-dtype", type=click.Choice(("f16", "f32")), default="f16", show_default=True)
@json_option
@markdown_option
@debug_option
def passes(
    model: str,
    rows: list[int],
    contexts: list[int],
    runs: int,
    threads: int | None,
    kv_cache_dtype: Any,
    json_target: str | None,
    markdown_target: str | None,
) -> None:
    """Time passes over several rows, as verification makes them, against a pass over one."""
    from foredraft.bench.machine import Meter, command_line, describe_machine
    from foredraft.bench.passes import measure_passes
    from foredraft.bench.report import passes_json, passes_markdown, passes_table
    from foredraft.cli.progress import Progress
    from foredraft.engine.llm import LLM

    machine = describe_machine(threads)
    with Progress() as progress:
        llm = LLM(model, PLAIN, threads=threads, kv_cache_dtype=kv_cache_dtype, max_num_seqs=1, progress=progress)
    with llm, RunBar(len(contexts) * runs * len({1, *rows})) as bar:
        costs = measure_passes(
            llm.model,
            rows,
            contexts,
            num_repeats=runs,
            read_gb_per_s=machine.read_gb_per_s,
            meter=Meter(),
            on_pass=lambda context, count: bar.advance(f"context {context}", f"{count} rows"),
        )
    show(passes_table(costs), json_target)
    if markdown_target is not None:
        write_text(passes_markdown(machine, command_line(), costs), markdown_target)
    if json_target is not None:
        settings = {"model": model, "runs": runs, "kv_cache_dtype": kv_cache_dtype}
        write_json(passes_json(machine, settings, costs), json_target)


def peer_settings(options: EngineOptions, llm: LLM, threads: int, meter: Meter) -> PeerSettings:
    from foredraft.bench.peers import PeerSettings
    from foredraft.models.hub import resolve

    length = min(llm.model.max_model_len, options.max_model_len or PEER_CONTEXT)
    return PeerSettings(resolve(options.model), threads, length, llm.tokenizer.eos_ids, meter)


def show(table: Table, json_target: str | None) -> None:
    """To stdout, or to stderr if a JSON object is on stdout; as wide as it likes where that is no terminal."""
    stream = sys.stderr if json_target == STANDARD_STREAM else sys.stdout
    console = make_console(stream)
    if not stream.isatty():
        console.width = LINE_WIDTH
    console.print(table)


def warn_of_differences(rows: Sequence[Row], drafters: Sequence[str]) -> None:
    """Peers round differently and may differ; a drafter must not."""
    for row in rows:
        if row.drafter in drafters and not row.identical:
            count = row.num_prompts - row.num_identical
            note(f"foredraft: warning: {row.drafter} differs from plain decoding on {count} prompts of {row.workload}")


def explain_missing_speeds(rows: Sequence[Row]) -> None:
    """Says why a workload has no speeds."""
    from foredraft.bench.figures import ALL, MIN_TIMED_TOKENS

    untimed = dict.fromkeys(row.workload for row in rows if row.num_timed == 0 and row.workload != ALL)
    if untimed:
        note(
            f"foredraft: no speeds for {', '.join(untimed)}: an answer is timed if it has at least {MIN_TIMED_TOKENS} "
            "tokens after those of its first pass; raise -n, or take prompts with longer answers"
        )
