"""Linear layers over packed weights: the numbers of the layers themselves, whatever happens to these."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import foredraft.hf
from foredraft.models.base import Rows
from foredraft.models.hf import packing
from foredraft.models.hf.head import CutHead
from foredraft.models.hf.model import HFModel
from foredraft.models.hf.packing import can_pack, has_room_for, pack_for_good
from tests.models.hf.zoo import make_model

DTYPES = [torch.bfloat16, torch.float32]
TABLE = np.array([1, 0], np.int32)
#: Whether there is anything to test; on x86 there has to be.
packs = {dtype: can_pack(torch.zeros(8, 8, dtype=dtype)) for dtype in DTYPES}


def run(model: Any, *, packed: bool, tokens: int = 5) -> np.ndarray:
    runner = HFModel(model, name="tiny", num_blocks=2, packed=packed)
    return np.asarray(runner.forward([Rows(TABLE, 0, list(range(3, 3 + tokens)), num_logits=tokens)]))


def close(got: np.ndarray, wanted: np.ndarray, dtype: torch.dtype) -> bool:
    return bool(np.abs(got - wanted).max() <= {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype] * np.abs(wanted).max())


def test_float32_is_packed_on_x86() -> None:
    """bfloat16 depends on the processor."""
    import platform

    assert packs[torch.float32] or platform.machine() not in ("x86_64", "AMD64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "mixtral", "gpt2"])
def test_packed_passes_are_the_plain_ones(name: str, dtype: torch.dtype) -> None:
    model = make_model(name).to(dtype)
    for tokens in (1, 5, 17):
        assert close(run(model, packed=True, tokens=tokens), run(model, packed=False, tokens=tokens), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_packed_weights_are_what_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And outside the engine's passes they are not."""
    calls: list[int] = []
    product = packing.packed_linear
    monkeypatch.setattr(packing, "packed_linear", lambda *args: calls.append(1) or product(*args))
    model = make_model("llama").to(dtype)
    run(model, packed=True)
    assert len(calls) == (2 * 7 + 1 if packs[dtype] else 0)
    calls.clear()
    model(input_ids=torch.tensor([[3, 4]]))
    run(model, packed=False)
    assert not calls


def _load(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": layer.weight.detach().roll(8, 0)}, assign=True)


#: What is done to the weight [48, 32] of a layer. Most leave its version, or the bits of its words taken together.
CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.detach().mul_(3),
    "one number of the data": lambda layer: layer.weight.data[5, 3].add_(4),
    "another tensor": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 3)),
    "two rows exchanged": lambda layer: layer.weight.data.copy_(layer.weight.data[[1, 0, *range(2, 48)]]),
    "rows upside down": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.flip(0).contiguous())),
    "columns turned round": lambda layer: setattr(layer.weight, "data", layer.weight.data.roll(8, 1)),
    "negated": lambda layer: layer.weight.data.neg_(),
    "a negated copy": lambda layer: setattr(layer, "weight", nn.Parameter(-layer.weight)),
    "loaded": _load,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_change_are_packed_anew(how: str, dtype: torch.dtype) -> None:
    model = make_model("llama").to(dtype)
    before = run(model, packed=True)
    with torch.no_grad():
        CHANGES[how](model.model.layers[1].mlp.up_proj)
    after = run(model, packed=True)
    assert close(after, run(model, packed=False), dtype)
    assert not close(after, before, dtype)


def test_a_tied_head_changes_with_its_embedding() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    before = run(model, packed=True)
    model.get_input_embeddings().weight.data.neg_()
    assert close(run(model, packed=True), run(model, packed=False), torch.float32)
    assert not close(run(model, packed=True), before, torch.float32)


def test_a_model_can_be_copied_and_saved_afterwards(tmp_path: Any) -> None:
    model = make_model("llama")
    wanted = run(model, packed=True)
    other = copy.deepcopy(model)
    assert np.array_equal(run(other, packed=True), wanted)
    model.save_pretrained(tmp_path)
    assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_a_pass_that_fails_leaves_the_layers_alone() -> None:
    model = make_model("llama")
    hook = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, packed=True)
    hook.remove()
    assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_layers_that_are_no_plain_ones_run_as_they_are() -> None:
    """Replaced `forward`s (as accelerate's hooks do), subclasses, weights whose rows are no whole words."""

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = make_model("llama")
    mlp = model.model.layers[0].mlp
    doubled = Doubled(32, 48, bias=False)
    doubled.weight = mlp.up_proj.weight
    mlp.up_proj = doubled
    own = mlp.down_proj.forward
    mlp.down_proj.forward = lambda rows: -own(rows)
    assert close(run(model, packed=True), run(model, packed=False), torch.float32)
    assert not can_pack(torch.zeros(8, 7))
    assert not can_pack(torch.zeros(65, dtype=torch.bfloat16)[1:].view(8, 8))
    assert not can_pack(torch.zeros(8, 8, device="meta"))


def test_a_forward_that_was_replaced_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = make_model("llama"), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, rows: -own(layer, rows))
    assert close(run(model, packed=True), run(model, packed=False), torch.float32)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = make_model("llama")
        assert close(run(model, packed=True), run(model, packed=False), torch.float32)


def test_under_autocast_the_layers_are_cast_as_ever() -> None:
    model = make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert close(run(model, packed=True), run(model, packed=False), torch.bfloat16)


def test_a_copy_that_does_not_fit_is_not_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    monkeypatch.setattr(packing, "available_memory", lambda: 1000.0)
    with caplog.at_level(logging.WARNING):
        assert not has_room_for(model)
        assert not has_room_for(model)
    assert len(caplog.records) == (1 if packs[torch.float32] else 0)
    ids = torch.tensor([[5, 6, 7]])
    assert foredraft.hf.generate(model, ids, max_new_tokens=4, do_sample=False).shape == (1, 7)
    assert not any(layer in packing._known for layer in model.modules())


def test_nothing_is_kept_when_it_is_not_wanted() -> None:
    model = make_model("llama")
    foredraft.hf.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pack_weights=False)
    assert not any(layer in packing._known for layer in model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_for_good_the_layers_let_their_own_go(dtype: torch.dtype, tied: bool) -> None:
    model = make_model("llama", tie_word_embeddings=tied).to(dtype)
    wanted, num_bytes = run(model, packed=False), HFModel(model, name="tiny", num_blocks=2).weight_bytes
    pack_for_good(model)
    assert close(run(model, packed=True), wanted, dtype)
    assert HFModel(model, name="tiny", num_blocks=2).weight_bytes == num_bytes
    gone = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.weight.is_meta]
    assert len(gone) == (2 * 7 if packs[dtype] else 0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_part_of_a_head_is_packed_once(bias: bool) -> None:
    head = nn.Linear(16, 40, bias=bias).to(torch.float32)
    hidden = torch.randn(3, 16)
    first = CutHead(head, range(20), packed=True)
    more = CutHead(head, [*range(20), 25, 31], packed=True, previous=first)
    got = more(hidden)
    wanted = head(hidden)
    ids = [*range(20), 25, 31]
    torch.testing.assert_close(got[:, ids], wanted[:, ids])
    assert bool(torch.isneginf(got[:, [i for i in range(40) if i not in ids]]).all())
    assert more._first is first._first
    assert CutHead(head, range(19), packed=True, previous=first)._first is not first._first
