"""Tiny random models of every family as Transformers has them: the independent reference of the decoder.

The GGUF files of the same models in `tests/models/tiny` were written by llama.cpp's own converter:

    pip download --no-deps --no-binary=:all: llama-cpp-python==0.3.36     (its vendor/llama.cpp has the converter)
    python -m tests.models.transformers_models vendor/llama.cpp/convert_hf_to_gguf.py
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "tiny"

_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

#: Name -> class prefix in Transformers, and what its configuration has beyond _SHAPE.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 10000.0, "tie_word_embeddings": False}),
    # Wavelengths beyond, below and between the limits of the ramp.
    "llama-scaled": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen2": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"rope_theta": 1e6, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,  # the sixth is global
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


def make_model(name: str, more: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType({})) -> Any:
    """The Transformers model of VARIANTS or `more`, float32, with weights that depend on names and shapes alone."""
    import transformers

    prefix, changes = {**VARIANTS, **more}[name]
    text = "Text" if prefix == "Gemma3" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**_SHAPE | changes)
    config._attn_implementation = "eager"
    return fill(getattr(transformers, f"{prefix}ForCausalLM")(config).eval(), adds_one=prefix == "Gemma3")


def fill(model: Any, adds_one: bool) -> Any:
    """`adds_one`: its norms multiply by 1 + weight."""
    import torch

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            uniform = np.random.default_rng(zlib.crc32(key.encode())).random(tuple(parameter.shape)) - 0.5
            if parameter.ndim == 2:
                uniform *= 1.0 if "embed" in key else 4 / parameter.shape[1] ** 0.5
            elif key.endswith("norm.weight") and not adds_one:
                uniform += 1
            parameter.copy_(torch.from_numpy(uniform))
    return model


def make_tokenizer() -> bytes:
    """A SentencePiece model, which the converter asks for."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs"] * 4),
        model_writer=out,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def convert_all(converter: str) -> None:
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            make_model(name).save_pretrained(folder)
            (Path(folder) / "tokenizer.model").write_bytes(make_tokenizer())
            options = ["--outfile", str(FOLDER / f"{name}.gguf"), "--outtype", "f32", "--model-name", name]
            subprocess.run([sys.executable, converter, folder, *options], check=True)


if __name__ == "__main__":
    convert_all(sys.argv[1])
