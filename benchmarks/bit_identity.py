"""Is the output the same with and without speculation? Counts differing outputs on a real model.

Every setting (drafter, draft length, batch, threads, prompt chunk, kernel set) is varied on its own and together, and
each output's token ids are compared with plain decoding of one sequence at a time. Greedy, or sampled with a seed.

    python benchmarks/bit_identity.py smollm2-135m --prompts 50 --tokens 200
    python benchmarks/bit_identity.py qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --prompts 50 --tokens 200
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import GROUPS, load_group


@dataclass(frozen=True)
class Setting:
    drafter: str = "none"
    k: int = 4
    batch: int = 1
    threads: int = 2
    chunk: int = 512
    kernels: str | None = None
    adaptive: bool = False


def settings(draft: str | None, kernel_sets: list[str]) -> list[Setting]:
    """Plain decoding first; then each factor, with the others at values that differ too."""
    specs = ["ngram"] if draft is None else ["ngram", f"model:{draft}", f"ngram+model:{draft}"]
    plain = Setting()
    rows = [plain, replace(plain, batch=4), replace(plain, batch=4, threads=1), replace(plain, batch=4, chunk=7)]
    for i, k in enumerate(range(1, 9)):
        for j, spec in enumerate(specs):
            rows.append(Setting(spec, k, batch=4, threads=1 + (i + j) % 2, chunk=(7, 512)[i % 2]))
    rows += [Setting(spec, 4, batch=1) for spec in specs]
    rows += [Setting(specs[-1], 8, batch=4, adaptive=True)]
    rows += [Setting(specs[-1], 4, batch=4, kernels=name) for name in kernel_sets]
    return rows


def run(model: str, setting: Setting, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {} if setting.kernels is None else {"kernels": setting.kernels}
    options |= {"num_speculative_tokens": setting.k, "adaptive": setting.adaptive, "threads": setting.threads}
    options |= {"max_num_seqs": setting.batch, "max_num_batched_tokens": setting.chunk, "enable_prefix_caching": False}
    with LLM(model, setting.drafter, max_model_len=4096, **options) as llm:
        return [tuple(c.token_ids) for c in llm.generate(prompts, params)]


def read_prompts(model: str, count: int, max_tokens: int) -> list[list[int]]:
    """Chats from every workload in turn (plain text where the model has no template), cut to `max_tokens`."""
    texts = [p.turns[0] for group in zip(*(load_group(g) for g in GROUPS), strict=False) for p in group][:count]
    with LLM(model, "none", max_model_len=4096) as llm:
        if llm.tokenizer.chat_template is None:
            return [llm.tokenizer.encode(t, add_special=True)[:max_tokens] for t in texts]
        return [llm.render_chat([{"role": "user", "content": t}])[-max_tokens:] for t in texts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kernels", default="", help="kernel sets to compare, by comma")
    parser.add_argument("--quick", action="store_true", help="plain, and k = 4 only")
    args = parser.parse_args()
    params = SamplingParams(
        temperature=args.temperature, seed=7 if args.temperature else None, max_tokens=args.tokens, ignore_eos=True
    )
    prompts = read_prompts(args.model, args.prompts, args.prompt_tokens)
    reference: list[tuple[int, ...]] = []
    num_different = 0
    print(f"{args.model}: {len(prompts)} prompts x {args.tokens} tokens, temperature {args.temperature}")
    columns = ("drafter", "k", "batch", "threads", "chunk", "kernels", "adaptive", "outputs that differ", "s")
    print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")
    for setting in settings(args.draft, [k for k in args.kernels.split(",") if k]):
        if args.quick and setting.drafter != "none" and setting.k != 4:
            continue
        began = perf_counter()
        outputs = run(args.model, setting, prompts, params)
        reference = reference or outputs
        different = sum(a != b for a, b in zip(outputs, reference, strict=True))
        num_different += different
        k = "" if setting.drafter == "none" else setting.k
        cells = (setting.drafter, k, setting.batch, setting.threads, setting.chunk, setting.kernels or "default")
        print(
            "|", *(f"{c} |" for c in (*cells, setting.adaptive, different, round(perf_counter() - began))), flush=True
        )
    print(f"\n{num_different} outputs differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
