"""Is the output the same with and without speculation? Counts differing outputs on a real model.

Every setting (drafter, draft length, batch, threads, prompt chunk, kernel set) is varied on its own and together, and
each output's token ids are compared with those of plain decoding, the first row. Greedy, or sampled with a seed.

    python benchmarks/bit_identity.py smollm2-135m --prompts 50 --tokens 200
    python benchmarks/bit_identity.py qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --parts drafters --first ids.json

A model may be its own draft: it is then requantised to 4 bit, so it errs now and then. `row_identity.py` compares the
logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Any, cast

from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import GROUPS, load_group
from foredraft.models.native import NativeModel

PARTS = ("plain", "drafters", "single", "chosen", "kernels")
COLUMNS = "drafter|k|batch|threads|chunk|kernels|adaptive|drafted|accepted|outputs|differ|CPU s"


@dataclass(frozen=True)
class Setting:
    drafter: str = "none"
    k: int = 4
    batch: int = 4
    threads: int = 2
    chunk: int = 512
    kernels: str | None = None
    adaptive: bool = False


@dataclass(frozen=True)
class Run:
    outputs: list[list[int]]
    kernels: str
    num_drafted: int
    num_accepted: int


def settings(part: str, specs: list[str], lengths: list[int], kernel_sets: list[str]) -> Iterator[Setting]:
    """One factor at a time, with the others at values that differ too."""
    if part == "plain":
        yield from (Setting(), Setting(batch=1), Setting(threads=1), Setting(threads=1, chunk=7))
    elif part == "drafters":
        for k in lengths:
            for j, spec in enumerate(specs):
                yield Setting(spec, k, threads=1 + (k + j) % 2, chunk=(512, 7)[k % 2])
    elif part == "single":
        yield from (Setting(spec, 4, batch=1, threads=1) for spec in specs)
    elif part == "chosen":  # lengths, and second choices of a draft model where there are few requests
        yield from (Setting(spec, 8, batch=batch, adaptive=True) for spec in specs for batch in (1, 4))
    else:
        yield from (Setting(specs[-1], 4, threads=1, kernels=name) for name in kernel_sets)


def run(model: str, setting: Setting, prompts: list[list[int]], params: SamplingParams) -> Run:
    options: dict[str, Any] = {"num_speculative_tokens": setting.k, "adaptive": setting.adaptive}
    options |= {"threads": setting.threads, "kernels": setting.kernels, "max_model_len": 2048}
    options |= {"max_num_seqs": setting.batch, "max_num_batched_tokens": setting.chunk, "enable_prefix_caching": False}
    with LLM(model, setting.drafter, **options) as llm:
        done = llm.generate(prompts, params)
        stats = [c.speculation for c in done]
        return Run(
            [list(c.token_ids) for c in done],
            cast(NativeModel, llm.model).kernel_set,
            sum(s.num_draft_tokens for s in stats),
            sum(s.num_accepted_tokens for s in stats),
        )


def read_prompts(model: str, count: int, min_tokens: int, max_tokens: int) -> list[list[int]]:
    """Chats (plain text where the model has no template) about the workloads' texts, taken in turn.

    A prompt shorter than `min_tokens` is joined with the texts after it; one longer than `max_tokens` loses its begin.
    """
    texts = [p.turns[0] for group in zip(*(load_group(g) for g in GROUPS), strict=False) for p in group]
    with LLM(model, "none", max_model_len=2048) as llm:

        def encode(text: str) -> list[int]:
            if llm.tokenizer.chat_template is None:
                return llm.tokenizer.encode(text, add_special=True)[:max_tokens]
            return llm.render_chat([{"role": "user", "content": text}])[-max_tokens:]

        def prompt(begin: int) -> list[int]:
            joined = ""
            for text in islice(cycle(texts), begin, None):
                joined += text + "\n\n"
                if len(ids := encode(joined)) >= min_tokens:
                    return ids
            raise AssertionError("texts are endless")

        return [prompt(i) for i in range(count)]


def read_outputs(path: Path | None, task: dict[str, Any]) -> list[list[int]] | None:
    """What an earlier run of the same task put there."""
    if path is None or not path.exists():
        return None
    saved = json.loads(path.read_text())
    if saved["task"] != task:
        raise SystemExit(f"{path} holds the outputs of another task")
    outputs: list[list[int]] = saved["outputs"]
    return outputs


def describe(setting: Setting, found: Run) -> list[Any]:
    """The first cells of a row."""
    k = "" if setting.drafter == "none" else setting.k
    how = [setting.drafter, k, setting.batch, setting.threads, setting.chunk, found.kernels, setting.adaptive]
    return [*how, found.num_drafted, found.num_accepted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--drafters", help="instead of ngram, the draft, and both: specifications, by comma")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,7,8", help="draft lengths of the part `drafters`, by comma")
    parser.add_argument("--every", type=int, default=1, help="a draft length answers only every so many-th prompt")
    parser.add_argument("--turn", type=int, default=0, help="with --every: which of them, 0 .. every - 1")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the settings, by comma")
    parser.add_argument("--first", type=Path, help="file for the outputs to compare with: written once, then read")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--min-prompt-tokens", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kernels", default="", help="kernel sets to compare, by comma")
    args = parser.parse_args()
    params = SamplingParams(
        temperature=args.temperature, seed=7 if args.temperature else None, max_tokens=args.tokens, ignore_eos=True
    )
    prompts = read_prompts(args.model, args.prompts, args.min_prompt_tokens, args.prompt_tokens)
    specs = ["ngram"] if args.draft is None else ["ngram", f"model:{args.draft}", f"ngram+model:{args.draft}"]
    specs = args.drafters.split(",") if args.drafters else specs
    task = {"model": args.model, "prompts": prompts, "tokens": args.tokens, "temperature": args.temperature}
    expected = read_outputs(args.first, task)
    parts = args.parts.split(",")
    lengths, kernel_sets = [int(k) for k in args.lengths.split(",")], [k for k in args.kernels.split(",") if k]
    rows = [s for part in parts for s in settings(part, specs, lengths, kernel_sets)]
    if expected is None and rows[0] != Setting():
        rows.insert(0, Setting())
    elif expected is not None and rows[0] == Setting():
        del rows[0]

    lengths_of_prompts = f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens"
    print(
        f"{args.model}: {len(prompts)} prompts of {lengths_of_prompts} x {args.tokens}, temperature {args.temperature}"
    )
    print("|", COLUMNS.replace("|", " | "), "|\n" + "|---" * len(COLUMNS.split("|")) + "|", flush=True)
    num_different = 0
    for setting in rows:
        began = process_time()
        begin, every = ((setting.k + args.turn) % args.every, args.every) if setting.drafter != "none" else (0, 1)
        found = run(args.model, setting, prompts[begin::every], params)
        if expected is None:
            expected = found.outputs
            if args.first is not None:
                args.first.write_text(json.dumps({"task": task, "outputs": expected}))
        pairs = list(zip(found.outputs, expected[begin::every], strict=True))
        different = [i for i, (a, b) in enumerate(pairs) if a != b]
        num_different += len(different)
        cells = describe(setting, found)
        cells += [len(pairs), len(different), round(process_time() - began)]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        for i in different:
            place = next(n for n, (a, b) in enumerate(zip(*pairs[i], strict=False)) if a != b)
            print(f"prompt {begin + every * i} differs from its token {place} on", file=sys.stderr, flush=True)
    print(f"\n{num_different} outputs differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
