"""Tiny random decoders of each family, a plain reference, and the native decoder built from the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.native.weights import ggml_type, pack, random_pieces

from foredraft import _native

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Shape:
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 96
    vocab_size: int = 100
    norm_eps: float = 1e-5
    rope_bases: tuple[float, ...] = (10000.0,)
    rope_factor: float = 1.0
    layer_rope: tuple[int, ...] = (0, 0)
    layer_window: tuple[int, ...] = (0, 0)
    rope_interleaved: bool = False
    activation: str = "silu"
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    biases: bool = False
    qk_norms: bool = False
    post_norms: bool = False


FAMILIES = {
    "llama": Shape(rope_interleaved=True, rope_factor=1.1),
    "qwen2": Shape(num_heads=6, head_dim=16, biases=True),
    "qwen3": Shape(num_heads=4, num_kv_heads=4, head_dim=48, qk_norms=True),
    "gemma3": Shape(
        num_layers=3,
        num_kv_heads=1,
        rope_bases=(10000.0, 1e6),
        layer_rope=(0, 1, 0),
        layer_window=(5, 0, 40),
        activation="gelu_tanh",
        attention_softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=8.0,
        qk_norms=True,
        post_norms=True,
    ),
}


def inverse_frequencies(shape: Shape, table: int) -> NDArray[np.float64]:
    return shape.rope_bases[table] ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)


def matrix_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = {"output.weight": (shape.vocab_size, shape.hidden_size)}
    for i in range(shape.num_layers):
        shapes |= {
            f"blk.{i}.attn_q.weight": (heads, shape.hidden_size),
            f"blk.{i}.attn_k.weight": (kv_heads, shape.hidden_size),
            f"blk.{i}.attn_v.weight": (kv_heads, shape.hidden_size),
            f"blk.{i}.attn_output.weight": (shape.hidden_size, heads),
            f"blk.{i}.ffn_gate.weight": (shape.ffn_size, shape.hidden_size),
            f"blk.{i}.ffn_up.weight": (shape.ffn_size, shape.hidden_size),
            f"blk.{i}.ffn_down.weight": (shape.hidden_size, shape.ffn_size),
        }
    return shapes


def vector_sizes(shape: Shape) -> dict[str, int]:
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"output_norm.weight": shape.hidden_size}
    for i in range(shape.num_layers):
        sizes |= {f"blk.{i}.attn_norm.weight": shape.hidden_size, f"blk.{i}.ffn_norm.weight": shape.hidden_size}
        if shape.biases:
            sizes |= {f"blk.{i}.attn_q.bias": heads, f"blk.{i}.attn_k.bias": kv_heads, f"blk.{i}.attn_v.bias": kv_heads}
            sizes |= {f"blk.{i}.attn_output.bias": shape.hidden_size}
        if shape.qk_norms:
            sizes |= {f"blk.{i}.attn_q_norm.weight": shape.head_dim, f"blk.{i}.attn_k_norm.weight": shape.head_dim}
        if shape.post_norms:
            sizes |= {f"blk.{i}.post_attention_norm.weight": shape.hidden_size}
            sizes |= {f"blk.{i}.post_ffw_norm.weight": shape.hidden_size}
    return sizes


@dataclass(frozen=True)
class TinyDecoder:
    """Float tensors for the reference, and the same numbers as they lie in a GGUF file."""

    shape: Shape
    type_name: str
    stored: dict[str, NDArray[np.uint8]]  # matrices and token_embd.weight
    tensors: dict[str, NDArray[np.float32]]  # all tensors, dequantised


def make_decoder(shape: Shape, type_name: str = "F32", seed: int = 0) -> TinyDecoder:
    rng = np.random.default_rng(seed)
    stored, tensors = {}, {}
    shapes = matrix_shapes(shape) | {"token_embd.weight": (shape.vocab_size, shape.hidden_size)}
    for name, (n, k) in shapes.items():
        if type_name == "F32":
            stored[name] = (rng.standard_normal((n, k)) * k**-0.5).astype(np.float32).view(np.uint8).reshape(-1)
        else:
            elements = {"Q8_0": 32, "Q4_1": 32, "Q5_0": 32}[type_name]
            stored[name] = random_pieces(type_name, n * k // elements, rng, special=False).reshape(-1)
        tensors[name] = _native.dequantize(ggml_type(type_name), stored[name]).reshape(n, k)
    for name, size in vector_sizes(shape).items():
        mean = 0.0 if name.endswith("bias") else 1.0
        tensors[name] = (mean + 0.3 * rng.standard_normal(size)).astype(np.float32)
    return TinyDecoder(shape, type_name, stored, tensors)


def build_native(model: TinyDecoder, pool: _native.ThreadPool, kernel_set: str | None = None) -> _native.Decoder:
    s = model.shape
    decoder = _native.Decoder(
        pool,
        num_layers=s.num_layers,
        hidden_size=s.hidden_size,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        ffn_size=s.ffn_size,
        vocab_size=s.vocab_size,
        norm_eps=s.norm_eps,
        attention_scale=s.head_dim**-0.5,
        rope_tables=[(inverse_frequencies(s, t), s.rope_factor) for t in range(len(s.rope_bases))],
        layer_rope=s.layer_rope,
        layer_window=s.layer_window,
        rope_interleaved=s.rope_interleaved,
        activation=s.activation,
        attention_softcap=s.attention_softcap,
        logit_softcap=s.logit_softcap,
        embedding_scale=s.embedding_scale,
        kernel_set=kernel_set,
    )
    format_name = _native.packed_format(ggml_type(model.type_name))
    for name, (n, k) in matrix_shapes(s).items():
        decoder.set_weight(name, format_name, n, k, pack(model.type_name, n, k, model.stored[name]))
    for name in vector_sizes(s):
        decoder.set_vector(name, model.tensors[name])
    decoder.set_embedding(ggml_type(model.type_name), s.vocab_size, s.hidden_size, model.stored["token_embd.weight"])
    return decoder


# ── the reference: one row after another in float64 ──────────────────────────────────────────────────────────────────


def rms_norm(x: NDArray[np.float64], weight: NDArray[np.float32], eps: float) -> NDArray[np.float64]:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: NDArray[np.float64], position: int, shape: Shape, table: int) -> NDArray[np.float64]:
    """x [heads, head_dim]"""
    angle = position * inverse_frequencies(shape, table)
    cos, sin = np.cos(angle) * shape.rope_factor, np.sin(angle) * shape.rope_factor
    half = shape.head_dim // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if shape.rope_interleaved else (slice(half), slice(half, None))
    )
    out = np.empty_like(x)
    out[:, first] = x[:, first] * cos - x[:, second] * sin
    out[:, second] = x[:, second] * cos + x[:, first] * sin
    return out


def soft_cap(x: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    return cap * np.tanh(x / cap) if cap else x


def attend(
    query: NDArray[np.float64], keys: list[NDArray[np.float64]], values: list[NDArray[np.float64]], shape: Shape
) -> NDArray[np.float64]:
    """query [heads, head_dim], keys and values: [kv heads, head_dim] of each visible position."""
    out = []
    for head in range(shape.num_heads):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        scores = np.array([query[head] @ key[kv_head] for key in keys]) * shape.head_dim**-0.5
        scores = soft_cap(scores, shape.attention_softcap)
        weights = np.exp(scores - scores.max())
        out.append(sum(w * value[kv_head] for w, value in zip(weights / weights.sum(), values, strict=True)))
    return np.concatenate(out)


def activate(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def reference(
    model: TinyDecoder, tokens: Sequence[int], parents: Sequence[int] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits [n, vocab] and hidden states [layers + 1, n, hidden] of a chain or tree from an empty cache."""
    shape, t = model.shape, model.tensors
    parents = range(-1, len(tokens) - 1) if parents is None else parents
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    x = t["token_embd.weight"].astype(np.float64)[list(tokens)] * shape.embedding_scale
    hidden = [x]
    for i in range(shape.num_layers):
        blk = f"blk.{i}."
        project = {
            part: rms_norm(x, t[blk + "attn_norm.weight"], shape.norm_eps) @ t[blk + f"attn_{part}.weight"].T
            + (t[blk + f"attn_{part}.bias"] if shape.biases else 0)
            for part in "qkv"
        }
        queries, keys, values, attended = [], [], [], []
        for row, path in enumerate(paths):
            query, key, value = (project[part][row].reshape(-1, shape.head_dim) for part in "qkv")
            if shape.qk_norms:
                query = rms_norm(query, t[blk + "attn_q_norm.weight"], shape.norm_eps)
                key = rms_norm(key, t[blk + "attn_k_norm.weight"], shape.norm_eps)
            queries.append(rotate(query, len(path) - 1, shape, shape.layer_rope[i]))
            keys.append(rotate(key, len(path) - 1, shape, shape.layer_rope[i]))
            values.append(value)
            seen = path[-shape.layer_window[i] :]
            attended.append(attend(queries[row], [keys[s] for s in seen], [values[s] for s in seen], shape))
        y = np.array(attended) @ t[blk + "attn_output.weight"].T + (t[blk + "attn_output.bias"] if shape.biases else 0)
        x = x + (rms_norm(y, t[blk + "post_attention_norm.weight"], shape.norm_eps) if shape.post_norms else y)
        h = rms_norm(x, t[blk + "ffn_norm.weight"], shape.norm_eps)
        gated = activate(h @ t[blk + "ffn_gate.weight"].T, shape.activation) * (h @ t[blk + "ffn_up.weight"].T)
        y = gated @ t[blk + "ffn_down.weight"].T
        x = x + (rms_norm(y, t[blk + "post_ffw_norm.weight"], shape.norm_eps) if shape.post_norms else y)
        hidden.append(x)
    logits = rms_norm(x, t["output_norm.weight"], shape.norm_eps) @ t["output.weight"].T
    return soft_cap(logits, shape.logit_softcap), np.array(hidden)


