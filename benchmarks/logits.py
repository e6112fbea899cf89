"""How far are our logits from the model's own? Transformers in float32 on the dequantised weights is the measure.

    python -m benchmarks.logits [MODEL ...]        catalogue names or paths; default: the four models of the catalogue

For every model and about 2,000 positions of this repository's own text, for foredraft and for llama.cpp: the mean
Kullback-Leibler divergence KL(Transformers || engine) in nats, and how often the most likely token is another one where
Transformers' top two differ by more than 0.25. Needs the extras `test` and `peers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.models.divergence import CHUNK, Engine, Logits, foredraft_engine, total_difference, transformers_engine

from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m")
ROOT = Path(__file__).parent.parent
SOURCES = ("docs/architecture.md", "src/foredraft/models/packed_cache.py", "LICENSE")
#: Positions of each text: past the window of gemma3, 512.
CONTEXT = 700


def llama_cpp_engine(path: Path) -> Engine:
    import llama_cpp

    llama = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_batch=CHUNK, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    )

    def run(ids: Sequence[int]) -> Iterator[Logits]:
        llama.reset()
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            llama.eval(chunk)
            yield llama.scores[start : start + len(chunk)]

    return run


def encode_sources(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode((ROOT / source).read_text(), add_special=True)[:CONTEXT] for source in SOURCES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    print("| model | engine | positions | decided | other most likely token | mean KL, nats |")
    print("|---|---|---|---|---|---|")
    for name in parser.parse_args().models:
        path = resolve(name)
        contexts = encode_sources(Tokenizer(read_gguf(path).metadata))
        transformers = transformers_engine(path)
        references = [np.concatenate(list(transformers(ids))) for ids in contexts]
        del transformers
        engines = {"foredraft": foredraft_engine(path, CONTEXT), "llama.cpp": llama_cpp_engine(path)}
        for engine_name, engine in engines.items():
            found = total_difference(engine, references, contexts)
            row = (path.stem, engine_name, found.positions, found.decided, found.other_argmax)
            print(f"| {' | '.join(map(str, row))} | {found.kl / found.positions:.5f} |", flush=True)


if __name__ == "__main__":
    main()
