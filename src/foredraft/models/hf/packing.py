"""Linear layers on the CPU over weights in oneDNN's own layout, arranged once.

torch's own linear layer has the whole matrix rearranged in every pass, which takes longer than the product. Arranged
beforehand, the same kernels give the same numbers (in bfloat16 the same bits) at the price of reading the weights once.
torch.compile does the same to models that it freezes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

logger = logging.getLogger(__name__)

#: A second copy of the weights may take so much of the memory that is left.
MEMORY_SHARE = 0.5
#: How far a product may be from torch's own, as a share of its greatest entry.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}

#: What layers do unless somebody has replaced it.
_FORWARD = nn.Linear.forward

#: layer -> what its packed weights were made of, and these. They live as long as the layer.
_known: WeakKeyDictionary[nn.Linear, tuple[tuple[Any, ...], torch.Tensor]] = WeakKeyDictionary()
#: Models whose copy did not fit.
_told: WeakSet[Any] = WeakSet()


class PackedLayers:
    """The linear layers of a model's decoder and its head, as far as they can be packed; each is when it first runs."""

    def __init__(self, model: Any) -> None:
        self._forwards = {layer: _Forward(layer) for layer in _layers(model)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the layers run by their packed weights; under autocast they are left to it."""
        forwards = {} if torch.is_autocast_enabled("cpu") else self._forwards
        for layer, forward in forwards.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in forwards:
                layer.__dict__.pop("forward", None)


class _Forward:
    """Stands in for the `forward` of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._weight: torch.Tensor | None = None

    def pack_and_release(self) -> None:
        """What reads the layer's own weights from now on fails."""
        self._weight = pack_weight(self._layer.weight)
        self._layer.weight = nn.Parameter(self._layer.weight.detach().to("meta"), requires_grad=False)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._weight is None:
            self._weight = _packed(self._layer)
        return packed_linear(rows, self._weight, self._layer.bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] in an opaque layout, for `packed_linear`. Ask `can_pack` before."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] to [..., outputs]."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


def can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or type(weight.data) is not torch.Tensor or not weight.is_contiguous():
        return False
    is_in_words = (weight.shape[1] * weight.element_size()) % 8 == 0 and weight.data_ptr() % 8 == 0
    return is_in_words and _can_pack(weight.dtype)


def has_room_for(model: Any) -> bool:
    """Whether a second copy of the layers fits beside the first; if not, that is said once."""
    new = [layer for layer in _layers(model) if layer not in _known]
    needed = sum(layer.weight.numel() * layer.weight.element_size() for layer in new)
    available = available_memory()
    if needed == 0 or needed <= MEMORY_SHARE * available:
        return True
    if model not in _told:
        _told.add(model)
        logger.warning(
            "passes are slower than they could be: packed weights need another %.1f GB, and %.1f GB of memory are free",
            needed / 1e9,
            available / 1e9,
        )
    return False


def pack_for_good(model: Any) -> None:
    """Of a model of our own: the packed weights take the place of the layers' own, which are let go.

    The head keeps its own too, since drafts read a part of it (and it may be the embedding).
    """
    for layer in _layers(model):
        forward = _Forward(layer)
        layer.__dict__["forward"] = forward
        if layer is not model.get_output_embeddings():
            forward.pack_and_release()


def available_memory() -> float:
    """Bytes that programs may still take; infinite where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    sizes = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else float("inf")


def _layers(model: Any) -> list[nn.Linear]:
    """Those whose `forward` is torch's own."""
    if nn.Linear.forward is not _FORWARD:
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    modules = [*(model if decoder is None else decoder).modules(), head]
    plain = dict.fromkeys(m for m in modules if type(m) is nn.Linear and "forward" not in m.__dict__)
    return [layer for layer in plain if can_pack(layer.weight)]


def _packed(layer: nn.Linear) -> torch.Tensor:
    """Made anew if the layer's weights are no longer those that were packed, however they were changed."""
    made_of = _fingerprint(layer.weight)
    known = _known.get(layer)
    if known is None or known[0] != made_of:
        _known[layer] = known = made_of, pack_weight(layer.weight)
    return known[1]


def _fingerprint(weight: torch.Tensor) -> tuple[Any, ...]:
    """Reads all of it. Versions and addresses tell nothing of what is done to a tensor's `data`.

    The sums of its rows and those of its columns, in words of 64 bits: whatever is changed, turned or exchanged changes
    one of them, or their order.
    """
    words = weight.detach().view(torch.int64)
    return weight.dtype, weight.shape, *(words.sum(dim).numpy().tobytes() for dim in (0, 1))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have the operators, and these compute what a linear layer does."""
    if dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 80), (3, 80), (48,)))
    try:
        _fingerprint(weight)
        ours = packed_linear(rows, pack_weight(weight), bias)
    except (AttributeError, RuntimeError, TypeError):
        return False
    own = nn.functional.linear(rows, weight, bias)
    return bool(((ours - own).abs().max() <= _TOLERANCE[dtype] * own.abs().max()).item())
