"""Tiny random models of many architectures of Transformers, float32, made in milliseconds."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
import transformers

VOCAB = 96
PAD, BOS, EOS = 0, 1, 2

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

#: What a family's settings have beyond, or instead of, _SMALL. Windows are so short that every test runs past them.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gpt2": _GPT,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"head_dim": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "starcoder2": {"sliding_window": 8},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "deepseek_v3": {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
}

#: Families that keep a state which cannot be undone, or tell positions apart by nothing that a tree could set.
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {},
    "rwkv": {},
    "jamba": {},
    "qwen3_next": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True, "head_dim": None},
}


@lru_cache
def model(name: str) -> Any:
    """The model of a family, shared by tests: it is never changed."""
    return make_model(name)


@lru_cache
def draft(name: str) -> Any:
    """A model that often agrees with `model(name)`, not always."""
    disturbed = copy.deepcopy(model(name))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in disturbed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.02)
    return disturbed


def make_model(name: str, seed: int = 0, **settings: Any) -> Any:
    values = {k: v for k, v in (_SMALL | ARCHITECTURES.get(name, {}) | settings).items() if v is not None}
    config = transformers.AutoConfig.for_model(name, **values)
    torch.manual_seed(seed)
    return widen(transformers.AutoModelForCausalLM.from_config(config))


def widen(made: Any) -> Any:
    """Weights larger than usual initialisers make them, so that all of the text matters to the next token."""
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return made.eval()


def prompts(num_pads: tuple[int, ...] = (0, 3, 7, 1), length: int = 11) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a batch with padding on the left."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(EOS + 1, VOCAB, (len(num_pads), length), generator=random)
    mask = torch.ones_like(ids)
    for row, pads in enumerate(num_pads):
        ids[row, :pads], mask[row, :pads] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}
