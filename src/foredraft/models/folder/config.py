"""From config.json to the description of a decoder: a family is one function in `_FAMILIES`.

Names and defaults are those of Transformers' configurations; the two ways in which these have said what RoPE does
(`rope_theta` with `rope_scaling`, and `rope_parameters` since version 5) are read alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.architecture import Architecture, Rope, check_widths
from foredraft.models.fields import Fields

Config = Mapping[str, Any]

_MAX_HEAD_DIM = 4096


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder, and how its checkpoint differs from what the core multiplies with."""

    architecture: Architecture
    rope_divisors: NDArray[np.float64] | None = None  # [head_dim / 2]
    norm_offset: float = 0.0  # norms multiply by this and their weight
    prefixes: tuple[str, ...] = ("model.",)  # what names of tensors may begin with
    ignored: tuple[str, ...] = ()  # beginnings of names that are no part of the decoder

    @property
    def sees(self) -> bool:
        """Whether the model takes images: what reads them is no part of the decoder."""
        return bool(self.ignored)


def read_config(config: Config) -> Description:
    """The decoder that a folder's config.json describes.

    Raises UnsupportedModelError for one that is not in the table or has parts that the core lacks, ModelFileError for
    missing or odd values.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelFileError("model_type is missing: the file does not say what model it is of")
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"the CPU core does not run {family[:40]!r} models; it runs {known}")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors are not read by the CPU core; it quantises by itself")
    return _FAMILIES[family](config)


def _read_llama(config: Config) -> Description:
    arch, divisors = _read_common(config, "llama", context=2048)
    if config.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias: the CPU core has no biases in feed-forward layers")
    biased = bool(config.get("attention_bias"))
    return Description(dataclasses.replace(arch, qkv_bias=biased, output_bias=biased), divisors)


def _read_qwen2(config: Config) -> Description:
    arch, divisors = _read_common(config, "qwen2", context=32_768)
    return Description(dataclasses.replace(arch, qkv_bias=True, **_read_qwen_windows(config, arch)), divisors)


def _read_qwen3(config: Config) -> Description:
    arch, divisors = _read_common(config, "qwen3", context=32_768, head_dim=128)
    biased = bool(config.get("attention_bias"))
    windows = _read_qwen_windows(config, arch)
    arch = dataclasses.replace(arch, qk_norm=True, qkv_bias=biased, output_bias=biased, **windows)
    return Description(arch, divisors)


def _read_qwen_windows(config: Config, arch: Architecture) -> dict[str, Any]:
    """Off unless the file says so; the layers from `max_window_layers` on."""
    fields = Fields(config)
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return {}
    first = config.get("max_window_layers", 28)
    if type(first) is not int:
        raise ModelFileError(f"max_window_layers is {str(first)[:40]}, not a whole number; the file is damaged")
    layers = _read_layer_types(config, arch.num_layers) or tuple(i >= first for i in range(arch.num_layers))
    return {"sliding_window": fields.count("sliding_window", 4096), "local_layers": layers} if any(layers) else {}


def _read_gemma3(config: Config) -> Description:
    """Gemma 3 (arXiv 2503.19786): five local layers to a global one; RoPE scaling concerns the global ones."""
    fields = Fields(config)
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention: an encoder, which cannot generate text")
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModelError("attn_logit_softcapping, which Transformers does not apply, is not supported")
    both = config.get("rope_parameters")
    nested = both if isinstance(both, dict) else {}
    scaling = nested.get("full_attention") or config.get("rope_scaling")
    arch, divisors = _read_common(
        config, "gemma3", context=131_072, head_dim=256, num_heads=8, num_kv_heads=4, vocab_size=262_208,
        activation="hidden_activation", rope=scaling or {}, theta=1e6, tied=True,
    )  # fmt: skip
    local, local_divisors = _read_rope(
        nested.get("sliding_attention") or {}, fields.number("rope_local_base_freq", 1e4), arch
    )
    if local_divisors is not None:
        raise UnsupportedModelError("RoPE scaling 'llama3' of local layers is not supported")
    layers = _read_layer_types(config, arch.num_layers)
    if layers is None:
        period = fields.count("sliding_window_pattern", 6)
        layers = tuple((i + 1) % period != 0 for i in range(arch.num_layers))
    biased = bool(config.get("attention_bias"))
    arch = dataclasses.replace(
        arch,
        local_rope=local,
        sliding_window=fields.count("sliding_window", 4096),
        local_layers=layers,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(arch.hidden_size),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        post_norms=True,
    )
    return Description(arch, divisors, norm_offset=1.0)


def _read_gemma3_with_images(config: Config) -> Description:
    """The language model of a multimodal one. Images are not for the core: nothing of a text goes through the rest."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelFileError("text_config is missing; the file is incomplete")
    description = _read_gemma3(text)
    return dataclasses.replace(
        description,
        architecture=dataclasses.replace(description.architecture, logit_softcap=0.0),  # the class knows none
        # Where files keep the decoder and the rest: as published, and as newer versions of Transformers save them.
        prefixes=("language_model.model.", "model.language_model."),
        ignored=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    )


