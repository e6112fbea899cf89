"""One description of a decoder, read from a file's metadata: every family is a filling of these fields.

A family is one function in `_FAMILIES`; docs/architecture.md says what else a new one needs. Names of metadata and
tensors are GGUF's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.fields import Fields

Activation = Literal["silu", "gelu_tanh"]


class TensorShape(Protocol):
    """What is asked of a tensor here: its shape, the fastest axis first (a matrix is (inputs, outputs))."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): pair i of a head turns by position * frequency[i].

    frequency[i] = theta ** (-2 i / head_dim) / factor, and / divisors[i] where the file has a tensor of divisors.
    """

    theta: float
    factor: float = 1.0

    def frequencies(self, head_dim: int, divisors: NDArray[np.floating[Any]] | None = None) -> NDArray[np.float64]:
        """[head_dim / 2] radians a position."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        frequencies: NDArray[np.float64] = self.theta**-exponents / self.factor
        return frequencies if divisors is None else frequencies / divisors


@dataclass(frozen=True, slots=True)
class Architecture:
    """A pre-norm decoder: for each layer x += out(attention(norm(x))), x += down(act(gate(norm(x))) * up(norm(x)))."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float  # of all RMS norms; their weights are stored as they multiply
    rope: Rope
    attention_scale: float
    rope_interleaved: bool = False  # pairs (2i, 2i+1), else (i, i + head_dim/2)
    rope_divisors: bool = False  # the file has rope_freqs.weight
    local_rope: Rope | None = None  # of local layers
    sliding_window: int = 0  # positions that a row of a local layer sees, itself included
    local_layers: tuple[bool, ...] = ()  # [num_layers] True: attention within the window; empty: none
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False  # attention output
    qk_norm: bool = False  # an RMS norm over each head of q and k, before RoPE
    post_norms: bool = False  # norms on what attention and feed-forward add to the residual
    tied_head: bool = False  # logits through the embedding matrix

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a forward pass reads, in the order in which it reads them."""
    hidden, mid, dim = arch.hidden_size, arch.intermediate_size, arch.head_dim
    q, kv = arch.num_heads * dim, arch.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (hidden, arch.vocab_size)}
    if arch.rope_divisors:
        shapes["rope_freqs.weight"] = (dim // 2,)
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
    layer |= {"attn_q.weight": (hidden, q), "attn_k.weight": (hidden, kv), "attn_v.weight": (hidden, kv)}
    if arch.qkv_bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch.qk_norm:
        layer |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    layer["attn_output.weight"] = (q, hidden)
    if arch.output_bias:
        layer["attn_output.bias"] = (hidden,)
    if arch.post_norms:
        layer["post_attention_norm.weight"] = (hidden,)
    layer |= {"ffn_norm.weight": (hidden,), "ffn_gate.weight": (hidden, mid), "ffn_up.weight": (hidden, mid)}
    layer["ffn_down.weight"] = (mid, hidden)
    if arch.post_norms:
        layer["post_ffw_norm.weight"] = (hidden,)
    for i in range(arch.num_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not arch.tied_head:
        shapes["output.weight"] = (hidden, arch.vocab_size)
    return shapes


def read_architecture(metadata: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> Architecture:
    """The description of a file's decoder, checked against its tensors.

    Raises UnsupportedModelError for a decoder that is not in the table or has parts this one lacks, ModelFileError
    for missing, odd or contradictory metadata and missing or misshapen tensors.
    """
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ModelFileError("general.architecture is missing: this GGUF file does not say what model it holds")
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"architecture {family!r} is not supported; supported are {known}")
    arch = _FAMILIES[family](Fields(metadata, f"{family}."), tensors)
    _check_tensors(arch, tensors)
    return arch


def _check_tensors(arch: Architecture, tensors: Mapping[str, TensorShape]) -> None:
    expected = tensor_shapes(arch)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelFileError(f"tensor {name} is missing; the file is incomplete or no {arch.family} model")
        found = tensors[name].shape
        if found != shape:
            raise ModelFileError(f"tensor {name} has shape {found}, the metadata say {shape}; the file is damaged")
    # An unknown tensor would have been part of the sum that a forward pass computes: without it the text is wrong.
    for name in tensors:
        if name not in expected:
            raise UnsupportedModelError(f"tensor {name} is not part of a {arch.family} decoder that foredraft knows")


def _read_common(fields: Fields, family: str, tensors: Mapping[str, TensorShape]) -> Architecture:
    """The fields that all families share; rejects metadata that ask for what no family here does."""
    if fields.get("expert_count"):
        raise UnsupportedModelError(f"this {family} file is a mixture of experts, which is not supported")
    if fields.get("attention.causal") is False:
        raise UnsupportedModelError(f"this {family} file is an encoder (not causal), which cannot generate text")
    hidden, num_heads = fields.count("embedding_length"), fields.count("attention.head_count")
    num_kv_heads = fields.count("attention.head_count_kv", num_heads)
    head_dim = fields.count("attention.key_length", hidden // num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} query heads cannot share {num_kv_heads} key heads; the file is damaged")
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{family}.attention.value_length differs from key_length, which is not supported")
    num_layers, mid = fields.count("block_count"), fields.count("feed_forward_length")
    if num_layers > len(tensors):
        raise ModelFileError(f"{family}.block_count is {num_layers}, with {len(tensors)} tensors; the file is damaged")
    check_widths(
        {
            f"{family}.embedding_length": (hidden, 32),
            f"{family}.feed_forward_length": (mid, 32),
            f"{family}.attention.key_length": (head_dim, 16),
            f"{family}.attention.head_count": (num_heads * head_dim, 32),
        }
    )
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{family}.rope.dimension_count: RoPE over a part of a head is not supported")
    return Architecture(
        family=family,
        vocab_size=_vocab_size(tensors),
        hidden_size=hidden,
        intermediate_size=mid,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=fields.count("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(fields, family),
        rope_divisors="rope_freqs.weight" in tensors,
        attention_scale=1 / math.sqrt(head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        tied_head="output.weight" not in tensors,
    )


def check_widths(widths: Mapping[str, tuple[int, int]]) -> None:
    """Field -> the width that it makes, and what divides every width that the core takes. UnsupportedModelError."""
    for name, (width, unit) in widths.items():
        if width == 0 or width % unit:
            raise UnsupportedModelError(f"{name} makes a width of {width}; only multiples of {unit} are supported")


def _vocab_size(tensors: Mapping[str, TensorShape]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError("tensor token_embd.weight is missing; the file is incomplete")
    return embedding.shape[1]


def _read_rope(fields: Fields, family: str) -> Rope:
    kind = fields.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; supported are none, linear, llama3")
    theta = fields.number("rope.freq_base", 10000.0)
    # Old files name the linear factor by itself; 0 means that there is none.
    factor = fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear") or 1.0
    return Rope(theta, factor if kind == "linear" else 1.0)


def _read_llama(fields: Fields, tensors: Mapping[str, TensorShape]) -> Architecture:
    return dataclasses.replace(_read_common(fields, "llama", tensors), rope_interleaved=True)


def _read_qwen2(fields: Fields, tensors: Mapping[str, TensorShape]) -> Architecture:
    return _read_common(fields, "qwen2", tensors)


def _read_qwen3(fields: Fields, tensors: Mapping[str, TensorShape]) -> Architecture:
    return dataclasses.replace(_read_common(fields, "qwen3", tensors), qk_norm=True)


def _read_gemma3(fields: Fields, tensors: Mapping[str, TensorShape]) -> Architecture:
    """Gemma 3 (arXiv 2503.19786): five local layers to a global one; RoPE scaling concerns the global ones."""
    arch = _read_common(fields, "gemma3", tensors)
    window = fields.count("attention.sliding_window") if fields.get("attention.sliding_window") else 0
    # No field says what divides the queries: head_dim, save in the 27B (62 layers), where it is the width per head.
    divisor = arch.hidden_size // arch.num_heads if arch.num_layers == 62 else arch.head_dim
    return dataclasses.replace(
        arch,
        local_rope=Rope(fields.number("rope.freq_base_swa", 10000.0)) if window else None,
        sliding_window=window,
        local_layers=_read_local_layers(fields, arch.num_layers, period=6) if window else (),
        attention_scale=1 / math.sqrt(divisor),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(arch.hidden_size),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        qk_norm=True,
        post_norms=True,
    )


def _read_local_layers(fields: Fields, num_layers: int, period: int) -> tuple[bool, ...]:
    """True for the layers that attend within the window: all but the last of every `period`, or as the file lists."""
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelFileError(f"sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
        return tuple(map(bool, pattern))
    if pattern is not None:
        period = fields.count("attention.sliding_window_pattern")
    return tuple(i % period != period - 1 for i in range(num_layers))


_FAMILIES: Mapping[str, Callable[[Fields, Mapping[str, TensorShape]], Architecture]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "gemma3": _read_gemma3,
}
