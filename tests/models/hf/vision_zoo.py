"""Tiny random models that see, of the library's own classes, float32; and folders of them with their processors."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from foredraft.models.hf.processor import images_only
from tests.models.hf.folders import byte_level
from tests.models.hf.zoo import BOS, EOS, PAD, widen

VOCAB = 400
#: What templates and processors write of an image.
TOKENS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TAGS = (
    *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_SMALL_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
#: Settings by the library's name of an architecture.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, **_SMALL_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_feature_layer": -2,
    },
    "qwen2_vl": {
        "vision_config": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, **_QWEN_VISION},
        "text_config": {**_TEXT, **_MROPE},
    },
    "qwen2_5_vl": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            **_QWEN_VISION,
        },
        "text_config": {**_TEXT, **_MROPE},
    },
    "idefics3": {
        "vision_config": {"model_type": "idefics3_vision", "image_size": 16, "patch_size": 4, **_SMALL_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "scale_factor": 2,
    },
    "smolvlm": {
        "vision_config": {"model_type": "smolvlm_vision", "image_size": 16, "patch_size": 4, **_SMALL_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "scale_factor": 2,
    },
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, **_SMALL_VISION},
        "text_config": {**_TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64},
        "mm_tokens_per_image": 4,
    },
    "qwen3_vl": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            **_QWEN_VISION,
        },
        "text_config": {**_TEXT, **_MROPE, "head_dim": 8},
    },
}
#: Models whose images the engine carries.
SEEING = ("llava", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")


@lru_cache
def tokenizer(name: str) -> Any:
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *TOKENS, *_TAGS]})
    image = "<|vision_start|><|image_pad|><|vision_end|>" if name.startswith("qwen") else "<image>"
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


@lru_cache
def model(name: str) -> Any:
    """Shared by tests: never changed."""
    return make_model(name)


def make_model(name: str, seed: int = 0) -> Any:
    ids = tokenizer(name).convert_tokens_to_ids
    image = "<|image_pad|>" if name.startswith("qwen") else "<image>"
    named = {
        "image_token_id": ids(image),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(ARCHITECTURES[name]), **named)
    made = widen(transformers.AutoModelForImageTextToText.from_config(config))
    made.generation_config.eos_token_id = tokenizer(name).eos_token_id
    made.generation_config.pad_token_id = PAD
    return made


def disturbed(target: Any, amount: float = 0.02) -> Any:
    """A model that often agrees with the target, not always."""
    changed = copy.deepcopy(target)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * amount)
    return changed


@lru_cache
def processor(name: str) -> Any:
    """Small images, so that prompts are short. None of them needs torchvision; SmolVLM's own would."""
    config = model(name).config
    kind = PROCESSOR_MAPPING[type(config)]
    size = {"height": 16, "width": 16}
    if name == "llava":
        pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
        return kind(
            pixels,
            tokenizer(name),
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if name.startswith("qwen"):
        pixels = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=1024
        )
        return images_only(kind)(pixels, tokenizer(name))
    pixels = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return transformers.Idefics3Processor(pixels, tokenizer(name), image_seq_len=4)


def picture(seed: int = 0, width: int = 24, height: int = 16) -> Any:
    """Of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def inputs(name: str, text: str, *images: Any) -> dict[str, Any]:
    """What the library's processor makes of a text in which IMAGE stands for an image."""
    written = text.replace("IMAGE", processor(name).image_token)
    made = processor(name)(text=written, images=list(images) or None, return_tensors="pt")
    return dict(made)


def write_folder(path: Path, name: str, seed: int | None = None, *, amount: float = 0.0) -> Path:
    """As `save_pretrained` writes it. amount: how far from `model(name)` a draft is."""
    made = model(name) if seed is None else make_model(name, seed)
    (disturbed(made, amount) if amount else made).save_pretrained(path)
    processor(name).save_pretrained(path)
    settings = path / "processor_config.json"
    settings.write_text(settings.read_text().replace("ImagesOnly", PROCESSOR_MAPPING[type(made.config)].__name__))
    return path
