"""How far an engine's logits are from those that Transformers computes in float32 on the dequantised weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.gguf import load_core
from foredraft.models.load import load_model
from foredraft.models.native import NativeModel

DECIDED = 0.25  # logits between the top two from which on the order is no matter of rounding
CHUNK = 100

Logits = NDArray[np.float32]
#: Token ids -> logits of successive chunks, [chunk, vocab] each, valid until the next.
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


def total_difference(engine: Engine, references: Sequence[Logits], contexts: Sequence[Sequence[int]]) -> Difference:
    """Over several contexts of token ids; references [context][positions, vocab]."""
    total = Difference()
    for reference, ids in zip(references, contexts, strict=True):
        begin = 0
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


def foredraft_engine(path: Path, context: int) -> Engine:
    core = load_core()
    return native_engine(load_model(path, pool=core.ThreadPool(core.default_threads()), max_model_len=context))


def native_engine(model: NativeModel) -> Engine:
    table = np.arange(-(-model.max_model_len // BLOCK_SIZE), dtype=np.int32)

    def run(ids: Sequence[int]) -> Iterator[Logits]:
        for start in range(0, len(ids), CHUNK):
            tokens = ids[start : start + CHUNK]
            yield model.forward([Rows(table, start, tokens, num_logits=len(tokens))])

    return run