# ── running the native decoder ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a pass."""

    table: Sequence[int]
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int | None = None  # None: all rows


def forward(
    decoder: _native.Decoder, cache: _native.KVCache, spans: Sequence[Span], hidden_layers: Sequence[int] = ()
) -> NDArray[np.float32]:
    """A copy of the logits of one pass."""
    sequences, tables, tokens, parents = [], [], [], []
    for span in spans:
        n = len(span.tokens)
        sequences.append([span.start, n, n if span.num_logits is None else span.num_logits, len(span.table)])
        tables += span.table
        tokens += span.tokens
        parents += range(-1, n - 1) if span.parents is None else span.parents
    has_tree = any(span.parents is not None for span in spans)
    return decoder.forward(
        cache,
        np.array(sequences, dtype=np.int32).reshape(-1, 4),
        np.array(tables, dtype=np.int32),
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32) if has_tree else None,
        hidden_layers,
    ).copy()


def run_chunks(
    decoder: _native.Decoder,
    tokens: Sequence[int],
    chunk: int,
    *,
    half: bool = True,
    table: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """Logits of every row of a chain that is computed `chunk` rows at a time. [n, vocab]"""
    table = range(-(-len(tokens) // BLOCK_SIZE)) if table is None else table
    cache = decoder.make_cache(max(table) + 1, half)
    parts = [
        forward(decoder, cache, [Span(list(table), i, list(tokens[i : i + chunk]))])
        for i in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)
