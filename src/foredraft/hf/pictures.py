"""The images and videos of a batch, as pictures in the texts of its rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.errors import UnsupportedModelError
from foredraft.models.hf.vision import (
    Features,
    Readings,
    can_see,
    handed_to_decoder,
    picture_positions,
    spread_positions,
)
from foredraft.types import Picture

#: Arguments for the model that say how it is run, not what it reads.
_HOW_TO_RUN = frozenset({"use_cache", "logits_to_keep", "cache", "past_key_values", "attention_mask", "position_ids"})


def inputs_beside(model: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a model that sees reads beside tokens. Raises UnsupportedModelError for what else there is."""
    others = {key: value for key, value in model_kwargs.items() if key not in _HOW_TO_RUN and value is not None}
    if others.get("mm_encoder_outputs") == {}:  # no image came
        del others["mm_encoder_outputs"]
    if others and (not can_see(model) or "inputs_embeds" in others):
        names = ", ".join(sorted(others))
        raise UnsupportedModelError(f"{names} cannot be given here: only input_ids and attention_mask can")
    return others


def find_pictures(
    model: Any, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], name: str
) -> list[list[Picture]]:
    """What stands in each row of `input_ids` [B, padded] where the model reads something else than its tokens.

    model_kwargs: as `generate` hands them to the decoding method. Starts count from the row's first token, behind its
    padding. Raises UnsupportedModelError.
    """
    others = inputs_beside(model, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if not others:
        return [[] for _ in input_ids]
    others |= {"input_ids": input_ids, "attention_mask": mask, "position_ids": model_kwargs.get("position_ids")}
    handed, position_ids = handed_to_decoder(model, others, name)
    embed = model.get_input_embeddings()
    known = input_ids.to(embed.weight.device).clamp(max=embed.num_embeddings - 1)
    is_text = (embed(known) == handed.to(embed.weight.device)).all(dim=-1).cpu()
    positions = None if position_ids is None else picture_positions(position_ids)
    found = []
    for row, shown in enumerate(mask.bool().cpu()):
        own = None if positions is None else positions[:, row, shown.numpy()]
        embeddings = handed[row, shown.to(handed.device)]
        found.append(_pictures_of_row(model, embeddings, is_text[row, shown].numpy(), own, name))
    return found


def seen_by_both(pictures: Sequence[Picture], others: Sequence[Picture]) -> list[Picture] | None:
    """Pictures of one text, as two models read them; None if these do not read them in the same places."""
    if [(p.start, p.end) for p in pictures] != [(p.start, p.end) for p in others]:
        return None
    return [
        Picture(own.start, own.num_tokens, own.key, Readings({**own.inputs.features, **other.inputs.features}))
        for own, other in zip(pictures, others, strict=True)
    ]


def _pictures_of_row(
    model: Any,
    embeddings: torch.Tensor,
    is_text: NDArray[np.bool_],
    positions: NDArray[np.int64] | None,
    name: str,
) -> list[Picture]:
    """A picture for each run of rows that are no text. positions [dimensions, rows]."""
    steps = np.diff(is_text.astype(np.int8), prepend=1, append=1)
    pictures: list[Picture] = []
    features: list[Features] = []
    if positions is not None:  # `generate` goes on from the last of them, in every dimension
        positions = np.append(positions, positions[:, -1:] + 1, axis=1)
        shift = np.zeros((len(positions), 1), np.int64)
    for start, end in zip(np.flatnonzero(steps == -1).tolist(), np.flatnonzero(steps == 1).tolist(), strict=True):
        own = surplus = None
        if positions is not None:
            own = positions[:, start:end] - start - shift
            surplus = positions[:, end] - end - shift[:, 0]
            shift += surplus[:, None]
        features.append(Features(embeddings[start:end], own, surplus))
        pictures.append(Picture(start, end - start, _digest(features[-1]), Readings({model: features[-1]})))
    if positions is not None:
        logical = np.arange(positions.shape[1])
        ours = spread_positions(logical, pictures, features)
        if not np.array_equal(positions, np.broadcast_to(logical, positions.shape) if ours is None else ours):
            raise UnsupportedModelError(f"{name} puts the tokens behind its images where the engine cannot follow")
    return pictures


def _digest(features: Features) -> bytes:
    content = features.embeddings.float().cpu().contiguous().numpy().tobytes()
    places = b"" if features.positions is None else features.positions.tobytes()
    return blake2b(content + places, digest_size=32).digest()


def model_inputs(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments for `generate`, those that the model itself takes."""
    parameters = inspect.signature(model.forward).parameters
    return {key: value for key, value in arguments.items() if key in parameters}


def reads_more(arguments: Mapping[str, Any]) -> bool:
    """Whether there is anything beside tokens for a model to read."""
    return any(key not in _HOW_TO_RUN and key != "input_ids" for key, value in arguments.items() if value is not None)


def read_prompts(model: Any, inputs: Any, arguments: Mapping[str, Any], name: str) -> list[list[Picture]]:
    """The pictures of each row that `model.generate(inputs, **arguments)` would be given."""
    found: list[list[Picture]] = []

    def read(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        found.extend(find_pictures(model, input_ids, model_kwargs, name))
        return input_ids

    model.generate(inputs, custom_generate=read, **arguments, do_sample=False, max_new_tokens=1)
    return found
