"""The decoder in plain numpy and float64, one row after another: what the C++ core is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foredraft.models.architecture import Architecture
from foredraft.models.gguf import GGUFFile, load_core
from foredraft.models.load import GGML_TYPES

_Array = NDArray[np.float64]


def reference_logits(
    file: GGUFFile, arch: Architecture, tokens: Sequence[int], parents: Sequence[int] | None = None
) -> _Array:
    """Logits of every token, [n, vocab]. Without parents the tokens are a chain; else parents[i] < i, -1 for a root."""
    weights = _Weights(file)
    parents = range(-1, len(tokens) - 1) if parents is None else parents
    paths: list[list[int]] = []  # of each row: itself and its ancestors, the root first
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    positions = np.array([len(path) - 1 for path in paths])

    x = weights["token_embd.weight"][list(tokens)] * arch.embedding_scale  # [n, hidden]
    for layer in range(arch.num_layers):
        name = f"blk.{layer}."
        h = _rms_norm(x, weights[name + "attn_norm.weight"], arch.norm_eps)
        added = _attention(arch, weights, layer, h, paths, positions)
        if arch.post_norms:
            added = _rms_norm(added, weights[name + "post_attention_norm.weight"], arch.norm_eps)
        x = x + added
        h = _rms_norm(x, weights[name + "ffn_norm.weight"], arch.norm_eps)
        gate = _activate(arch, h @ weights[name + "ffn_gate.weight"].T)
        added = (gate * (h @ weights[name + "ffn_up.weight"].T)) @ weights[name + "ffn_down.weight"].T
        if arch.post_norms:
            added = _rms_norm(added, weights[name + "post_ffw_norm.weight"], arch.norm_eps)
        x = x + added
    x = _rms_norm(x, weights["output_norm.weight"], arch.norm_eps)
    return _softcap(x @ weights["token_embd.weight" if arch.tied_head else "output.weight"].T, arch.logit_softcap)


class _Weights:
    """Dequantised tensors by name, [outputs, inputs] or [n]."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> _Array:
        info = self._file.tensors[name]
        flat = load_core().dequantize(GGML_TYPES[info.type], self._file.data(name))
        return np.asarray(flat, dtype=np.float64).reshape(info.shape[::-1])

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors


def _attention(
    arch: Architecture, weights: _Weights, layer: int, h: _Array, paths: list[list[int]], positions: NDArray[np.int64]
) -> _Array:
    """[n, hidden] what attention adds to the residual. h [n, hidden]."""
    name, dim = f"blk.{layer}.", arch.head_dim
    q, k, v = (_project(weights, f"{name}attn_{part}", h).reshape(len(h), -1, dim) for part in "qkv")
    if arch.qk_norm:
        q = _rms_norm(q, weights[name + "attn_q_norm.weight"], arch.norm_eps)
        k = _rms_norm(k, weights[name + "attn_k_norm.weight"], arch.norm_eps)
    rope = arch.local_rope if arch.is_local(layer) and arch.local_rope is not None else arch.rope
    divisors = weights["rope_freqs.weight"] if arch.rope_divisors else None
    angles = positions[:, None, None] * rope.frequencies(dim, divisors)  # [n, 1, dim / 2]
    q, k = (_rotate(part, angles, arch.rope_interleaved) for part in (q, k))

    group = arch.num_heads // arch.num_kv_heads
    out = np.empty((len(h), arch.num_heads, dim))
    for i, path in enumerate(paths):
        seen = path[-arch.sliding_window :] if arch.is_local(layer) else path
        for head in range(arch.num_heads):
            scores = _softcap(k[seen, head // group] @ q[i, head] * arch.attention_scale, arch.attention_softcap)
            probs = np.exp(scores - scores.max())
            out[i, head] = probs @ v[seen, head // group] / probs.sum()
    return _project(weights, name + "attn_output", out.reshape(len(h), -1))


def _project(weights: _Weights, name: str, x: _Array) -> _Array:
    y: _Array = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def _rms_norm(x: _Array, weight: _Array, eps: float) -> _Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def _rotate(x: _Array, angles: _Array, interleaved: bool) -> _Array:
    """x [n, heads, dim]: pairs (2i, 2i+1) if interleaved, else (i, i + dim/2), turned by angles [n, 1, dim / 2]."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def _activate(arch: Architecture, x: _Array) -> _Array:
    if arch.activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _softcap(x: _Array, cap: float) -> _Array:
    return cap * np.tanh(x / cap) if cap else x
