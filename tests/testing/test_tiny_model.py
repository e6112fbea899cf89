"""The tiny model itself: blind to what a model must be blind to, and to nothing else."""

import numpy as np
import pytest

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.testing import ByteTokenizer, TinyModel

PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 272, 75)]
TABLE = np.array([5, 2, 9, 1], dtype=np.int32)


def all_logits(model: TinyModel, tokens: list[int], chunks: list[int], table: np.ndarray = TABLE) -> np.ndarray:
    out, start = [], 0
    for n in chunks:
        out.append(model.forward([Rows(table, start, tokens[start : start + n], num_logits=n)]).copy())
        start += n
    return np.concatenate(out)


def test_chunks_blocks_and_batches_do_not_change_a_bit() -> None:
    plain = all_logits(TinyModel(), PROMPT, [1] * 75)
    assert np.array_equal(plain, all_logits(TinyModel(), PROMPT, [7] * 10 + [5]))
    assert np.array_equal(plain, all_logits(TinyModel(), PROMPT, [75], np.array([0, 1, 2], dtype=np.int32)))
    other = Rows(np.array([0], dtype=np.int32), 0, [1, 2, 3])
    batched = TinyModel().forward([other, Rows(TABLE, 0, PROMPT, num_logits=75)])
    assert np.array_equal(plain, batched[1:])


@pytest.mark.parametrize("position", [0, 40, 73])
def test_every_earlier_token_matters(position: int) -> None:
    changed = list(PROMPT)
    changed[position] ^= 1
    a = all_logits(TinyModel(), PROMPT, [75])
    b = all_logits(TinyModel(), changed, [75])
    assert np.array_equal(a[:position], b[:position])
    assert all(not np.array_equal(x, y) for x, y in zip(a[position:], b[position:], strict=True))


def test_a_tree_node_is_its_chain_and_may_be_moved() -> None:
    #   committed ─ 7 ─ 8 ─ 11      rows 0 1 4
    #             └ 9 ─ 10          rows 2 3
    model = TinyModel()
    all_logits(model, PROMPT, [75])
    tree = model.forward([Rows(TABLE, 75, [7, 8, 9, 10, 11], parents=[-1, 0, -1, 2, 1], num_logits=5)]).copy()
    left = all_logits(TinyModel(), [*PROMPT, 7, 8, 11, 40], [78, 1])[75:]
    right = all_logits(TinyModel(), [*PROMPT, 9, 10, 40], [77, 1])[75:]
    assert np.array_equal(tree[[0, 1, 4]], left[:3])
    assert np.array_equal(tree[[2, 3]], right[:2])
    model.move_slots(TABLE, [77, 78], [75, 76])
    assert np.array_equal(model.forward([Rows(TABLE, 77, [40])])[0], right[2])


def test_forgotten_move_and_stale_slots_change_the_logits() -> None:
    model = TinyModel()
    all_logits(model, PROMPT, [75])
    model.forward([Rows(TABLE, 75, [7, 9], parents=[-1, -1])])
    after_nine = all_logits(TinyModel(), [*PROMPT, 9, 40], [77])[76]
    assert not np.array_equal(model.forward([Rows(TABLE, 76, [40])])[0], after_nine)


def test_misuse_is_refused() -> None:
    model = TinyModel(num_blocks=4)
    table = np.array([0, 1], dtype=np.int32)
    refused = [
        ([Rows(table, 1, [1])], "never written"),
        ([Rows(table, 0, [1], num_logits=2)], "logits"),
        ([Rows(table[:1], 0, [1] * (BLOCK_SIZE + 1))], "cannot hold"),
        ([Rows(np.array([4], dtype=np.int32), 0, [1])], "not there"),
        ([Rows(np.array([0, 0], dtype=np.int32), 0, [1] * 40)], "twice"),
        ([Rows(table, 0, [272])], "vocabulary"),
        ([Rows(table, 0, [1, 2], parents=[-1, 1])], "parents"),
        ([Rows(table, 0, [1]), Rows(table, 0, [2])], "same slot"),
    ]
    for batch, problem in refused:
        with pytest.raises(ValueError, match=problem):
            model.forward(batch)
    model.forward([Rows(table, 0, [1, 2])])
    with pytest.raises(ValueError, match="another reads"):
        model.forward([Rows(table, 0, [1]), Rows(table, 2, [1])])
    with pytest.raises(ValueError, match="front"):
        model.move_slots(table, [0], [1])


def test_a_pass_that_is_only_timed_may_see_nothing_and_leaves_nothing() -> None:
    model = TinyModel(num_blocks=4)
    model.forward([Rows(np.array([0, 1], dtype=np.int32), 0, [1] * 64)])
    for table, start in (([2, 3], 32), ([0, 0, 3], 64)):  # never written; the same again
        rows = Rows(np.array(table, dtype=np.int32), start, [1, 2], num_logits=0)
        assert model.forward([rows]).shape == (0, 272)
        with pytest.raises(ValueError, match="never written"):
            model.forward([Rows(np.array([3], dtype=np.int32), 2, [1])])


def test_logits_of_the_last_pass_are_poisoned_and_the_head_is_cut() -> None:
    model = TinyModel()
    kept = model.forward([Rows(TABLE, 0, [1])])
    model.limit_head([3, 4])
    logits = model.forward([Rows(TABLE, 1, [1])], hidden_layers=(0, 2))
    assert np.isnan(kept).all()
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [3, 4]
    assert model.hidden_states().shape == (2, 1, 16)


def test_bytes_and_specials() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    ids = tokenizer.encode("<|user|>é<eos>", add_special=True, parse_special=True)
    assert ids == [tokenizer.BOS, tokenizer.USER, 0xC3, 0xA9, tokenizer.EOS]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos><|user|>é<eos>"
    assert tokenizer.encode("<eos>") == list(b"<eos>")
