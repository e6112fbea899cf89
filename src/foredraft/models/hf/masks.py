"""Attention masks of a pass: what the model itself masks (causal, windows, chunks), on the tree's logical positions.

Transformers asks a registry for the function that makes a mask, and hands it the model's own rule as a function of
query and key positions. Ours stands in that registry before the library's: during a pass of the engine it evaluates the
rule on the layout's positions; at any other time it is the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from foredraft.models.hf.layout import Layout, current_layout

#: Implementations of attention that take a mask per row. The others cannot follow a tree.
ATTENTIONS = ("sdpa", "eager")


class LayoutMask:
    """The entry of one implementation. Outside the engine's passes it is `original`."""

    def __init__(self, is_additive: bool, original: Callable[..., Any]) -> None:
        self._is_additive = is_additive
        self._original = original

    def __call__(self, *args: Any, **options: Any) -> Any:
        layout = current_layout()
        if layout is None:
            return self._original(*args, **options)
        mask = layout_mask(layout, options["mask_function"])
        if not self._is_additive:
            return mask
        dtype = options["dtype"]
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def layout_mask(layout: Layout, mask_function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[B, 1, Q, K] bool: visible, and allowed by the model's rule of (batch, head, query position, key position)."""
    num_sequences = layout.tokens.shape[0]
    device = layout.tokens.device
    allowed = mask_function(
        torch.arange(num_sequences, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
        layout.positions[:, None, :, None],
        layout.key_positions[:, None, None, :],
    )
    return allowed & layout.visible


def install_masks() -> None:
    """Put ours before the library's, once."""
    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    for name in ATTENTIONS:
        if not isinstance(registry[name], LayoutMask):
            registry[name] = LayoutMask(name == "eager", registry[name])
