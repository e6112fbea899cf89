"""Real weights: logits near Transformers', which sees the same weights, and they write what they should."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hub import resolve
from foredraft.models.load import load_model
from foredraft.models.tokenizer import Tokenizer
from tests.models.divergence import foredraft_engine, total_difference, transformers_engine

POSITIONS = 200


def generate(name: str, prompt: str, num_tokens: int) -> str:
    """Greedy, the plainest loop."""
    path = resolve(name)
    tokenizer = Tokenizer(read_gguf(path).metadata)
    core = load_core()
    model = load_model(path, pool=core.ThreadPool(core.default_threads()), max_model_len=256)
    table = np.arange(256 // BLOCK_SIZE, dtype=np.int32)
    ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
    start, end = 0, len(ids)
    while len(ids) < end + num_tokens and ids[-1] not in tokenizer.eos_ids:
        logits = model.forward([Rows(table, start, ids[start:])])
        start = len(ids)
        ids.append(int(logits[0].argmax()))
    return tokenizer.decode(ids[end:])


def ask(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.real
def test_smollm2_knows_a_capital() -> None:
    assert generate("smollm2-135m", ask("What is the capital of France?"), 20) == "The capital of France is Paris."


@pytest.mark.pair
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen_writes_code(name: str) -> None:
    text = generate(name, ask("Write a Python function that reverses a string."), 100)
    code = text.split("```python\n")[1].split("```")[0]
    scope: dict[str, Callable[[str], str]] = {}
    exec(code, scope)
    assert scope["reverse_string"]("abc") == "cba"


@pytest.mark.real
def test_smollm2_logits_are_those_of_transformers() -> None:
    path = resolve("smollm2-135m")
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = Tokenizer(read_gguf(path).metadata).encode(text)[:POSITIONS]
    found = total_difference(foredraft_engine(path, POSITIONS), list(transformers_engine(path)(ids)), [ids])
    assert found.decided > POSITIONS / 2
    assert found.other_argmax == 0
    assert found.kl / POSITIONS < 0.003  # activations are rounded to 8 bits: see benchmarks/logits.md
