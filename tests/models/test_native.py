"""The core as a LanguageModel: rows flattened, batches and trees equal to chains, options refused by name."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft import errors
from foredraft.models.architecture import read_architecture
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.load import count_blocks, load_model
from foredraft.models.native import NativeModel
from foredraft.testing import make_tiny_gguf
from foredraft.testing.reference_decoder import reference_logits

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, 263, 60)]
TABLE = np.array([4, 1, 2], dtype=np.int32)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_tiny_gguf("gemma3", tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def load(path: Path, **options: Any) -> NativeModel:
    return load_model(path, **{"pool": load_core().ThreadPool(2), "max_model_len": 128} | options)


def committed(model: NativeModel, tokens: list[int] = TOKENS, table: np.ndarray = TABLE) -> NativeModel:
    model.forward([Rows(table, 0, tokens, num_logits=0)])
    return model


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(path: Path) -> None:
    model = committed(load(path, max_num_seqs=2))
    tree = Rows(TABLE, 60, [5, 6, 7, 8], parents=[-1, 0, -1, 2], num_logits=4)
    other = Rows(np.array([0, 3], dtype=np.int32), 0, TOKENS[:40], num_logits=2)
    alone = [model.forward([rows]).copy() for rows in (other, tree)]
    assert np.array_equal(model.forward([other, tree]), np.concatenate(alone))
    assert np.array_equal(model.forward([tree, other]), np.concatenate(alone[::-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_logits_equal_the_plain_reference(family: Any, tmp_path: Path) -> None:
    make_tiny_gguf(family, tmp_path / "tiny.gguf")
    file = read_gguf(tmp_path / "tiny.gguf")
    model = committed(load(tmp_path / "tiny.gguf", kv_cache_dtype="f32"))
    draft, parents = [5, 6, 7, 8, 9], [-1, 0, -1, 2, 0]
    logits = model.forward([Rows(TABLE, 60, draft, parents=parents, num_logits=5)])
    whole = list(range(-1, 59)) + [59 if parent < 0 else 60 + parent for parent in parents]
    expected = reference_logits(file, read_architecture(file.metadata, file.tensors), TOKENS + draft, whole)
    assert np.abs(logits - expected[60:]).max() < 1e-3


def test_moved_slots_continue_as_a_chain(path: Path) -> None:
    model = committed(load(path))
    model.forward([Rows(TABLE, 60, [5, 6, 7, 8], parents=[-1, 0, -1, 2])])
    model.move_slots(TABLE, [62, 63], [60, 61])
    after_move = model.forward([Rows(TABLE, 62, [9])]).copy()
    chain = committed(load(path), [*TOKENS, 7, 8]).forward([Rows(TABLE, 62, [9])])
    assert np.array_equal(after_move, chain)


def test_embeddings_stand_for_tokens(path: Path) -> None:
    model = load(path)
    with_tokens = model.forward([Rows(TABLE, 0, TOKENS[:3], num_logits=3)], hidden_layers=(0, 7)).copy()
    first, last = model.hidden_states().copy()
    assert first.shape == last.shape == (3, 64)
    with_own = model.forward([Rows(TABLE, 0, [0, 0, 0], num_logits=3, embeddings=first)])
    assert np.array_equal(with_tokens, with_own)
    other = Rows(np.array([5], dtype=np.int32), 0, [1, 2])
    mixed = model.forward([other, Rows(TABLE, 0, [0, 0, 0], num_logits=3, embeddings=first)])
    assert np.array_equal(with_tokens, mixed[1:])


def test_limited_head_reads_less_and_gives_the_same_numbers(path: Path) -> None:
    model = load(path)
    everything, weight_bytes = model.forward([Rows(TABLE, 0, TOKENS)]).copy(), model.weight_bytes
    model.limit_head([40, 3])
    limited = model.forward([Rows(TABLE, 0, TOKENS)])
    kept = np.isfinite(limited[0])
    assert np.flatnonzero(kept).tolist() == [*range(16), *range(32, 48)]
    assert np.array_equal(limited[0, kept], everything[0, kept])
    head_bytes = 263 * 64 * 4
    assert weight_bytes - model.weight_bytes == pytest.approx(head_bytes * 15 / 17, rel=0.05)
    model.limit_head(None)
    assert np.array_equal(model.forward([Rows(TABLE, 0, TOKENS)]), everything)
    assert model.weight_bytes == weight_bytes


def test_second_start_reads_the_cache_and_gives_the_same_bits(path: Path, tmp_path: Path) -> None:
    steps: list[int] = []
    first = load(path, progress=lambda done, total: steps.append(done)).forward([Rows(TABLE, 0, TOKENS)]).copy()
    assert steps[0] == 0  # told before the work begins
    assert len(steps) > 1
    steps.clear()
    model = load(path, progress=lambda done, total: steps.append(done))
    assert steps == []
    assert model.memory_plan.packed_in.startswith(str(tmp_path / "home" / "packed"))
    assert np.array_equal(model.forward([Rows(TABLE, 0, TOKENS)]), first)
    in_memory = load(path, cache=False)
    assert in_memory.memory_plan.packed_in == "memory"
    assert np.array_equal(in_memory.forward([Rows(TABLE, 0, TOKENS)]), first)


def test_requantised_matrices_are_smaller_and_near(path: Path) -> None:
    whole = load(path)
    expected = whole.forward([Rows(TABLE, 0, TOKENS, num_logits=60)]).copy()
    errors_found = {}
    for quantize in ("q4", "q8"):
        model = load(path, quantize=quantize)
        errors_found[quantize] = np.abs(model.forward([Rows(TABLE, 0, TOKENS, num_logits=60)]) - expected).mean()
        assert model.weight_bytes < whole.weight_bytes / 3
    assert 0 < errors_found["q8"] < errors_found["q4"] / 4 < np.abs(expected).mean()


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_files_are_near_the_plain_reference(tensor_type: str, tmp_path: Path) -> None:
    make_tiny_gguf("llama", tmp_path / "tiny.gguf", tensor_type=tensor_type)
    file = read_gguf(tmp_path / "tiny.gguf")
    expected = reference_logits(file, read_architecture(file.metadata, file.tensors), TOKENS)
    logits = load(tmp_path / "tiny.gguf").forward([Rows(TABLE, 0, TOKENS, num_logits=60)])
    # Only the activations are rounded, to 8 bits.
    assert np.abs(logits - expected).mean() < 0.05 * np.abs(expected).mean()


def test_other_weights_of_equal_header_size_and_time_are_not_taken_for_these(path: Path) -> None:
    file = read_gguf(path)
    info = file.tensors["blk.0.ffn_down.weight"]
    rows = [Rows(TABLE, 0, TOKENS, num_logits=60)]
    before, other = load(path).forward(rows).copy(), path.with_name("other") / path.name
    other.parent.mkdir()
    raw = bytearray(path.read_bytes())
    raw[info.offset : info.offset + info.nbytes] = bytes(info.nbytes)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    for target in (other, path):  # another file of that name, and the same one written over
        target.write_bytes(raw)
        os.utime(target, ns=times)
        assert np.array_equal(load(target).forward(rows), load(target, cache=False).forward(rows))
        assert not np.array_equal(load(target).forward(rows), before)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"max_num_seqs": 1}, 6),  # 128 tokens and a draft
        ({"max_num_seqs": 3}, 18),
        ({"max_num_seqs": 3000}, 2048),
        ({"kv_cache_tokens": 100, "max_num_seqs": 3}, 3),
    ],
)
def test_the_size_of_the_cache(options: dict[str, Any], num_blocks: int, path: Path) -> None:
    assert load(path, **options).num_blocks == num_blocks


def test_memory_plan_adds_up(path: Path) -> None:
    model = load(path, max_num_seqs=3)
    plan = model.memory_plan
    assert plan.file == path.stat().st_size
    assert plan.kv_per_token == 2 * 7 * 2 * 16 * 2
    assert plan.kv_reserved == model.num_blocks * BLOCK_SIZE * plan.kv_per_token
    assert plan.packed_weights >= model.weight_bytes
    assert str(plan).count("\n") == 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"kv_cache_dtype": "f8"}, "kv_cache_dtype"),
        ({"quantize": "q3"}, "quantize"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_tokens": 31}, "kv_cache_tokens"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], field: str, path: Path) -> None:
    with pytest.raises(errors.ParameterError) as caught:
        load(path, **options)
    assert caught.value.field == field


def test_a_context_that_no_cache_holds_is_named() -> None:
    assert count_blocks(None, 2**31 - 200, 1) * BLOCK_SIZE < 2**31
    with pytest.raises(errors.ParameterError, match="max_model_len must be at most 2147483552: no cache holds more"):
        count_blocks(None, 2**31 - 1, 4)


def test_unknown_kernel_set_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.NativeCoreError, match="portable"):
        load(path, kernels="mmx")
    monkeypatch.setenv("FOREDRAFT_KERNELS", "mmx")
    with pytest.raises(errors.NativeCoreError, match="portable"):
        load(path)


def test_a_bad_model_is_refused_by_its_path(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(errors.ModelFileError, match=r"odd\.gguf: llama\.embedding_length is missing"):
        load(tmp_path / "odd.gguf")
    assert not (tmp_path / "home").exists()
