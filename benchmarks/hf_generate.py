"""`foredraft.hf.generate` beside the `generate` that it stands for: tokens a second, and whether the ids are equal.

The same prompts for all, greedy, in turns whose order rotates. The clock starts at the first tokens after the prompt.
Ids are compared with those of Transformers' plain decoding; where they first differ, its own logits tell how far the
token that it took was above the other one, in steps of the model's type (ulps).

    python benchmarks/hf_generate.py ./target --draft ./draft --limit 1 --runs 3
    python benchmarks/hf_generate.py ./target --draft ./draft --limit 1 --runs 3 --core q4
    python benchmarks/hf_generate.py ./target --draft ./draft --limit 1 --identity --dtype float32
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import foredraft.hf
from foredraft import LLM, SamplingParams
from foredraft.bench.workloads import Prompt, load_workload

THEIRS, OURS, CORE = "transformers", "foredraft", "foredraft's core"
PLAIN, ASSISTANT, LOOKUP, BOTH = "plain", "assistant", "lookup", "assistant + lookup"
#: Answers with fewer tokens after the first ones are compared, not timed.
LEAST_TIMED = 8


@dataclass(frozen=True)
class Engine:
    name: str
    generate: Callable[..., torch.Tensor]
    options: Mapping[str, Any]
    peer: str = ""  # whose speed its own is set against


@dataclass(frozen=True)
class Run:
    ids: tuple[int, ...]
    num_timed: int  # tokens after the first that came
    seconds: float  # of those


@dataclass(frozen=True)
class Reference:
    """Transformers' plain answer, and the logits [vocab] that each token was chosen by."""

    ids: tuple[int, ...]
    logits: Sequence[torch.Tensor]


@dataclass
class Record:
    """What one engine did."""

    rates: dict[str, list[float]] = field(default_factory=dict)  # by prompt
    answers: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)


class Clock(BaseStreamer):
    """When the first tokens after the prompt came, and how many they were."""

    def __init__(self) -> None:
        self.num_puts, self.num_first, self.began = 0, 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.num_first, self.began = value.numel(), perf_counter()

    def end(self) -> None: ...


def run(engine: Engine, ids: torch.Tensor, max_new_tokens: int) -> Run:
    clock = Clock()
    common = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max_new_tokens}
    output = engine.generate(ids, **common, streamer=clock, **engine.options)
    seconds = perf_counter() - clock.began
    new = tuple(output[0, ids.shape[1] :].tolist())
    return Run(new, len(new) - clock.num_first, seconds)


def make_engines(model: Any, draft: Any, lookup_tokens: int) -> list[Engine]:
    def ours(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = foredraft.hf.generate(model, ids, **options)
        return output

    ways: dict[str, dict[str, Any]] = {LOOKUP: {"prompt_lookup_num_tokens": lookup_tokens}}
    if draft is not None:
        ways[ASSISTANT] = {"assistant_model": draft}
    engines = [Engine(f"{THEIRS}, {way}", model.generate, options) for way, options in ({PLAIN: {}} | ways).items()]
    ways[PLAIN] = {"num_assistant_tokens": 0}
    engines += [Engine(f"{OURS}, {way}", ours, options, f"{THEIRS}, {way}") for way, options in ways.items()]
    if draft is not None:
        options = {"assistant_model": draft, "prompt_lookup_num_tokens": lookup_tokens}
        engines.append(Engine(f"{OURS}, {BOTH}", ours, options, f"{THEIRS}, {ASSISTANT}"))
    return engines


def make_core_engines(target: str, draft: str | None, quantize: Any, lookup_tokens: int, threads: int) -> list[Engine]:
    """The same folders on the CPU core. A rounded model says something else, so its answers are not compared."""
    drafters = {PLAIN: "none", LOOKUP: "ngram"}
    if draft is not None:
        drafters |= {ASSISTANT: f"model:{draft}", BOTH: f"ngram+model:{draft}"}
    longest = "ngram" if draft is None else drafters[BOTH]
    llm = LLM(target, drafter=longest, quantize=quantize, threads=threads, num_speculative_tokens=lookup_tokens)

    def generate(
        ids: torch.Tensor, *, names: list[str], streamer: Clock, max_new_tokens: int, **_: Any
    ) -> torch.Tensor:
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, drafters=names)
        streamer.put(ids)
        new: list[int] = []
        for chunk in llm.stream(ids[0].tolist(), params):
            new += chunk.token_ids
            streamer.put(torch.tensor(chunk.token_ids))
        return torch.cat([ids, torch.tensor([new])], dim=1)

    peers = {BOTH: ASSISTANT}
    return [
        Engine(
            f"{CORE} ({quantize}), {way}",
            generate,
            {"names": [] if spec == "none" else [part.split(":")[0] for part in spec.split("+")]},
            f"{THEIRS}, {peers.get(way, way)}",
        )
        for way, spec in drafters.items()
    ]


def make_reference(model: Any, ids: torch.Tensor, max_new_tokens: int) -> Reference:
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Reference(tuple(output.sequences[0, ids.shape[1] :].tolist()), [row[0].float() for row in output.logits])


def encode(tokenizer: Any, prompt: Prompt) -> torch.Tensor:
    if tokenizer.chat_template is None:
        ids: torch.Tensor = tokenizer(prompt.turns[0], return_tensors="pt").input_ids
        return ids
    chat = [{"role": "user", "content": prompt.turns[0]}]
    return torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])


