"""Tiny random models as GGUF files: the whole path from file to text in milliseconds. Needs the `gguf` package."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from foredraft.models.architecture import Architecture, Rope, tensor_shapes
from foredraft.testing.byte_tokenizer import ByteTokenizer

Family = Literal["llama", "qwen2", "qwen3", "gemma3"]


def tiny_architecture(family: Family, *, vocab_size: int, num_layers: int | None = None) -> Architecture:
    """A decoder of a few hundred kilobytes with all the parts of its family."""
    base = Architecture(
        family=family,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_layers=num_layers or (7 if family == "gemma3" else 2),  # gemma3's sixth layer is global
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=512,
        norm_eps=1e-6,
        rope=Rope(10000.0),
        attention_scale=0.25,
    )
    if family == "llama":
        return replace(base, rope_interleaved=True)
    if family == "qwen2":
        return replace(base, qkv_bias=True, tied_head=True)
    if family == "qwen3":
        return replace(base, head_dim=32, attention_scale=1 / math.sqrt(32), qk_norm=True)
    return replace(
        base,
        rope=Rope(1e6),
        local_rope=Rope(10000.0),
        sliding_window=16,
        local_layers=tuple(layer % 6 != 5 for layer in range(base.num_layers)),
        activation="gelu_tanh",
        embedding_scale=8.0,
        qk_norm=True,
        post_norms=True,
        tied_head=True,
    )


def random_weight(name: str, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    """Numbers that keep activations near 1. `shape` has the fastest axis first, the array has it last."""
    uniform = np.random.default_rng((seed, zlib.crc32(name.encode()))).random(shape[::-1]) - 0.5
    if len(shape) == 2:
        scale = 1.0 if name == "token_embd.weight" else 4 / math.sqrt(shape[0])
        return (scale * uniform).astype(np.float32)
    return (uniform + (0.0 if name.endswith("bias") else 1.0)).astype(np.float32)


def make_tiny_gguf(
    family: Family,
    path: str | os.PathLike[str],
    seed: int = 0,
    *,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    tensor_type: str = "F32",
    reverse_bytes: bool = False,
) -> None:
    """Write a tiny random model whose tokens are those of `ByteTokenizer`; equal arguments write equal weights.

    `vocab_size` above the tokenizer's pads the head. `reverse_bytes`: ids 0 .. 255 are the bytes in descending order,
    which is another vocabulary. `tensor_type` of the matrices: what the `gguf` package can make
    (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1).
    """
    import gguf

    tokenizer = ByteTokenizer()
    arch = tiny_architecture(family, vocab_size=vocab_size or tokenizer.vocab_size, num_layers=num_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(arch.context_length)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_block_count(arch.num_layers)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_rope_freq_base(arch.rope.theta)
    if arch.sliding_window:
        writer.add_sliding_window(arch.sliding_window)
    _add_tokens(writer, tokenizer, reverse_bytes)

    quantized = gguf.GGMLQuantizationType[tensor_type]
    for name, shape in tensor_shapes(arch).items():
        weight = random_weight(name, shape, seed)
        if len(shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: Any, tokenizer: ByteTokenizer, reverse_bytes: bool) -> None:
    """A byte-level BPE without merges: every byte is a token, written in GPT-2's alphabet of printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    specials = [tokenizer.token_bytes(id).decode() for id in range(256, tokenizer.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([alphabet[byte] for byte in (range(255, -1, -1) if reverse_bytes else range(256))] + specials)
    writer.add_token_types([1] * 256 + [3] * len(specials))  # normal, control
    writer.add_token_merges([])
    writer.add_bos_token_id(tokenizer.BOS)
    writer.add_eos_token_id(tokenizer.EOS)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_chat_template(tokenizer.chat_template)
