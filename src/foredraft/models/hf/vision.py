"""What a model sees in place of tokens: the embeddings that it hands to its own decoder, and where these stand.

No list of architectures: the model runs on a prompt with its images until it calls its decoder, and what it hands over
is kept. Passes of the engine then put the same embeddings into the same rows:

    prompt      a b <img> <img> <img> <img> c d            with positions of two dimensions for an image of 2 x 2:
    embeddings  a b   v     v     v     v   c d            0 1 2 2 3 3 4 5
    rows of          └──── one Picture ────┘               0 1 2 3 2 3 4 5
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.errors import UnsupportedModelError
from foredraft.types import Picture

#: What a model may hand to its decoder beside embeddings: how to run, and what the engine's passes make themselves.
_HANDED = frozenset(
    {"inputs_embeds", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache"}
    | {"return_dict", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits"}
)


@dataclass(frozen=True, slots=True)
class Features:
    """A picture as the decoder reads it.

    embeddings [rows, hidden], of the model's own type; positions [dimensions, rows], counted from where a token in
    place of the first would stand (None: one after the other, like tokens); surplus [dimensions]: by how much positions
    behind it are ahead of what as many tokens would have made them, mostly below zero.
    """

    embeddings: torch.Tensor
    positions: NDArray[np.int64] | None = None
    surplus: NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """What the embeddings keep in memory."""
        return self.embeddings.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class Readings:
    """What several models make of a picture, known before the first pass."""

    features: Mapping[Any, Features]  # model of Transformers -> its own


class _Handed(Exception):  # noqa: N818  # it ends the pass, and nothing is wrong
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


def can_see(model: Any) -> bool:
    """Whether it takes pixels beside tokens."""
    parameters = inspect.signature(model.forward).parameters
    return not model.config.is_encoder_decoder and "pixel_values" in parameters


@torch.no_grad()
def handed_to_decoder(model: Any, inputs: Mapping[str, Any], name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embeddings [B, Q, hidden] and positions, if the model makes them, that it hands to its decoder for `inputs`.

    Raises UnsupportedModelError if it hands over anything else, which passes of the engine could not repeat.
    """

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Handed(kwargs)

    decoder = model.get_decoder()
    hook = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**inputs, use_cache=False, return_dict=True)
    except _Handed as handed:
        arguments = {key: value for key, value in handed.arguments.items() if value is not None}
    else:
        raise UnsupportedModelError(f"{name} cannot be speculated with images: its decoder was not found")
    finally:
        hook.remove()
    others = sorted(arguments.keys() - _HANDED)
    if others or "inputs_embeds" not in arguments:
        what = ", ".join(others) or "no embeddings"
        raise UnsupportedModelError(f"{name} cannot be speculated with images: it hands its decoder {what}")
    return arguments["inputs_embeds"], arguments.get("position_ids")


def read_picture(model: Any, picture: Picture, name: str) -> Features:
    """What the model makes of `picture.inputs`, its own further inputs with the picture's tokens as `input_ids`.

    Or its readings are known. Raises UnsupportedModelError.
    """
    if isinstance(picture.inputs, Readings):
        return picture.inputs.features[model]
    device = model.get_input_embeddings().weight.device
    inputs = {}
    for key in picture.inputs.keys() & inspect.signature(model.forward).parameters.keys():
        value = picture.inputs[key]
        inputs[key] = value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
    embeddings, positions = handed_to_decoder(model, inputs, name)
    spread = None if positions is None else picture_positions(positions)
    if spread is None:
        return Features(embeddings[0])
    own = spread[:, 0] - spread[:, 0].min()
    return Features(embeddings[0], own, np.full(len(own), own.max() + 1 - own.shape[1]))


def picture_positions(position_ids: torch.Tensor) -> NDArray[np.int64] | None:
    """[dimensions, B, Q] of `position_ids`, without the text's, which come first of four; None: there is only one."""
    if position_ids.dim() == 2:
        return None
    positions: NDArray[np.int64] = position_ids[position_ids.shape[0] == 4 :].cpu().numpy()
    return positions


def spread_positions(
    logical: NDArray[np.int64], pictures: Sequence[Picture], features: Sequence[Features]
) -> NDArray[np.int64] | None:
    """The model's positions [dimensions, rows] of rows at logical ones [rows]; None: they are the same.

    The pictures are all of the prompt, in its order, each with its features.
    """
    num_dimensions = max((f.positions.shape[0] for f in features if f.positions is not None), default=0)
    if not num_dimensions:
        return None
    positions = np.broadcast_to(logical, (num_dimensions, *logical.shape)).copy()
    shift = np.zeros((num_dimensions, 1), np.int64)
    for picture, own in zip(pictures, features, strict=True):
        if own.positions is None or own.surplus is None:
            continue
        within, behind = (logical >= picture.start) & (logical < picture.end), logical >= picture.end
        positions[:, within] = own.positions[:, logical[within] - picture.start] + picture.start + shift
        shift += own.surplus[:, None]
        positions[:, behind] = logical[behind] + shift
    return positions