def difference(ids: Sequence[int], plain: Reference, dtype: torch.dtype) -> str:
    """Where ids leave the reference and by what margin; empty where they do not."""
    at = next((i for i, (ours, theirs) in enumerate(zip(ids, plain.ids, strict=False)) if ours != theirs), None)
    if at is None:
        return "" if len(ids) == len(plain.ids) else f"{len(ids)} tokens instead of {len(plain.ids)}"
    row, taken, other = plain.logits[at], plain.ids[at], ids[at]
    rank = int((row > row[other]).sum())
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(float(row[taken])), abs(float(row[other])))))
    margin = float(row[taken] - row[other]) / step
    return f"token {at}: {rank} likelier in the reference, {margin:.1f} ulps below its choice"


def time_all(engines: Sequence[Engine], prompts: Mapping[str, torch.Tensor], tokens: int, runs: int) -> list[Record]:
    records = [Record() for _ in engines]
    for p, (id, ids) in enumerate(prompts.items()):
        for turn in range(runs):
            for k in range(len(engines)):
                which = (k + p + turn) % len(engines)
                done = run(engines[which], ids, tokens)
                records[which].answers.setdefault(id, set()).add(done.ids)
                if done.num_timed >= LEAST_TIMED:
                    records[which].rates.setdefault(id, []).append(done.num_timed / done.seconds)
        rates = (f"{e.name} {median(r.rates[id]):.2f}" for e, r in zip(engines, records, strict=True) if id in r.rates)
        print(f"{id}: {'; '.join(rates)}", flush=True)
    return records


def ratio(record: Record, other: Record) -> float:
    """Geometric mean over the prompts that both were timed on."""
    return geometric_mean(
        [median(record.rates[id]) / median(other.rates[id]) for id in record.rates if id in other.rates]
    )


def spread(record: Record) -> float:
    """Median over prompts of the median absolute deviation over runs, as a part of the median."""
    parts = []
    for rates in record.rates.values():
        middle = median(rates)
        parts.append(median(abs(rate - middle) for rate in rates) / middle)
    return median(parts)


def print_speeds(engines: Sequence[Engine], records: Sequence[Record]) -> None:
    by_name = {engine.name: record for engine, record in zip(engines, records, strict=True)}
    plain = by_name[f"{THEIRS}, {PLAIN}"]
    print("\n| engine | tokens/s | spread | of Transformers' plain | of Transformers' same |\n|---|---|---|---|---|")
    for engine in engines:
        own = by_name[engine.name]
        rate = geometric_mean([median(rates) for rates in own.rates.values()])
        same = f"{ratio(own, by_name[engine.peer]):.2f}" if engine.peer else ""
        print(f"| {engine.name} | {rate:.2f} | {spread(own):.1%} | {ratio(own, plain):.2f} | {same} |")


def print_identity(
    engines: Sequence[Engine], records: Sequence[Record], plain: Mapping[str, Reference], dtype: torch.dtype
) -> None:
    print("\n| engine | answers like Transformers' plain | where others leave it |\n|---|---|---|")
    for engine, record in zip(engines, records, strict=True):
        if engine.name.startswith(CORE):
            continue
        equal, notes = 0, []
        for id, answers in record.answers.items():
            told = sorted({difference(ids, plain[id], dtype) for ids in answers} - {""})
            equal += not told
            notes += [f"{id}: {note}" for note in told]
        print(f"| {engine.name} | {equal} of {len(record.answers)} | {'<br>'.join(notes)} |")


def with_fixed_rows(engines: Sequence[Engine]) -> list[Engine]:
    ours = [engine for engine in engines if engine.name.startswith(f"{OURS},")]
    return [Engine(f"{e.name}, fixed rows", e.generate, {**e.options, "fixed_rows": True}) for e in ours]


def print_fixed_rows(engines: Sequence[Engine], records: Sequence[Record]) -> bool:
    """Whether all that fill their passes up gave the same answers."""
    fixed = [(e.name, r.answers) for e, r in zip(engines, records, strict=True) if "fixed_rows" in e.options]
    plain = next(answers for name, answers in fixed if f", {PLAIN}," in name)
    print("\n| engine | answers like plain decoding's with fixed rows |\n|---|---|")
    for name, answers in fixed:
        print(f"| {name} | {sum(answers[id] == plain[id] for id in plain)} of {len(plain)} |")
    return all(answers == plain for _, answers in fixed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a folder as save_pretrained writes it")
    parser.add_argument("--draft", help="such a folder with a smaller model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", default="all")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="the longest answer")
    parser.add_argument("--lookup-tokens", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--core", choices=["q4", "q8", "none"], help="these folders on the CPU core, too, rounded so")
    parser.add_argument("--identity", action="store_true", help="compare only, with filled-up passes, too; once each")
    options = parser.parse_args()

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)

    def load(folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    model, draft = load(options.target), load(options.draft) if options.draft else None
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.target)
    texts = load_workload(options.workload, options.limit)
    prompts = {f"{prompt.category} {prompt.id}": encode(tokenizer, prompt) for prompt in texts}
    engines = make_engines(model, draft, options.lookup_tokens)
    if options.core:
        engines += make_core_engines(
            options.target, options.draft, options.core, options.lookup_tokens, options.threads
        )
    if options.identity:
        engines += with_fixed_rows(engines)
    else:
        for engine in engines:  # what is done once is not timed
            run(engine, next(iter(prompts.values()))[:, -32:], 8)
    records = time_all(engines, prompts, options.tokens, 1 if options.identity else options.runs)
    plain = {id: make_reference(model, ids, options.tokens) for id, ids in prompts.items()}
    if not options.identity:
        print_speeds(engines, records)
    print_identity(engines, records, plain, dtype)
    return 0 if not options.identity or print_fixed_rows(engines, records) else 1


if __name__ == "__main__":
    sys.exit(main())
