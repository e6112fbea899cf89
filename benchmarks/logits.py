"""How far are our logits from the model's own? Transformers in float32 on the dequantised weights is the measure.

    python benchmarks/logits.py [MODEL ...]        catalogue names or paths; default: the four models of the catalogue

For every model and about 2,000 positions of this repository's own text, for foredraft and for llama.cpp: the mean
Kullback-Leibler divergence KL(Transformers || engine) in nats, and how often the most likely token is another one where
Transformers' top two differ by more than 0.25. Needs the extras `hf` and `peers`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hub import resolve
from foredraft.models.load import load_model
from foredraft.models.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m")
ROOT = Path(__file__).parent.parent
SOURCES = ("docs/architecture.md", "src/foredraft/models/packed_cache.py", "LICENSE")
#: Positions of each text. The window of gemma3 is 512.
CONTEXT = 700
DECIDED = 0.25  # logits between the top two from which on the order is no matter of rounding
CHUNK = 100

Logits = NDArray[np.float32]
#: Token ids -> logits of successive chunks, [chunk, vocab] each.
Engine = Callable[[Sequence[int]], Iterator[Logits]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Sums over positions; `decided` counts those where the reference's order is clear."""

    positions: int = 0
    decided: int = 0
    other_argmax: int = 0  # among the decided
    kl: float = 0.0  # nats, summed

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.positions + other.positions,
            self.decided + other.decided,
            self.other_argmax + other.other_argmax,
            self.kl + other.kl,
        )


def compare(reference: Logits, logits: Logits) -> Difference:
    """Both [positions, vocab]."""
    second, first = np.partition(reference, -2, axis=-1)[:, -2:].T
    decided = first - second > DECIDED
    other = reference.argmax(axis=-1) != logits.argmax(axis=-1)
    kl = 0.0
    for p, q in zip(reference, logits, strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl += float(np.exp(log_p) @ (log_p - log_q))
    return Difference(len(reference), int(decided.sum()), int((other & decided).sum()), kl)


def _log_softmax(x: Logits) -> NDArray[np.float64]:
    shifted = x.astype(np.float64) - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def difference(reference: Logits, engine: Engine, ids: Sequence[int]) -> Difference:
    total, begin = Difference(), 0
    for logits in engine(ids):
        total += compare(reference[begin : begin + len(logits)], logits)
        begin += len(logits)
    return total


def transformers_engine(path: Path) -> Engine:
    """Float32 on the dequantised weights. Takes ids: its tokenizers are not always those of the file."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(path.resolve())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def run(ids: Sequence[int]) -> Iterator[Logits]:
        with torch.inference_mode():
            yield model(torch.tensor([list(ids)])).logits[0].numpy()

    return run


def foredraft_engine(path: Path) -> Engine:
    core = load_core()
    model = load_model(path, pool=core.ThreadPool(core.default_threads()), max_model_len=CONTEXT + CHUNK)
    table = np.arange(-(-CONTEXT // BLOCK_SIZE), dtype=np.int32)

    def run(ids: Sequence[int]) -> Iterator[Logits]:
        for start in range(0, len(ids), CHUNK):
            tokens = ids[start : start + CHUNK]
            yield model.forward([Rows(table, start, tokens, num_logits=len(tokens))])

    return run


def llama_cpp_engine(path: Path) -> Engine:
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=CONTEXT + CHUNK, n_batch=CHUNK, logits_all=True, verbose=False)

    def run(ids: Sequence[int]) -> Iterator[Logits]:
        llama.reset()
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            llama.eval(chunk)
            yield llama.scores[start : start + len(chunk)]

    return run


def texts(tokenizer: Tokenizer, context: int = CONTEXT) -> Iterator[list[int]]:
    for source in SOURCES:
        text = (ROOT / source).read_text()
        yield tokenizer.encode(text, add_special=True)[:context]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    print("| model | positions | decided | KL foredraft | KL llama.cpp | other argmax foredraft | llama.cpp |")
    print("|---|---|---|---|---|---|---|")
    for name in parser.parse_args().models:
        path = resolve(name)
        contexts = list(texts(Tokenizer(read_gguf(path).metadata)))
        engine = transformers_engine(path)
        references = [np.concatenate(list(engine(ids))) for ids in contexts]
        del engine
        ours, theirs = Difference(), Difference()
        for total, make in (("ours", foredraft_engine), ("theirs", llama_cpp_engine)):
            engine = make(path)
            found = sum((difference(r, engine, ids) for r, ids in zip(references, contexts, strict=True)), Difference())
            ours, theirs = (found, theirs) if total == "ours" else (ours, found)
        print(
            f"| {name} | {ours.positions} | {ours.decided} | {ours.kl / ours.positions:.5f} "
            f"| {theirs.kl / theirs.positions:.5f} | {ours.other_argmax} | {theirs.other_argmax} |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
