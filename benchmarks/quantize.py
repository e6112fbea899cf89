"""What rounding a checkpoint's weights on load costs: `--quantize none`, `q8` and `q4` beside Transformers in float32.

    python -m benchmarks.quantize FOLDER ... [--texts N] [--context N]

Every engine reads the same ids, the user's side of the project's workloads, and is asked how likely it thought each
next token: perplexity, the mean Kullback-Leibler divergence KL(Transformers || engine) in nats, and how often the
likeliest token is another one where Transformers' top two differ by more than 0.25. The time of a pass over one row is
the median of passes by turns. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import numpy as np
from tests.models.divergence import Difference, Logits, compare, native_engine

from foredraft.bench.workloads import load_workload
from foredraft.models.base import Rows
from foredraft.models.folder.tokenizer import read_folder_tokenizer
from foredraft.models.gguf import load_core
from foredraft.models.load import Quantize, load_model

WORKLOADS = ("editing", "summarising", "coding", "retrieval", "chat", "maths", "questions", "translation")
TURNS = 40


@dataclass
class Found:
    """Of one engine, over all texts."""

    nll: float = 0.0  # nats, summed
    tokens: int = 0
    difference: Difference = field(default_factory=Difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--texts", type=int, default=len(WORKLOADS), help="so many workloads, one text of each")
    parser.add_argument("--context", type=int, default=512, help="tokens of a text at most")
    args = parser.parse_args()
    print("| model | weights | MB a pass | ms a pass | tokens | perplexity | mean KL, nats | other likeliest token |")
    print("|---|---|---|---|---|---|---|---|")
    for folder in args.folders:
        contexts = read_contexts(folder, args.texts, args.context)
        measure(folder, contexts, args.context)


def read_contexts(folder: Path, num_texts: int, context: int) -> list[list[int]]:
    """Prompts of one workload each, up to the wanted length."""
    tokenizer = read_folder_tokenizer(folder)
    texts = ("\n\n".join(prompt.turns[0] for prompt in load_workload(name)) for name in WORKLOADS[:num_texts])
    return [tokenizer.encode(text, add_special=True)[:context] for text in texts]


def measure(folder: Path, contexts: Sequence[Sequence[int]], context: int) -> None:
    core = load_core()
    pool = core.ThreadPool(core.default_threads())
    models = {
        quantize or "none": load_model(folder, pool=pool, max_model_len=context, quantize=quantize)
        for quantize in (None, *reversed(get_args(Quantize)))
    }
    reference = read_reference(folder)
    found = {name: Found() for name in ("Transformers, float32", *models)}
    for ids in contexts:
        expected = run_reference(reference, ids)
        add(found["Transformers, float32"], expected, expected, ids)
        for name, model in models.items():
            logits = np.concatenate([chunk.copy() for chunk in native_engine(model)(ids)])
            add(found[name], expected, logits, ids)
    times = time_passes(models, contexts[0])
    for name, result in found.items():
        model = models.get(name)
        size = "" if model is None else f"{model.weight_bytes / 1e6:.0f}"
        took = "" if model is None else f"{1e3 * median(times[name]):.1f}"
        diff = result.difference
        row = (folder.name, name, size, took, result.tokens, f"{np.exp(result.nll / result.tokens):.3f}")
        other = f"{diff.other_argmax} of {diff.decided}"
        print(f"| {' | '.join(map(str, row))} | {diff.kl / diff.positions:.5f} | {other} |", flush=True)


def read_reference(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run_reference(model: Any, ids: Sequence[int]) -> Logits:
    """[tokens, vocab]"""
    import torch

    with torch.inference_mode():
        logits: Logits = model(torch.tensor([list(ids)])).logits[0].numpy()
    return logits


def add(found: Found, expected: Logits, logits: Logits, ids: Sequence[int]) -> None:
    """`logits` [tokens, vocab]; row i is about token i + 1."""
    for row, token in zip(logits[:-1], ids[1:], strict=True):
        shifted = row.astype(np.float64) - row.max()
        found.nll += float(np.log(np.exp(shifted).sum()) - shifted[token])
    found.tokens += len(ids) - 1
    found.difference += compare(expected, logits)


def time_passes(models: dict[str, Any], ids: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of passes over one row behind the text, by turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    table = np.arange(-(-len(ids) // 32), dtype=np.int32)
    for _ in range(TURNS):
        for name, model in models.items():
            for last in (False, True):  # the first wakes its weights up after the others
                began = perf_counter()
                model.forward([Rows(table, len(ids) - 1, ids[-1:])])
                if last:
                    times[name].append(perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
