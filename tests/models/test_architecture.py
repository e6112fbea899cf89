"""What metadata and tensors say about a decoder, and what is refused."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from foredraft.errors import ForedraftError, ModelFileError, UnsupportedModelError
from foredraft.models.architecture import Architecture, Rope, read_architecture, tensor_shapes
from foredraft.models.gguf import read_gguf
from foredraft.testing import make_tiny_gguf
from foredraft.testing.tiny_gguf import tiny_architecture
from tests.models.transformers_models import FOLDER


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def header(variant: str) -> tuple[dict[str, Any], dict[str, Shape]]:
    file = read_gguf(FOLDER / f"{variant}.gguf")
    return dict(file.metadata), {name: Shape(info.shape) for name, info in file.tensors.items()}


def read(variant: str, **changes: Any) -> Architecture:
    """The architecture of a file whose metadata were changed; None takes an entry out."""
    metadata, tensors = header(variant)
    family = metadata["general.architecture"]
    for key, value in changes.items():
        metadata[f"{family}.{key}"] = value
    return read_architecture({key: value for key, value in metadata.items() if value is not None}, tensors)


def test_gemma3_has_two_ropes_and_a_global_layer_in_six() -> None:
    arch = read("gemma3")
    assert [arch.is_local(layer) for layer in range(7)] == [True] * 5 + [False, True]
    assert (arch.sliding_window, arch.rope, arch.local_rope) == (16, Rope(1e6, 8.0), Rope(10000.0))
    assert (arch.embedding_scale, arch.logit_softcap, arch.attention_softcap) == (8.0, 4.0, 0.0)
    assert arch.qk_norm
    assert arch.post_norms
    assert arch.tied_head
    assert not arch.qkv_bias


def test_gemma3_as_older_converters_wrote_it() -> None:
    arch = read("gemma3", **{"rope.freq_base_swa": None, "rope.scaling.type": None, "rope.scaling.factor": None})
    assert (arch.rope, arch.local_rope) == (Rope(1e6), Rope(10000.0))
    assert read("gemma3", **{"attention.sliding_window": None}).local_layers == ()
    assert read("gemma3", **{"attention.sliding_window_pattern": 2}).local_layers == (True, False) * 3 + (True,)
    listed = [False, True, True, True, True, True, True]
    assert read("gemma3", **{"attention.sliding_window_pattern": listed}).local_layers == tuple(listed)


@pytest.mark.parametrize(("layers", "heads", "divisor"), [(62, 32, 168), (34, 8, 256)])
def test_gemma3_27b_scales_its_queries_by_the_width_per_head(layers: int, heads: int, divisor: int) -> None:
    width = {"block_count": layers, "attention.head_count": heads, "embedding_length": 5376}
    size = {"context_length": 512, "feed_forward_length": 64, "attention.key_length": 256}
    eps = {"attention.layer_norm_rms_epsilon": 1e-6}
    metadata = {"general.architecture": "gemma3"} | {f"gemma3.{k}": v for k, v in (width | size | eps).items()}
    base = tiny_architecture("gemma3", vocab_size=64, num_layers=layers)
    arch = Architecture(
        **{name: getattr(base, name) for name in base.__dataclass_fields__}
        | {"hidden_size": 5376, "num_heads": heads, "num_kv_heads": heads, "head_dim": 256, "intermediate_size": 64}
    )
    tensors = {name: Shape(shape) for name, shape in tensor_shapes(arch).items()}
    assert read_architecture(metadata, tensors).attention_scale == 1 / math.sqrt(divisor)


def test_rope_scaling() -> None:
    assert read("llama-linear").rope == Rope(10000.0, 4.0)
    assert read("llama", **{"rope.scale_linear": 2.0}).rope == Rope(10000.0, 2.0)
    assert read("llama", **{"rope.freq_base": None}).rope == Rope(10000.0)
    assert read("llama-linear", **{"rope.scaling.type": "none"}).rope == Rope(10000.0)
    assert read("llama-scaled").rope_divisors
    frequencies = Rope(100.0, 2.0).frequencies(4, np.array([1, 4], dtype=np.float32))
    assert frequencies.tolist() == [0.5, 0.0125]


def test_interleaved_pairs_are_llamas_alone() -> None:
    assert [read(name).rope_interleaved for name in ("llama", "qwen2", "qwen3", "gemma3")] == [
        True,
        False,
        False,
        False,
    ]


def test_head_size_comes_from_the_file_or_from_the_width() -> None:
    assert read("qwen3").head_dim == 32
    assert read("llama", **{"attention.key_length": None, "attention.value_length": None}).head_dim == 16


@pytest.mark.parametrize(
    ("variant", "changes", "error", "names"),
    [
        ("llama", {"embedding_length": None}, ModelFileError, "llama.embedding_length is missing"),
        ("llama", {"block_count": 2**31 - 1}, ModelFileError, "block_count"),
        ("llama", {"block_count": 3}, ModelFileError, "blk.2.attn_norm.weight is missing"),
        ("llama", {"block_count": 1}, UnsupportedModelError, "blk.1."),
        ("llama", {"attention.head_count": 0}, ModelFileError, "head_count"),
        ("llama", {"attention.head_count": [4, 8]}, ModelFileError, "head_count"),
        ("llama", {"attention.head_count_kv": 3}, ModelFileError, "share"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, ModelFileError, "epsilon"),
        ("llama", {"attention.layer_norm_rms_epsilon": "x" * 999}, ModelFileError, "epsilon"),
        ("llama", {"feed_forward_length": 128}, ModelFileError, "ffn_gate"),
        ("llama", {"feed_forward_length": 100}, UnsupportedModelError, "feed_forward_length"),
        ("llama", {"attention.key_length": 8, "attention.value_length": 8}, UnsupportedModelError, "key_length"),
        ("llama", {"attention.head_count": 128, "attention.key_length": None}, UnsupportedModelError, "key_length"),
        ("llama", {"attention.value_length": 32}, UnsupportedModelError, "value_length"),
        ("llama", {"rope.dimension_count": 8}, UnsupportedModelError, "part of a head"),
        ("llama", {"rope.scaling.type": "yarn"}, UnsupportedModelError, "yarn"),
        ("llama", {"expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ("qwen2", {"attention.causal": False}, UnsupportedModelError, "encoder"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, ModelFileError, "sliding_window_pattern"),
        ("gemma3", {"attention.sliding_window": -5}, ModelFileError, "sliding_window"),
    ],
)
def test_refused_with_the_name_of_the_culprit(
    variant: str, changes: dict[str, Any], error: type[ForedraftError], names: str
) -> None:
    with pytest.raises(error, match=names) as caught:
        read(variant, **changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_tensors_and_families_that_do_not_fit() -> None:
    metadata, tensors = header("qwen2")
    with pytest.raises(UnsupportedModelError, match=r"output\.bias"):
        read_architecture(metadata, tensors | {"output.bias": Shape((320,))})
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.bias has shape \(64,\)"):
        read_architecture(metadata, tensors | {"blk.1.attn_k.bias": Shape((64,))})
    with pytest.raises(ModelFileError, match=r"token_embd\.weight is missing"):
        read_architecture(metadata, {name: t for name, t in tensors.items() if name != "token_embd.weight"})
    with pytest.raises(UnsupportedModelError, match="'falcon' is not supported; supported are gemma3, llama"):
        read_architecture(metadata | {"general.architecture": "falcon"}, tensors)
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        read_architecture({}, tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_tiny_files_say_what_they_were_made_from(family: Any, tmp_path: Any) -> None:
    make_tiny_gguf(family, tmp_path / "tiny.gguf", vocab_size=288)
    file = read_gguf(tmp_path / "tiny.gguf")
    found = read_architecture(file.metadata, file.tensors)
    made = tiny_architecture(family, vocab_size=288)
    differing = {n for n in made.__dataclass_fields__ if getattr(found, n) != getattr(made, n)}
    assert differing == {"norm_eps"}  # float32 in the file
