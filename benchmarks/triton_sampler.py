"""What verification takes on a GPU: the Triton sampler, the reference on the same tensors, and the C++ one on the CPU.

Milliseconds from the logits on the GPU to the verdicts on the host, median of many; the C++ sampler's include bringing
the logits there. Needs a GPU: elsewhere Triton's kernels run in an interpreter, whose times tell nothing.

    python benchmarks/triton_sampler.py --vocab 151936 --sequences 1,8 --tokens 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from foredraft.algo.sampler import Check, SamplerKind, make_sampler, verify_all
from foredraft.types import Draft, SamplingParams

REQUESTS = {
    "greedy": (SamplingParams(temperature=0), False),
    "seed": (SamplingParams(seed=1), False),
    "seed, top-p 0.9": (SamplingParams(seed=1, top_p=0.9), False),
    "drawn draft": (SamplingParams(), True),
    "drawn draft, top-k 20, top-p 0.8": (SamplingParams(temperature=0.7, top_k=20, top_p=0.8), True),
}
KINDS: tuple[SamplerKind, ...] = ("triton", "array", "native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--tokens", type=int, default=4, help="of each draft")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is here, and this measures kernels on one")

    print(f"{torch.cuda.get_device_name()}, vocabulary of {args.vocab}, drafts of {args.tokens}; milliseconds")
    print(f"| request | sequences | {' | '.join(KINDS)} |\n|---|---|{'---|' * len(KINDS)}")
    for name, (params, is_drawn) in REQUESTS.items():
        for count in map(int, args.sequences.split(",")):
            times = [time_verification(kind, params, is_drawn, count, args) for kind in KINDS]
            print(f"| {name} | {count} | {' | '.join(f'{1e3 * seconds:.3f}' for seconds in times)} |")


def time_verification(
    kind: SamplerKind, params: SamplingParams, is_drawn: bool, count: int, args: argparse.Namespace
) -> float:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(count, 1 + args.tokens, args.vocab, device="cuda", generator=generator) * 3
    probs = torch.softmax(rows[:, :-1] + 0.3 * torch.randn_like(rows[:, :-1]), dim=-1)
    tokens = [[int(t) for t in torch.multinomial(law, 1)[:, 0]] for law in probs]
    samplers = [
        make_sampler(params, vocab_size=args.vocab, prompt=[1], seed=i, kind=kind, device="cuda") for i in range(count)
    ]

    def verify() -> None:
        logits = rows.cpu().numpy() if kind == "native" else rows
        laws = probs.cpu().numpy() if kind == "native" else probs
        checks = [
            Check(sampler, logits[i], Draft(tokens=tokens[i], probs=laws[i] if is_drawn else None))
            for i, sampler in enumerate(samplers)
        ]
        verify_all(checks)

    return median_seconds(verify, args.repeats)


def median_seconds(run: Callable[[], None], repeats: int) -> float:
    run()  # compiles the kernels
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    main()
