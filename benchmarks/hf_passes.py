"""What a pass of a Transformers model costs, as it is and captured in a CUDA graph.

    python benchmarks/hf_passes.py FOLDER [--dtype bfloat16] [--sequences 1] [--context 1000]

One line for each number of rows a sequence: the best and the median of some passes, which take turns. Without a GPU
only the first two columns are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.hf.load import HFOptions, load_hf_model
from foredraft.models.hf.model import HFModel

NUM_ROWS = (1, 4, 8, 17)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000, help="tokens before the rows of each sequence")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    models = {"as it is": load(options, enforce_eager=True), "captured": load(options, enforce_eager=False)}
    if not models["captured"].replays:
        del models["captured"]
    print(f"{describe(options)}\n")
    print("| rows a sequence |" + "".join(f" {name}: best ms | median |" for name in models))
    print("|---|" + "---|---|" * len(models))
    for num_rows in NUM_ROWS:
        passes = [make_pass(model, num_rows, options) for model in models.values()]
        print(f"| {num_rows} |" + "".join(f" {min(s):.2f} | {median(s):.2f} |" for s in take_turns(passes, options)))


def load(options: argparse.Namespace, *, enforce_eager: bool) -> HFModel:
    length = options.context + max(NUM_ROWS)
    how = HFOptions(dtype=options.dtype, enforce_eager=enforce_eager)
    num_tokens = options.sequences * (length + BLOCK_SIZE)
    return load_hf_model(
        options.folder, how, max_model_len=length, max_num_seqs=options.sequences, kv_cache_tokens=num_tokens
    )


def make_pass(model: HFModel, num_rows: int, options: argparse.Namespace) -> Callable[[], object]:
    """The context is whatever the cache holds."""
    per_sequence = model.num_blocks // options.sequences
    tables = [np.arange(per_sequence, dtype=np.int32) + i * per_sequence for i in range(options.sequences)]
    batch = [Rows(table, options.context, [5] * num_rows, num_logits=num_rows) for table in tables]
    return lambda: model.forward(batch)  # with the logits on the CPU, or still on their way there


def take_turns(passes: list[Callable[[], object]], options: argparse.Namespace) -> list[list[float]]:
    """Milliseconds of each, after two passes that do not count."""
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(2 + options.repeats):
        for run, own in zip(passes, times, strict=True):
            began = perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            own.append(1000 * (perf_counter() - began))
    return [own[2:] for own in times]


def describe(options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"{options.folder}, {options.dtype}, {options.sequences} x {options.context} tokens; {device}"


if __name__ == "__main__":
    main()
