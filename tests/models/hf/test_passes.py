"""Passes of Transformers models on the engine's cache: the LanguageModel protocol, against the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.errors import ParameterError, UnsupportedModelError
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.hf.model import MAX_ROWS_TOGETHER, HFModel
from foredraft.models.hf.probe import probe
from tests.models.hf.zoo import ARCHITECTURES, REFUSED, VOCAB, make_model, model

TEXT = [int(t) for t in np.random.default_rng(3).integers(3, VOCAB, 150)]
#: Physical blocks out of order, as a pool gives them after a while.
TABLE = np.array([5, 2, 7, 0, 3], np.int32)


def runner(name: str = "llama", **options: Any) -> HFModel:
    return HFModel(model(name), name=name, num_blocks=8, **options)


def own_logits(name: str, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, vocab] of one plain forward."""
    with torch.no_grad():
        return np.asarray(model(name)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0])


def assert_close(got: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, atol=2e-4 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tree_has_the_logits_of_its_chains(name: str) -> None:
    """Behind a prompt that is past every window and chunk, and crosses a block; a second sequence runs beside it."""
    prompt, trunk, side, other = TEXT[:40], TEXT[40:43], TEXT[50:52], TEXT[60:75]
    run = runner(name)
    run.forward([Rows(TABLE, 0, prompt, num_logits=0)])
    run.forward([Rows(TABLE[3:], 0, other[:-1], num_logits=0)])
    #  trunk0 ─┬─ side0 ── side1        rows: trunk0 side0 trunk1 side1 trunk2
    #          └─ trunk1 ── trunk2
    tokens, parents = [trunk[0], side[0], trunk[1], side[1], trunk[2]], [-1, 0, 0, 1, 2]
    tree = Rows(TABLE, 40, tokens, parents, num_logits=5)
    got = run.forward([tree, Rows(TABLE[3:], 14, other[-1:])])
    along_trunk, along_side = own_logits(name, prompt + trunk), own_logits(name, prompt + trunk[:1] + side)
    wanted = [along_trunk[40], along_side[41], along_trunk[41], along_side[42], along_trunk[42]]
    assert_close(got, np.stack([*wanted, own_logits(name, other)[-1]]))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text", "gpt2"])
def test_what_was_rejected_leaves_no_trace(name: str) -> None:
    """A draft is written over; a tree's accepted path moves together; both go on as if nothing else had been there."""
    run = runner(name)
    run.forward([Rows(TABLE, 0, [*TEXT[:30], *TEXT[70:76]], num_logits=7)])  # six rejected tokens
    tokens, parents = [TEXT[30], TEXT[80], TEXT[31], TEXT[81], TEXT[32]], [-1, 0, 0, 1, 2]
    run.forward([Rows(TABLE, 30, tokens, parents, num_logits=5)])
    run.move_slots(TABLE, [30, 32, 34], [30, 31, 32])
    got = run.forward([Rows(TABLE, 33, TEXT[33:35], num_logits=2)])
    assert_close(got, own_logits(name, TEXT[:35])[33:])


def test_a_long_prompt_in_chunks_beside_short_ones() -> None:
    long, short = TEXT[: MAX_ROWS_TOGETHER + 10], TEXT[100:107]
    run = HFModel(model("mistral"), name="mistral", num_blocks=8)
    got = run.forward([Rows(TABLE, 0, long, num_logits=2), Rows(np.array([1]), 0, short, num_logits=3)])
    assert_close(got, np.concatenate([own_logits("mistral", long)[-2:], own_logits("mistral", short)[-3:]]))
    got = run.forward([Rows(TABLE, len(long), TEXT[90:95], num_logits=1)])
    assert_close(got, own_logits("mistral", long + TEXT[90:95])[-1:])


def test_shared_blocks_are_read_by_all() -> None:
    run = runner()
    run.forward([Rows(TABLE, 0, TEXT[:BLOCK_SIZE], num_logits=0)])
    tables = [np.array([TABLE[0], 1]), np.array([TABLE[0], 6])]
    got = run.forward([Rows(t, BLOCK_SIZE, [token]) for t, token in zip(tables, (8, 9), strict=True)])
    assert_close(got, np.stack([own_logits("llama", [*TEXT[:BLOCK_SIZE], token])[-1] for token in (8, 9)]))


def test_no_logits_are_no_rows() -> None:
    assert runner().forward([Rows(TABLE, 0, TEXT[:4], num_logits=0)]).shape == (0, VOCAB)


def test_rows_do_not_depend_on_how_many_are_filled_up() -> None:
    """With fixed_rows a token alone, and the same token with a draft behind it, have the same bits."""
    results = []
    for draft in ([], TEXT[20:24], TEXT[50:57]):
        run = runner(fixed_rows=8)
        run.forward([Rows(TABLE, 0, TEXT[:19], num_logits=0)])
        logits = run.forward([Rows(TABLE, 19, [TEXT[19], *draft], num_logits=1 + len(draft))])
        results.append(logits[0].tobytes())
    assert results[0] == results[1] == results[2]


def test_half_precision_on_the_cpu() -> None:
    half = make_model("qwen3").to(torch.bfloat16)
    run = HFModel(half, name="half", num_blocks=8, fixed_rows=8)
    got = run.forward([Rows(TABLE, 0, TEXT[:6], num_logits=6)])
    assert got.dtype == np.float32
    with torch.no_grad():
        wanted = half(input_ids=torch.tensor([TEXT[:6]])).logits[0].float().numpy()
    np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3_text"])
def test_hidden_states_of_chosen_layers(name: str) -> None:
    """i: the input of layer i. The last: what the final norm gets, so that norm and head make the logits of it."""
    run = runner(name)
    run.forward([Rows(TABLE, 0, TEXT[:9], num_logits=0), Rows(TABLE[3:], 0, TEXT[20:23])], hidden_layers=[0, 1])
    got = run.hidden_states()
    assert got.shape == (2, 12, 32)
    with torch.no_grad():
        ids = [torch.tensor([TEXT[:9]]), torch.tensor([TEXT[20:23]])]
        states = [model(name)(input_ids=i, output_hidden_states=True).hidden_states for i in ids]
    wanted = [torch.cat([s[layer][0] for s in states]).numpy() for layer in (0, 1)]
    assert_close(got, np.stack(wanted))


def test_the_last_hidden_state_is_before_the_norm() -> None:
    run = runner()
    logits = run.forward([Rows(TABLE, 0, TEXT[:5], num_logits=5)], hidden_layers=[2])
    with torch.no_grad():
        normed = model("llama").model.norm(torch.tensor(run.hidden_states()[0]))
        assert_close(logits, model("llama").lm_head(normed).numpy())
    run.forward([Rows(TABLE, 5, TEXT[5:6])])
    with pytest.raises(ValueError, match="asked for no hidden states"):
        run.hidden_states()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_embeddings_stand_for_tokens(name: str) -> None:
    with torch.no_grad():
        embeddings = model(name).get_input_embeddings()(torch.tensor(TEXT[:5])).numpy()
    given = Rows(TABLE, 0, [0] * 5, num_logits=5, embeddings=embeddings)
    got = runner(name).forward([given, Rows(TABLE[3:], 0, TEXT[30:33])])
    assert_close(got, np.concatenate([own_logits(name, TEXT[:5]), own_logits(name, TEXT[30:33])[-1:]]))


def test_a_sequence_that_broke_does_not_spoil_its_blocks() -> None:
    run = runner()
    broken = Rows(TABLE, 0, [0] * 5, embeddings=np.full((5, 32), np.nan, np.float32))
    got = run.forward([broken, Rows(TABLE[3:], 0, TEXT[:4])])
    assert np.isnan(got[0]).all()
    assert_close(got[1], own_logits("llama", TEXT[:4])[-1])
    assert_close(run.forward([Rows(TABLE, 0, TEXT[:3])]), own_logits("llama", TEXT[:3])[-1:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "phi3", "gpt_neox"])
def test_a_limited_head_has_what_was_asked_for(name: str) -> None:
    """Of a chain and of a tree; the first tokens, others, and all again."""
    tree = Rows(TABLE, 3, [5, 6, 7], parents=[-1, 0, 0], num_logits=3)
    whole = runner(name)
    whole.forward([Rows(TABLE, 0, TEXT[:3])])
    wanted = whole.forward([tree])
    run = runner(name)
    for chosen in ([0, 1, 2, 3, 9, 40], [3, 7], list(range(VOCAB))):
        run.limit_head(chosen)
        run.forward([Rows(TABLE, 0, TEXT[:3])])
        got = run.forward([tree])
        assert got.shape == wanted.shape
        assert_close(got[:, chosen], wanted[:, chosen])
        others = np.setdiff1d(np.arange(VOCAB), chosen)
        assert np.isneginf(got[:, others]).all()
    run.limit_head(None)
    assert np.array_equal(run.forward([tree]), wanted)


def test_a_head_that_is_not_all_is_not_cut() -> None:
    """What caps or scales logits behind it is kept: all of them are computed."""
    made = make_model("gemma2", query_pre_attn_scalar=8, final_logit_softcapping=3.0)
    run = HFModel(made, name="gemma2", num_blocks=8)
    wanted = run.forward([Rows(TABLE, 0, TEXT[:3])])
    run.limit_head([3, 7])
    assert np.array_equal(run.forward([Rows(TABLE, 0, TEXT[:3])]), wanted)
    assert np.abs(wanted).max() <= 3


def test_tensors_where_they_are_wanted() -> None:
    got = runner(device_sampler="array").forward([Rows(TABLE, 0, TEXT[:3])], hidden_layers=[1])
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32


def test_sizes() -> None:
    run = runner()
    assert (run.vocab_size, run.max_model_len, run.context_length, run.num_blocks) == (VOCAB, 256, 256, 8)
    assert run.weight_bytes == sum(p.numel() * 4 for p in model("llama").parameters())
    assert runner(max_model_len=100).max_model_len == 100
    with pytest.raises(ParameterError, match="between 1 and the context of 256"):
        runner(max_model_len=257)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotations_that_follow_the_longest_text_end_where_they_change(rope_type: str) -> None:
    """Beyond it a draft would turn the rows before it by other angles."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    made = make_model("llama", rope_parameters=rope)
    assert HFModel(made, name="scaled", num_blocks=8).max_model_len == 64


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has recurrent state|takes no positions") as caught:
        HFModel(make_model(name, **REFUSED[name]), name=name, num_blocks=8)
    assert "\n" not in str(caught.value)


def test_a_model_that_ignores_the_masks_is_found() -> None:
    made = make_model("llama")
    inner = made.model.forward
    made.model.forward = lambda *args, **kwargs: inner(*args, **(kwargs | {"attention_mask": torch.ones(1, 1, 1, 1)}))
    with pytest.raises(UnsupportedModelError, match="differ from its own plain ones"):
        probe(made, name="deaf")


def test_a_model_that_breaks_on_the_cache_is_found() -> None:
    made = make_model("llama")
    made.model.layers[1].self_attn.layer_idx = 5  # of which the cache knows nothing
    with pytest.raises(UnsupportedModelError, match="does not run on the engine's cache"):
        probe(made, name="short")


def test_flash_attention_is_refused_with_the_cure() -> None:
    made = make_model("llama")
    made.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        HFModel(made, name="flex", num_blocks=8)


def test_masks_of_others_are_the_librarys_own() -> None:
    """Models that are run by themselves are not touched, also with padding."""
    runner("gemma3_text")
    ids = torch.tensor([TEXT[:12]])
    with torch.no_grad():
        alone = model("gemma3_text")(input_ids=ids).logits[0]
        padded = model("gemma3_text")(
            input_ids=torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1),
            attention_mask=torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1),
            position_ids=torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.arange(12)[None]], dim=1),
        ).logits[0, 4:]
    assert_close(padded, alone.numpy())
