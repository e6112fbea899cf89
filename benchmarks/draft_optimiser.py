"""What requantising a draft and cutting its output head are worth: acceptance and speed by kind of task.

The settings take turns on every prompt, so that whatever else the machine does slows all of them.

    python benchmarks/draft_optimiser.py qwen2.5-coder-1.5b qwen2.5-coder-0.5b --limit 2
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import geometric_mean, mean
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import GROUPS, load_workload

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {"draft_quantize": "none", "draft_vocab": "full"},
    "q4": {"draft_quantize": "q4", "draft_vocab": "full"},
    "q4, 64k": {"draft_quantize": "q4", "draft_vocab": 65_536},
    "q4, 32k": {"draft_quantize": "q4", "draft_vocab": 32_768},
    "q4, 16k": {"draft_quantize": "q4", "draft_vocab": 16_384},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    llms = {name: LLM(args.target, f"model:{args.draft}", max_model_len=4096, **s) for name, s in SETTINGS.items()}
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for prompt in load_workload("all", args.limit):
        for name, llm in llms.items():
            out = llm.chat([{"role": "user", "content": prompt.turns[0]}], params)[0]
            speeds[prompt.category, name].append(out.timing.tokens_per_s)
            rates[prompt.category, name].append(out.speculation.acceptance_rate)
    print("| task |", " | ".join(SETTINGS), "|\n" + "|---" * (1 + len(SETTINGS)) + "|")
    for group in GROUPS:
        cells = [f"{mean(rates[group, n]):.2f}, {geometric_mean(speeds[group, n]):.1f}" for n in SETTINGS]
        print(f"| {group} |", " | ".join(cells), "|")
    every = [geometric_mean([v for g in GROUPS for v in speeds[g, n]]) for n in SETTINGS]
    print("| all |", " | ".join(f"{speed:.1f} ({speed / every[0]:.2f} x)" for speed in every), "|")


if __name__ == "__main__":
    main()
