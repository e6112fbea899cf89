"""Folders of every family on the core, against the Transformers model that wrote them; and unsound folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.base import Rows
from foredraft.models.folder.checkpoint import Checkpoint
from foredraft.models.gguf import load_core
from foredraft.models.load import load_model
from foredraft.models.native import NativeModel
from tests.models.transformers_models import FOLDER, VARIANTS, fill, make_model

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 320, 90)]
TABLE = np.array([3, 0, 2], dtype=np.int32)

_WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": False}
#: What GGUF files of these families do not have, beside the families' usual forms.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-windows": ("Qwen2", _WINDOWED),
    "qwen3-windows-biases": ("Qwen3", _WINDOWED | {"attention_bias": True}),
    "gemma3-unusual": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "query_pre_attn_scalar": 100,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
}


@pytest.fixture(scope="module", params=[*VARIANTS, *MORE])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, MORE)


def load(folder: Path, **options: Any) -> NativeModel:
    pool = load_core().ThreadPool(1)
    return load_model(folder, **{"pool": pool, "kv_cache_dtype": "f32", "cache": False, "max_model_len": 90} | options)


def own_logits(model: Any) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return logits


def core_logits(model: NativeModel) -> np.ndarray:
    return model.forward([Rows(TABLE, 0, TOKENS, num_logits=len(TOKENS))]).copy()


def difference(folder: Path, model: Any) -> float:
    return float(np.abs(core_logits(load(folder)) - own_logits(model)).max())


def test_logits_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert difference(tmp_path, model) < 1e-4


def test_rounded_weights_are_close(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    wanted = own_logits(model)
    error = {}
    for quantize in ("q8", "q4"):
        error[quantize] = np.std(core_logits(load(tmp_path, quantize=quantize)) - wanted) / np.std(wanted)
    assert error["q8"] < 0.025
    assert 2 * error["q8"] < error["q4"] < 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_half_precision_is_read_exactly(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_model(variant).to(dtype).save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).tensors["token_embd.weight"].type == {torch.float16: "F16"}.get(dtype, "BF16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(tmp_path, model) < 1e-4


def test_shards(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert difference(tmp_path, model) < 1e-4


@pytest.mark.parametrize("variant", ["llama-scaled", "llama-linear", "gemma3"])
def test_rope_as_older_versions_wrote_it(variant: str, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside each other, without `layer_types`."""
    model = make_model(variant)
    model.save_pretrained(tmp_path)

    def change(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        local = rope.get("sliding_attention")
        rope = rope.get("full_attention", rope)
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = rope | {"type" if variant == "llama-linear" else "rope_type": kind}
        if local is not None:
            config["rope_local_base_freq"] = local["rope_theta"]
            del config["layer_types"]

    change_config(tmp_path, change)
    assert difference(tmp_path, model) < 1e-4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert np.abs(own_logits(theirs) - own_logits(model)).max() < 1e-5


def test_the_same_model_from_both_kinds_of_file(tmp_path: Path) -> None:
    """The GGUF file was converted by llama.cpp, with the rows of queries and keys in another order."""
    make_model("llama").save_pretrained(tmp_path)
    both = [core_logits(load(path)) for path in (tmp_path, FOLDER / "llama.gguf")]
    assert np.abs(both[0] - both[1]).max() < 1e-5


@pytest.mark.parametrize("published", [True, False])
def test_the_language_model_of_a_multimodal_gemma3(published: bool, tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = make_model("gemma3").config
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=1)
    model = fill(transformers.Gemma3ForConditionalGeneration(config).eval(), adds_one=True)
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    renamed = {rename(name, published): tensor.clone() for name, tensor in stored.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    assert difference(tmp_path, model) < 1e-4


def rename(name: str, published: bool) -> str:
    """As the files of the hub name it, or as version 5 of Transformers does in memory."""
    bare = name.removeprefix("model.").replace("language_model.model.", "language_model.")
    return bare.replace("language_model.", "language_model.model.") if published else f"model.{bare}"


def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    """Old checkpoints hold it, and buffers of angles."""
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(tmp_path, change)
    assert difference(tmp_path, model) < 1e-4


def test_weights_are_repacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    folder = tmp_path / "tiny"
    make_model("llama").save_pretrained(folder, max_shard_size="60KB")
    seen: list[int] = []
    first = core_logits(load(folder, cache=True, quantize="q4", progress=lambda done, total: seen.append(done)))
    assert seen
    seen.clear()
    second = load(folder, cache=True, quantize="q4", progress=lambda done, total: seen.append(done))
    assert np.array_equal(core_logits(second), first)
    assert not seen
    (packed,) = (tmp_path / "home" / "packed").glob("*.fdp")
    # Other weights in any of its files, of the same size: packed anew, and the old ones go.
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-2:] = b"\x80\x3f"
    shard.write_bytes(content)
    load(folder, cache=True, quantize="q4")
    (again,) = (tmp_path / "home" / "packed").glob("*.fdp")
    assert again.name != packed.name


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    make_model("qwen2").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "folder")
    return tmp_path / "folder"


