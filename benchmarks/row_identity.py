"""Has a draft's row of logits the bits of plain decoding? Compares float32 rows on a real model, chains and trees.

    python -m benchmarks.row_identity smollm2-135m --kernels avx2,avxvnni,portable

Every draft follows an answer that plain decoding gave. Its nodes are right or wrong tokens at random. They are computed
once as plain decoding would, one token in a pass, path after path of a tree, on one thread; then whole, with three
other sequences' drafts, chains and trees, in the same pass: for each kernel set and 1 and 2 threads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from time import process_time
from typing import cast

import numpy as np
from benchmarks.bit_identity import read_prompts

from foredraft import LLM, SamplingParams
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.native import NativeModel

CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)
TREE = (-1, 0, 0, 2, 1, 4, 2, 6, 7, 8, -1, 10)
BATCH = 4
MAX_MODEL_LEN = 2048
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE


@dataclass(frozen=True)
class Case:
    """A text and the draft after it."""

    text: list[int]
    tokens: list[int]
    parents: tuple[int, ...]


def table(place: int) -> np.ndarray:
    """Blocks of the sequence at a place of the batch."""
    return np.arange(place * NUM_BLOCKS, (place + 1) * NUM_BLOCKS, dtype=np.int32)


def open_model(name: str, threads: int, kernels: str | None) -> NativeModel:
    llm = LLM(name, "none", max_model_len=MAX_MODEL_LEN, max_num_seqs=BATCH, threads=threads, kernels=kernels)
    return cast(NativeModel, llm.model)


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def make_cases(name: str, prompts: list[list[int]], tokens: int, per_prompt: int) -> list[Case]:
    random = np.random.default_rng(11)
    with LLM(name, "none", max_model_len=MAX_MODEL_LEN, max_num_seqs=BATCH) as llm:
        answers = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))]
        vocab_size = llm.tokenizer.vocab_size
    cases: list[Case] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for cut in np.linspace(0, tokens - len(CHAIN), per_prompt, dtype=int).tolist():
            parents = (CHAIN, TREE)[len(cases) % 2]
            depths = [len(path(parents, node)) - 1 for node in range(len(parents))]
            guesses = random.integers(0, vocab_size, len(parents)).tolist()
            is_right = random.random(len(parents)) < 0.6
            draft = [answer[cut + d] if r else g for d, r, g in zip(depths, is_right, guesses, strict=True)]
            cases.append(Case([*prompt, *answer[:cut]], draft, parents))
    return cases


def fill(model: NativeModel, place: int, text: Sequence[int], chunk: int) -> None:
    for start in range(0, len(text), chunk):
        model.forward([Rows(table(place), start, text[start : start + chunk], num_logits=0)])


def digest(row: np.ndarray) -> bytes:
    return blake2b(row.tobytes(), digest_size=16).digest()


def plain_rows(model: NativeModel, case: Case) -> list[bytes]:
    """A digest of each node's logits, every path computed token by token."""
    fill(model, 0, case.text, 512)
    found: dict[int, bytes] = {}
    for leaf in set(range(len(case.parents))) - set(case.parents):
        for depth, node in enumerate(path(case.parents, leaf)):
            logits = model.forward([Rows(table(0), len(case.text) + depth, [case.tokens[node]])])
            if found.setdefault(node, digest(logits[0])) != digest(logits[0]):
                raise SystemExit("plain decoding does not repeat itself")
    return [found[node] for node in range(len(case.parents))]


def draft_rows(model: NativeModel, cases: Sequence[Case]) -> list[list[bytes]]:
    """The same from one pass over the drafts of all these cases."""
    for place, case in enumerate(cases):
        fill(model, place, case.text, 61)
    batch = [
        Rows(table(place), len(c.text), c.tokens, None if c.parents == CHAIN else c.parents, num_logits=len(c.tokens))
        for place, c in enumerate(cases)
    ]
    digests = iter([digest(row) for row in model.forward(batch)])
    return [[next(digests) for _ in c.tokens] for c in cases]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--min-prompt-tokens", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--places", type=int, default=5, help="of each answer that a draft is put to")
    parser.add_argument("--kernels", default="", help="kernel sets, by comma, beside the one chosen here")
    args = parser.parse_args()
    prompts = read_prompts(args.model, args.prompts, args.min_prompt_tokens, args.prompt_tokens)
    cases = make_cases(args.model, prompts, args.tokens, args.places)
    lengths = [len(case.text) for case in cases]
    print(f"{args.model}: {len(cases)} drafts after texts of {min(lengths)} to {max(lengths)} tokens")
    print(
        "| kernels | threads | rows of chains | differ | rows of trees | differ | CPU s |\n" + "|---" * 7 + "|",
        flush=True,
    )
    model = open_model(args.model, 1, None)
    expected = [plain_rows(model, case) for case in cases]
    kernel_sets = [None, *(k for k in args.kernels.split(",") if k)]
    num_different = 0
    for kernels, threads in [(None, 1), *((k, 1 + i % 2) for i, k in enumerate(kernel_sets, start=1))]:
        began = process_time()
        model = open_model(args.model, threads, kernels)
        total, different = {CHAIN: 0, TREE: 0}, {CHAIN: 0, TREE: 0}
        for first in range(0, len(cases), BATCH):
            some = cases[first : first + BATCH]
            for case, found, wanted in zip(some, draft_rows(model, some), expected[first:], strict=False):
                total[case.parents] += len(found)
                different[case.parents] += sum(a != b for a, b in zip(found, wanted, strict=True))
        num_different += sum(different.values())
        counts = (total[CHAIN], different[CHAIN], total[TREE], different[TREE])
        cells = (model.kernel_set, threads, *counts, round(process_time() - began))
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    print(f"\n{num_different} rows differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
