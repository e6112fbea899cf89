"""What a round of decoding spends outside the decoders: planning, drafting, verifying, text, Python itself.

A round is the time from one chunk of the stream to the next. Passes of the target and of a draft model are timed by
the core itself, from inside; all else counts as "between", the core's own sampling included.

    python benchmarks/between_passes.py qwen2.5-coder-1.5b none,ngram,ngram+model:qwen2.5-coder-0.5b
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import load_workload
from foredraft.models.base import Rows
from foredraft.models.native import NativeModel


class PassClock:
    """Adds up what the core says its passes took, of every model in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        forward = NativeModel.forward

        def timed(model: NativeModel, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> Any:
            logits = forward(model, batch, hidden_layers)
            self.seconds += sum(model.profile().values())
            return logits

        NativeModel.forward = timed  # type: ignore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", help="several are separated by commas")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    clock = PassClock()
    print("| drafter | rounds | a round, ms | between passes, ms | 90 % of rounds below | share |")
    print("|---|---|---|---|---|---|")
    for drafter in args.drafters.split(","):
        with LLM(args.model, drafter, max_model_len=4096, enable_prefix_caching=False) as llm:
            rounds, between = time_rounds(llm, clock, args.tokens)
        share = sum(between) / sum(rounds)
        print(
            f"| {drafter} | {len(rounds)} | {1e3 * median(rounds):.2f} | {1e3 * median(between):.3f} | "
            f"{1e3 * quantiles(between, n=10)[-1]:.3f} | {share:.1%} |",
            flush=True,
        )


def time_rounds(llm: LLM, clock: PassClock, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of every round after the prompt's, and the part of it outside passes: one prompt of each kind."""
    rounds, between = [], []
    for prompt in load_workload("all", 1):
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        last: tuple[float, float] | None = None
        for _ in llm.stream_chat([{"role": "user", "content": prompt.turns[0]}], params):
            now = perf_counter(), clock.seconds
            if last is not None:
                rounds.append(now[0] - last[0])
                between.append(rounds[-1] - (now[1] - last[1]))
            last = now
    return rounds, between


if __name__ == "__main__":
    main()
