"""`foredraft check-pair`: whether one model can draft for another, how, and what it has to reach to pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from foredraft.cli.console import write_answer, write_json
from foredraft.cli.options import debug_option, json_option
from foredraft.cli.progress import Progress
from foredraft.types import MAX_THREADS

if TYPE_CHECKING:
    from foredraft.bench.pairs import Prospects
    from foredraft.drafters.pair import Pair


@click.command("check-pair")
@click.argument("target", metavar="TARGET")
@click.argument("draft", metavar="DRAFT")
@click.option("-t", "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads. [default: processors we may use]")
@json_option
@debug_option
def command(target: str, draft: str, threads: int | None, json_target: str | None) -> int:
    """Tell whether DRAFT can draft for TARGET natively, across vocabularies or not at all, and why.

    Measures what a pass of both costs on this machine, and tells how often drafts have to be right to pay. Ends with 1
    where the pair is impossible.
    """
    pair, warning, prospects = examine(target, draft, threads)
    if json_target is None:
        write_answer(as_text(pair, warning, prospects))
    else:
        write_json(as_object(pair, warning, prospects), json_target)
    return 1 if pair.kind == "impossible" else 0


def examine(target: str, draft: str, threads: int | None) -> tuple[Pair, str | None, Prospects | None]:
    """What the tokenizers say, a word on the draft's size, and what was measured."""
    from foredraft.bench.pairs import measure_pair, weigh
    from foredraft.drafters.pair import compare_tokenizers, warn_of_size
    from foredraft.engine.llm import AUTO_DRAFT_QUANTIZE
    from foredraft.engine.loader import LoadOptions, ModelLoader

    with Progress() as progress:
        loader = ModelLoader(LoadOptions(threads=threads, max_num_seqs=1), progress)
        tokenizers = loader.read_tokenizer(target), loader.read_tokenizer(draft)
        pair = compare_tokenizers(target, tokenizers[0], draft, tokenizers[1])
        if pair.kind == "impossible":
            return pair, None, None
        models = loader.load_target(target, None), loader.load_draft(draft, AUTO_DRAFT_QUANTIZE)
    costs = measure_pair(models[0], tokenizers[0], models[1], tokenizers[1])
    return pair, warn_of_size(*models), weigh(costs)


def as_text(pair: Pair, warning: str | None, prospects: Prospects | None) -> str:
    lines = [str(pair)]
    if warning is not None:
        lines.append(f"warning: {warning}")
    if prospects is not None:
        lines += describe(prospects)
    return "".join(f"{line}\n" for line in lines)


def describe(prospects: Prospects) -> list[str]:
    from foredraft.bench.pairs import USUAL_ACCEPTANCE

    costs = (
        f"a pass takes {prospects.target_ms:.1f} ms of the target and {prospects.draft_ms:.1f} ms of the draft: "
        f"{prospects.cost_ratio:.1f} times as much (20 to 30 is the rule of thumb)"
    )
    if prospects.draft_tokens_per_token != 1:
        costs += f"; the draft needs {prospects.draft_tokens_per_token:.2f} of its tokens for one of the target's"
    if prospects.break_even_acceptance is None:
        return [costs, "it cannot pay here: with every draft right, plain decoding is still faster"]
    even = (
        f"it breaks even when {prospects.break_even_acceptance:.0%} of the drafted tokens are accepted "
        f"(drafts of {prospects.break_even_tokens})"
    )
    if prospects.speedup_tokens:
        return [
            costs,
            f"{even}; at {USUAL_ACCEPTANCE:.0%} expect {prospects.speedup:.2f} times the speed of plain decoding "
            f"(drafts of {prospects.speedup_tokens})",
        ]
    return [costs, f"{even}; {USUAL_ACCEPTANCE:.0%} would not pay"]


def as_object(pair: Pair, warning: str | None, prospects: Prospects | None) -> dict[str, Any]:
    return {
        "target": pair.target,
        "draft": pair.draft,
        "kind": pair.kind,
        "reason": pair.reason,
        "shared_tokens": pair.share,
        "warning": warning,
        **({} if prospects is None else asdict(prospects)),
    }
