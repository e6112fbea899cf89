"""Which models can be run exactly: refused at start with the reason, never wrong later."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from foredraft.errors import UnsupportedModelError
from foredraft.models.hf.masks import ATTENTIONS

#: Layers whose cache is keys and values by position, so that a pass can be undone.
_POSITIONAL_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
#: Rotations that depend on the longest text of the pass.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_kind(model: Any, name: str) -> None:
    """Raises UnsupportedModelError for models whose passes cannot be undone, or that cannot follow trees."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{name} must be a model of Transformers, not {type(model).__name__}: load it first"
        )
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(f"{name} is compiled by torch.compile, for shapes of its own: give it uncompiled")
    reason = _reason_to_load_again(model) or _reason_against(model)
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot be speculated with: {reason}")


def check_is_whole(model: Any, name: str) -> None:
    """Raises UnsupportedModelError for a share of a model: each rank would choose lengths of drafts by itself."""
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            f"{name} is shared out over processes, which have to follow one of them: load it whole, or by "
            "LLM(folder, tensor_parallel_size=N)"
        )


def cache_argument(model: Any) -> str:
    """What the model's `forward` calls its cache."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def text_config(model: Any) -> Any:
    """The settings of the decoder: a multimodal model has others beside them."""
    return model.config.get_text_config(decoder=True)


def context_length(model: Any) -> int | None:
    """Tokens that the model's positions reach; None where it sets no limit."""
    config = text_config(model)
    lengths = [getattr(config, "max_position_embeddings", None)]
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            # Beyond it all rows of a pass are turned by the longest text's angles: a draft would change the text.
            original = getattr(config, "original_max_position_embeddings", None)
            lengths.append(rope.get("original_max_position_embeddings", original))
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    return min(known) if known else None


def _reason_to_load_again(model: Any) -> str | None:
    if getattr(model, "generation_config", None) is None:
        return "it has no head to generate with; load it by AutoModelForCausalLM"
    if model.get_input_embeddings().weight.device.type == "meta":
        return "its weights are not loaded (they are on the meta device); load them"
    return None


def _reason_against(model: Any) -> str | None:
    config = text_config(model)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model, and only decoders are supported"
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _POSITIONAL_LAYERS)
    if getattr(model, "_is_stateful", False) or others:
        kinds = f" ({', '.join(others)})" if others else ""
        return f"it has recurrent state{kinds}, which cannot be undone when a draft is rejected; use its own generate"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters or getattr(config, "alibi", False):
        return "it takes no positions (ALiBi and the like), so the branches of a draft cannot be told apart"
    if not {"cache", "past_key_values"} & parameters.keys():
        return "its forward takes no cache"
    attention = config._attn_implementation
    if attention not in ATTENTIONS:
        return f"its attention is {attention}, which takes no mask per row; load it with attn_implementation='sdpa'"
    if model.training:
        return "it is in training mode, where passes are random; call model.eval() first"
    return None


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
