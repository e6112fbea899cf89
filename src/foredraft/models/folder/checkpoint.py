"""The weights of a folder as the core wants them: tensors by GGUF's names, in the types that they are stored in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.architecture import Architecture, tensor_shapes
from foredraft.models.folder.config import Description, read_config
from foredraft.models.folder.safetensors import (
    READ_TYPES,
    SafetensorsFile,
    StoredTensor,
    open_shards,
    read_json,
)

CONFIG = "config.json"
_EMBEDDING, _HEAD, _ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_HF_HEADS = ("lm_head.weight", "language_model.lm_head.weight")

#: Parts of a layer: GGUF's names -> those of Transformers.
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Where norms follow attention and feed-forward, too.
_POST_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Buffers that old checkpoints hold, computed anew from the configuration.
_COMPUTED = ".rotary_emb.inv_freq"

_Stored = tuple[SafetensorsFile, StoredTensor]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """`shape` has the fastest axis first, as in GGUF: a matrix is (inputs, outputs)."""

    type: str
    shape: tuple[int, ...]


def read_description(folder: str | os.PathLike[str]) -> Description:
    """What config.json says, whether or not the weights are there. Raises ModelFileError, UnsupportedModelError."""
    path = Path(folder) / CONFIG
    config = read_json(path)
    try:
        return read_config(config)
    except (ModelFileError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from None


class Checkpoint:
    """The decoder of a folder, checked: config.json with model.safetensors, or with the files of its index.

    `tensors`, `data` and `drop_pages` are those of a GGUF file of the same model. Norms that multiply by 1 + weight,
    and divisors of angles, are computed when they are read.

    Raises ModelFileError for what is missing, damaged or contradictory, UnsupportedModelError for what the core cannot
    run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = os.fspath(folder)
        self._description = read_description(folder)
        stored = open_shards(Path(folder))
        try:
            self.architecture, self._stored = _assign(self._description, stored)
        except (ModelFileError, UnsupportedModelError) as error:
            raise type(error)(f"{self.path}: {error}") from None
        self.tensors = {
            name: CheckpointTensor("F32" if self._is_computed(name) else tensor.type, tensor.shape[::-1])
            for name, (_, tensor) in self._stored.items()
        }
        if (divisors := self._description.rope_divisors) is not None:
            self.tensors[_ROPE_DIVISORS] = CheckpointTensor("F32", divisors.shape)
        self.sees = self._description.sees
        self._files = {file.path: file for file, _ in self._stored.values()}
        self.nbytes = sum(file.nbytes for file in self._files.values())

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor in its type, [nbytes]; not copied unless they are computed."""
        if name == _ROPE_DIVISORS and self._description.rope_divisors is not None:
            return self._description.rope_divisors.astype(np.float32).view(np.uint8)
        file, tensor = self._stored[name]
        view = file.view(tensor)
        if not self._is_computed(name):
            return view
        return (_as_floats(tensor.type, view) + np.float32(self._description.norm_offset)).view(np.uint8)

    def drop_pages(self, name: str) -> None:
        file, tensor = self._stored[name]
        file.drop_pages(tensor)

    def parts(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """What packed weights depend on: files, and the spans in them, (offset, bytes), that hold tensors."""
        config = Path(self.path) / CONFIG  # no tensors: what is before their place counts, and that is all of it
        parts: list[tuple[str, list[tuple[int, int]]]] = [(str(config), [(config.stat().st_size, 0)])]
        for path, file in sorted(self._files.items()):
            parts.append((str(path), [(tensor.offset, tensor.nbytes) for tensor in file.tensors.values()]))
        return parts

    def _is_computed(self, name: str) -> bool:
        return self._description.norm_offset != 0.0 and name.endswith("norm.weight")


def _as_floats(type: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Elements as single-precision numbers; a BF16 is the upper half of one."""
    if type == "BF16":
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view("<f4" if type == "F32" else "<f2").astype(np.float32)


def _assign(description: Description, stored: Mapping[str, _Stored]) -> tuple[Architecture, dict[str, _Stored]]:
    """The tensors that a pass reads by GGUF's names; no other may be there, and none may have another shape."""
    arch = description.architecture
    if arch.num_layers > len(stored):
        raise ModelFileError(f"{CONFIG} says {arch.num_layers} layers, with {len(stored)} tensors; download it again")
    prefix = next((p for p in description.prefixes if f"{p}embed_tokens.weight" in stored), description.prefixes[0])
    head = next((name for name in _HF_HEADS if name in stored), _HF_HEADS[0])
    # A tied head that is stored all the same is the embedding again, or what Transformers multiplies by instead.
    arch = dataclasses.replace(arch, tied_head=arch.tied_head and head not in stored)
    shapes = {name: shape for name, shape in tensor_shapes(arch).items() if name != _ROPE_DIVISORS}
    names = {name: _stored_name(name, prefix, head, arch.post_norms) for name in shapes}
    for name, shape in shapes.items():
        _check_tensor(names[name], stored, shape[::-1])
    known = set(names.values())
    for name in stored:
        # An unknown tensor would have been part of the sum that a forward pass computes: without it the text is wrong.
        if name not in known and not name.startswith(description.ignored) and not name.endswith(_COMPUTED):
            raise UnsupportedModelError(
                f"tensor {name[:80]} is not part of a {arch.family} decoder that the CPU core knows"
            )
    return arch, {name: stored[names[name]] for name in shapes}


def _check_tensor(name: str, stored: Mapping[str, _Stored], shape: tuple[int, ...]) -> None:
    if name not in stored:
        raise ModelFileError(f"tensor {name} is missing; the files are incomplete, or not those of {CONFIG}")
    tensor = stored[name][1]
    if tensor.shape != shape:
        raise ModelFileError(f"tensor {name} has shape {tensor.shape}, {CONFIG} says {shape}; the files do not match")
    if tensor.type not in READ_TYPES:
        raise UnsupportedModelError(
            f"tensor {name} is {tensor.type[:20]}; the CPU core reads {', '.join(READ_TYPES)} and quantises by itself"
        )


def _stored_name(name: str, prefix: str, head: str, has_post_norms: bool) -> str:
    if name == _HEAD:
        return head
    if name == _EMBEDDING:
        return f"{prefix}embed_tokens.weight"
    if name == "output_norm.weight":
        return f"{prefix}norm.weight"
    _, layer, part, kind = name.split(".")
    parts = {**_LAYER, **_POST_NORMS} if has_post_norms else _LAYER
    return f"{prefix}layers.{layer}.{parts[part]}.{kind}"