_FAMILIES: Mapping[str, Callable[[Config], Description]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "gemma3_text": _read_gemma3,
    "gemma3": _read_gemma3_with_images,
}


def _read_common(
    config: Config,
    family: str,
    *,
    context: int,
    head_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    vocab_size: int | None = None,
    activation: str = "hidden_act",
    rope: Any = None,
    theta: float = 10_000.0,
    tied: bool = False,
) -> tuple[Architecture, NDArray[np.float64] | None]:
    """What all families share, with a family's own defaults, and the divisors of its angles.

    rope: parameters of the global layers, where they do not stand in their usual place.
    """
    fields = Fields(config)
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads", num_heads)
    num_kv_heads = fields.count("num_key_value_heads", num_kv_heads or num_heads)
    head_dim = fields.count("head_dim", head_dim or max(1, hidden // num_heads))
    mid = fields.count("intermediate_size")
    if head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModelError(f"head_dim is {head_dim}; at most {_MAX_HEAD_DIM} is supported")
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} query heads cannot share {num_kv_heads} key heads; the file is damaged")
    check_widths(
        {
            "hidden_size": (hidden, 32),
            "intermediate_size": (mid, 32),
            "head_dim": (head_dim, 16),
            "num_attention_heads": (num_heads * head_dim, 32),
        }
    )
    wanted = "silu" if activation == "hidden_act" else "gelu_pytorch_tanh"
    if (found := config.get(activation, wanted)) != wanted:
        raise UnsupportedModelError(f"{activation} {str(found)[:40]!r} is not supported for {family}, only {wanted!r}")
    arch = Architecture(
        family=family,
        vocab_size=fields.count("vocab_size", vocab_size),
        hidden_size=hidden,
        intermediate_size=mid,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=fields.count("max_position_embeddings", context),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=Rope(theta),
        attention_scale=1 / math.sqrt(head_dim),
        tied_head=bool(config.get("tie_word_embeddings", tied)),
    )
    parameters = rope if rope is not None else config.get("rope_parameters") or config.get("rope_scaling") or {}
    found_rope, divisors = _read_rope(parameters, fields.number("rope_theta", theta), arch)
    return dataclasses.replace(arch, rope=found_rope, rope_divisors=divisors is not None), divisors


def _read_rope(parameters: Any, theta: float, arch: Architecture) -> tuple[Rope, NDArray[np.float64] | None]:
    """Frequencies as `parameters` say, and divisors of them, [head_dim / 2]; `theta` is the base if they name none."""
    if not isinstance(parameters, dict):
        raise ModelFileError("rope_parameters or rope_scaling is no object; the file is damaged")
    parameters = {f"rope_parameters.{key}": value for key, value in parameters.items()}
    fields = Fields(parameters, "rope_parameters.")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    rope = Rope(fields.number("rope_theta", theta))
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError("partial_rotary_factor: RoPE over a part of a head is not supported")
    if kind == "default":
        return rope, None
    if kind == "linear":
        return Rope(rope.theta, fields.number("factor")), None
    if kind == "llama3":
        return rope, _llama3_divisors(fields, rope.frequencies(arch.head_dim), arch.context_length)
    raise UnsupportedModelError(
        f"RoPE scaling {str(kind)[:40]!r} is not supported by the CPU core; it knows default, linear, llama3"
    )


def _llama3_divisors(fields: Fields, frequencies: NDArray[np.float64], context_length: int) -> NDArray[np.float64]:
    """Llama 3.1: long wavelengths are stretched by a factor, short ones are not, and a ramp lies between.

    As `_compute_llama3_parameters` in Transformers. [head_dim / 2]
    """
    factor, low, high = (fields.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ModelFileError("high_freq_factor is not above low_freq_factor; the file is damaged")
    turns = fields.count("original_max_position_embeddings", context_length) * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)  # of what is not stretched
    divisors: NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors


def _read_layer_types(config: Config, num_layers: int) -> tuple[bool, ...] | None:
    """True for layers that attend within the window, if the file lists them."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelFileError(f"layer_types does not list the {num_layers} layers; the file is damaged")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layers of {str(name)[:40]!r} are not supported by the CPU core")
    return tuple(name == "sliding_attention" for name in types)
