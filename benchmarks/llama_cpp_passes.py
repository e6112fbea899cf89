"""What a pass over several rows costs in llama.cpp, with logits of every row, as its own speculation needs them.

python benchmarks/llama_cpp_passes.py qwen2.5-coder-1.5b
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

from llama_cpp import Llama

from foredraft.models.hub import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,2,4,6,8,16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    counts = [int(n) for n in args.rows.split(",")]
    llama = Llama(
        str(resolve(args.model)), n_ctx=args.context + 64, n_threads=args.threads, n_threads_batch=args.threads,
        logits_all=True, verbose=False,
    )  # fmt: skip
    llama.eval([100 + i % 1000 for i in range(args.context)])
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    for repeat in range(8):
        for n in counts:
            began = perf_counter()
            llama.eval([200 + i for i in range(n)])
            if repeat:  # the first round warms up
                seconds[n].append(perf_counter() - began)
            llama.n_tokens = args.context  # the next pass overwrites these rows
    one = median(seconds[counts[0]])
    for n in counts:
        print(f"{n:3} rows {1e3 * median(seconds[n]):7.1f} ms  {median(seconds[n]) / one:.2f}")


if __name__ == "__main__":
    main()
