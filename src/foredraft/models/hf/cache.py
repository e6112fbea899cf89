"""A paged KV cache in the shape that Transformers' models expect.

A layer keeps keys and values of all sequences in blocks of slots, writes a pass's rows to their slots, and gives each
sequence the keys of its own blocks in the order of its slots. Nothing is ever taken out: what is undone is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from foredraft.errors import UnsupportedModelError
from foredraft.models.base import BLOCK_SIZE
from foredraft.models.hf.layout import Layout, current_layout


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the library's class is untyped
    """keys, values [blocks, BLOCK_SIZE, heads, head_dim], of the model's own types.

    They grow with the blocks in use, past the `num_reserved` that they begin with.
    """

    keys: torch.Tensor
    values: torch.Tensor

    is_sliding = False  # windows are the mask's affair: all layers keep all slots, so that any of them can be undone
    is_croppable = True
    supports_early_init = False

    def __init__(self, num_reserved: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_reserved = num_reserved

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self._num_reserved, BLOCK_SIZE, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, heads, Q, head_dim] of the rows in; those of all slots [B, heads, K, head_dim] out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = _layout()
        self.keys, self.values = _grown(self.keys, layout.num_blocks), _grown(self.values, layout.num_blocks)
        return _store(self.keys, key_states, layout), _store(self.values, value_states, layout)

    def get_seq_length(self) -> int:
        layout = _layout()
        return max(0, layout.num_keys - layout.num_queries)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _layout().num_keys, 0

    def get_max_length(self) -> int:
        return -1

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots; all sources are read before any target is written."""
        if self.is_initialized:
            for states in (self.keys, self.values):
                slots = states.flatten(0, 1)
                slots[target.to(slots.device)] = slots[source.to(slots.device)]


def _grown(kept: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """With room for so many blocks at least, or twice what it had."""
    if num_blocks <= kept.shape[0]:
        return kept
    grown = kept.new_zeros(max(num_blocks, 2 * kept.shape[0]), *kept.shape[1:])
    grown[: kept.shape[0]] = kept
    return grown


def _store(kept: torch.Tensor, states: torch.Tensor, layout: Layout) -> torch.Tensor:
    new = states.transpose(1, 2).flatten(0, 1)  # [B * Q, heads, head_dim]
    written = new if layout.rows is None else new[layout.rows.to(new.device)]
    # A number that is none would reach others through slots that they do not see: 0 times NaN is NaN.
    kept.flatten(0, 1)[layout.slots.to(kept.device)] = torch.nan_to_num(written)
    return kept[layout.blocks.to(kept.device)].flatten(1, 2).transpose(1, 2)


class SlotCache(Cache):
    """One `SlotLayer` a layer of the model, each with room for `num_reserved` blocks at first."""

    def __init__(self, num_layers: int, num_reserved: int = 0) -> None:
        self._slot_layers = [SlotLayer(num_reserved) for _ in range(num_layers)]
        super().__init__(layers=[*self._slot_layers])

    def move_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy physical slots in all layers. Every source[i] >= target[i] of one sequence, both ascending."""
        moved = [(s, t) for s, t in zip(source, target, strict=True) if s != t]
        if moved:
            sources, targets = (torch.tensor(slots) for slots in zip(*moved, strict=True))
            for layer in self._slot_layers:
                layer.move(sources, targets)


def _layout() -> Layout:
    layout = current_layout()
    if layout is None:
        raise UnsupportedModelError("this cache is used by passes of the engine only")
    return layout
