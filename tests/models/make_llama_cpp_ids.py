"""Writes llama_cpp_ids.json: what llama.cpp makes of the awkward texts. Run by hand, with llama-cpp-python:

PYTHONPATH=src python -m tests.models.make_llama_cpp_ids
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from foredraft.models.hub import resolve
from foredraft.models.tokenizer import PRE_TOKENIZERS

from .vocabularies import AWKWARD, byte_level_fields, save_vocabulary, sentencepiece_fields

GOLDEN = Path(__file__).with_name("llama_cpp_ids.json")
REAL = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m")
SENTENCEPIECE = ({}, {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True})


def tokenize(path: Path) -> dict[str, Any]:
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocab = model._model.vocab
    return {
        "plain": [model.tokenize(text.encode(), add_bos=False, special=False) for text in AWKWARD],
        "parsed": [model.tokenize(text.encode(), add_bos=False, special=True) for text in AWKWARD],
        "wrapped": model.tokenize(b"hi", add_bos=True),
        "ends": [id for id in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, id)],
    }


def main() -> None:
    fields = byte_level_fields()
    golden: dict[str, Any] = {"byte_level_fields": fields, "pre": {}, "sentencepiece": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for pre in PRE_TOKENIZERS:
            golden["pre"][pre] = tokenize(save_vocabulary(path, fields | {"tokenizer.ggml.pre": pre}))
        for settings in SENTENCEPIECE:
            golden["sentencepiece"].append(tokenize(save_vocabulary(path, sentencepiece_fields(**settings))))
    golden["real"] = {name: tokenize(resolve(name)) for name in REAL}
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
