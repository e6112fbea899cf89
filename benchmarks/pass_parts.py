"""Where the time of a pass goes: the stages of the decoder by rows, beside what memory and arithmetic alone would take.

"read": the stage's weights at the machine's plain reading speed. "compute": its products with weights that lie in a
cache. A stage whose time is near the larger of the two has no more to give.

    python benchmarks/pass_parts.py qwen2.5-coder-1.5b --rows 1,6,16 --context 512
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import cache
from statistics import median

import numpy as np

from foredraft import _native
from foredraft.bench.passes import fill_cache, text_of
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.load import load_model, plan_tensors
from foredraft.models.native import NativeModel
from foredraft.models.packed_cache import PackedTensor

#: The decoder's stages that read weights, by the second last part of a tensor's name.
STAGES = {
    "attn_q": "projections", "attn_k": "projections", "attn_v": "projections", "attn_output": "output",
    "ffn_gate": "gate_up", "ffn_up": "gate_up", "ffn_down": "down", "output": "head",
}  # fmt: skip
#: Parts of a matrix that a cache of the last level holds, and not those before it.
PART_BYTES, NUM_PARTS = 1 << 20, 16
NUM_REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,6")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=_native.default_threads())
    args = parser.parse_args()
    counts = [int(part) for part in args.rows.split(",")]

    file = read_gguf(resolve(args.model))
    model = load_model(file.path, pool=_native.ThreadPool(args.threads))
    tensors = plan_tensors(file, model.architecture)
    read_bytes_s = max(_native.time_reading(1 << 29, args.threads, 5))
    seconds = time_stages(model, counts, args.context)
    compute = {n: compute_seconds(tensors, model.kernel_set, n, args.threads) for n in counts}
    nbytes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        nbytes[stage_of(tensor)] += tensor.nbytes

    print(f"{args.model}, {args.context} tokens of context, plain reading {read_bytes_s / 1e9:.1f} GB/s; milliseconds")
    heads = "".join(f" {n} rows | compute |" for n in counts)
    print(f"| stage | MB | read |{heads}\n|---|---|---|{'---|---|' * len(counts)}")
    for stage in seconds[counts[0]]:
        size = nbytes[stage]
        cells = [f"{size / 1e6:.0f}" if size else "", milliseconds(size / read_bytes_s) if size else ""]
        for n in counts:
            cells += [milliseconds(seconds[n][stage]), milliseconds(compute[n][stage]) if size else ""]
        print(f"| {stage} | {' | '.join(cells)} |")
    total = sum(nbytes.values())
    cells = [f"{total / 1e6:.0f}", milliseconds(total / read_bytes_s)]
    for n in counts:
        cells += [milliseconds(sum(seconds[n].values())), milliseconds(sum(compute[n].values()))]
    print(f"| all | {' | '.join(cells)} |")


def time_stages(model: NativeModel, counts: list[int], context: int) -> dict[int, dict[str, float]]:
    """Median seconds of each stage, for each number of rows; the counts take turns."""
    table = np.arange(-(-(context + max(counts)) // BLOCK_SIZE), dtype=np.int32)
    fill_cache(model, table, context)
    profiles: dict[int, list[dict[str, float]]] = {n: [] for n in counts}
    for _ in range(NUM_REPEATS):
        for n in counts:
            model.forward([Rows(table, context, text_of(model, n), num_logits=n)])
            profiles[n].append(model.profile())
    return {n: {stage: median(p[stage] for p in profiles[n]) for stage in profiles[n][0]} for n in counts}


def compute_seconds(tensors: list[PackedTensor], kernel_set: str, rows: int, threads: int) -> dict[str, float]:
    """Seconds of each stage's products if no weight came from memory: by the speed on a part that a cache holds."""

    @cache
    def per_output(format: str, k: int) -> float:
        n = max(1, PART_BYTES // _native.packed_bytes(format, 16, k)) * 16
        return min(_native.time_matmul(kernel_set, format, n, k, rows, threads, NUM_PARTS, 9)) / n

    seconds: dict[str, float] = defaultdict(float)
    for tensor in tensors:
        seconds[stage_of(tensor)] += tensor.n * per_output(tensor.format, tensor.k)
    return seconds


def stage_of(tensor: PackedTensor) -> str:
    return STAGES[tensor.name.split(".")[-2]]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


if __name__ == "__main__":
    main()