def refusal(folder: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model_type", None, "model_type is missing"),
        ("hidden_size", None, "hidden_size is missing; the file is incomplete"),
        ("hidden_size", "64", "hidden_size is 64, not a positive whole number"),
        ("num_hidden_layers", 2**30, "says 1073741824 layers, with"),
        ("num_hidden_layers", 3, "tensor model.layers.2.input_layernorm.weight is missing"),
        ("num_key_value_heads", 3, "4 query heads cannot share 3 key heads"),
        ("vocab_size", 321, r"tensor model.embed_tokens.weight has shape (320, 64), config.json says (321, 64)"),
        ("rms_norm_eps", 10**400, "rms_norm_eps is 1000"),
        ("rope_parameters", [], None),
        ("rope_parameters", [1], "is no object"),
        ("rope_parameters", {"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ("rope_parameters", {"rope_type": "linear", "factor": -1}, "rope_parameters.factor is -1"),
        ("tie_word_embeddings", True, None),
    ],
)
def test_a_config_that_is_damaged(folder: Path, key: str, value: Any, problem: str | None) -> None:
    change_config(folder, lambda config: config.update({key: value}))
    if problem is None:
        Checkpoint(folder)
    else:
        assert problem in refusal(folder, ModelFileError)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model_type", "mixtral", "the CPU core does not run 'mixtral' models; it runs gemma3, gemma3_text, llama"),
        ("hidden_size", 60, "hidden_size makes a width of 60; only multiples of 32"),
        ("head_dim", 2**20, "head_dim is 1048576; at most 4096"),
        ("hidden_act", "relu", "hidden_act 'relu' is not supported for qwen2, only 'silu'"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "RoPE scaling 'yarn' is not supported"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("quantization_config", {"quant_method": "awq"}, "quantised safetensors are not read"),
    ],
)
def test_a_config_that_the_core_cannot_run(folder: Path, key: str, value: Any, problem: str) -> None:
    change_config(folder, lambda config: config.update({key: value}))
    assert problem in refusal(folder, UnsupportedModelError)


def test_biases_of_feed_forward_layers_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    change_config(tmp_path, lambda config: config.update({"mlp_bias": True}))
    assert "mlp_bias" in refusal(tmp_path, UnsupportedModelError)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_object(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    refusal(folder, ModelFileError)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name}: no regular file" in refusal(folder, ModelFileError)


def test_a_pointer_of_git_lfs(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git lfs pull" in refusal(folder, ModelFileError)


@pytest.mark.parametrize(
    ("change", "kind", "problem"),
    [
        (lambda t: t.pop("lm_head.weight"), ModelFileError, "tensor lm_head.weight is missing"),
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.bias"), ModelFileError, "q_proj.bias is missing"),
        (lambda t: t.update({"score.weight": torch.ones(2)}), UnsupportedModelError, "tensor score.weight is not part"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), ModelFileError, "has shape (63,)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}),
            UnsupportedModelError,
            "tensor model.norm.weight is F64; the CPU core reads F32, F16, BF16",
        ),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, change: Callable[..., Any], kind: type[Exception], problem: str) -> None:
    change_tensors(folder, change)
    assert problem in refusal(folder, kind)


def test_files_that_are_missing(folder: Path, tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    first, *_ = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    first.unlink()
    assert f"{first.name}: no such file" in refusal(tmp_path / "shards", ModelFileError)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "no model.safetensors" in refusal(folder, ModelFileError)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "only safetensors are read" in refusal(folder, UnsupportedModelError)


def test_an_index_that_lies(tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    files = sorted(set(right["weight_map"].values()))
    for wrong in ([], {"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}):
        index.write_text(json.dumps({"weight_map": wrong}))
        assert "no map of tensors to files" in refusal(tmp_path, ModelFileError)
    index.write_text(json.dumps({"weight_map": right["weight_map"] | {"nobody": files[0]}}))
    assert "tensor nobody is missing" in refusal(tmp_path, ModelFileError)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in right["weight_map"].items() if v != files[0]}}))
    assert "is missing" in refusal(tmp_path, ModelFileError)
