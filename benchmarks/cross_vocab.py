"""Drafts across tokenizers on real weights: are the texts plain decoding's, and how many tokens does a pass bring?

Every pair answers the same prompts greedily, sampled and sampled with a seed, by its text and by its law on shared
tokens. Greedy and seeded texts are compared token for token.

    python benchmarks/cross_vocab.py qwen2.5-coder-1.5b:smollm2-135m gemma3-270m:smollm2-135m --prompts 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import GROUPS, load_group
from foredraft.types import Completion

COLUMNS = "target|draft|way|temperature|seed|outputs|differ|drafted|accepted|tokens a pass|tokens/s|plain tokens/s"


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """The first prompts of each workload in turn; their last 200 tokens."""
    texts = [p.turns[0] for group in zip(*(load_group(g) for g in GROUPS), strict=False) for p in group][:count]
    if llm.tokenizer.chat_template is None:
        return [llm.tokenizer.encode(text, add_special=True)[:200] for text in texts]
    return [llm.render_chat([{"role": "user", "content": text}])[-200:] for text in texts]


def speed(outs: Sequence[Completion]) -> float:
    """Tokens a second of decoding, one answer at a time."""
    return sum(len(out.token_ids) - 1 for out in outs) / sum(out.timing.decode_s for out in outs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="TARGET:DRAFT")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=4, help="draft length")
    args = parser.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    sampled = replace(greedy, temperature=0.8)
    settings = [greedy, sampled, replace(sampled, seed=7)]
    options = {"max_model_len": 1024, "max_num_seqs": 1, "enable_prefix_caching": False}
    print("|", COLUMNS.replace("|", " | "), "|\n" + "|---" * len(COLUMNS.split("|")) + "|", flush=True)
    num_different = 0
    for pair in args.pairs:
        target, _, draft = pair.partition(":")
        with LLM(target, "none", **options) as llm:
            texts = prompts(llm, args.prompts)
            plain = [llm.generate(texts, params) for params in settings]
        for way in ("text", "tli"):
            with LLM(
                target,
                f"model:{draft}",
                cross_vocab=way,
                num_speculative_tokens=args.length,
                adaptive=False,
                **options,
            ) as llm:
                for params, expected in zip(settings, plain, strict=True):
                    outs = llm.generate(texts, params)
                    is_fixed = params.is_coupled
                    differ = sum(a.token_ids != b.token_ids for a, b in zip(outs, expected, strict=True))
                    num_different += differ if is_fixed else 0
                    stats = [out.speculation for out in outs]
                    per_pass = sum(len(o.token_ids) - 1 for o in outs) / sum(s.num_passes for s in stats)
                    cells = [target, draft, way, params.temperature, params.seed or "", len(outs)]
                    cells += [differ if is_fixed else "", sum(s.num_draft_tokens for s in stats)]
                    cells += [sum(s.num_accepted_tokens for s in stats), f"{per_pass:.2f}"]
                    cells += [f"{speed(outs):.1f}", f"{speed(expected):.1f}"]
                    print("|", " | ".join(map(str, cells)), "|", flush=True)
    print(f"\n{num_different} outputs differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
