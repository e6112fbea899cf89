from __future__ import annotations

import numpy as np
import pytest

from foredraft.algo.masks import cut_draft, is_allowed, masks_along, pack_mask, unpack_mask
from foredraft.types import Draft

from .grammars import ToyGrammar, zeros_and_ones


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_a_mask_holds_what_was_packed(vocab: int):
    allowed = np.random.default_rng(vocab).random(vocab) < 0.5
    words = pack_mask(allowed)
    assert words.shape == ((vocab + 31) // 32,)
    assert words.dtype == np.uint32
    assert np.array_equal(unpack_mask(words, vocab), allowed)
    assert [is_allowed(words, t) for t in range(vocab)] == allowed.tolist()
    assert not is_allowed(words, 32 * len(words))
    assert pack_mask(np.arange(40) == 33).tolist() == [0, 2]


def grammar() -> ToyGrammar:
    return ToyGrammar(3, zeros_and_ones)


def chain(*tokens: int) -> Draft:
    return Draft(list(tokens), confidences=[0.5] * len(tokens), source="x")


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ((0, 1, 0), (0, 1, 0)),  # all allowed
        ((0, 1, 1, 0), (0, 1)),  # the second 1 in a row is not
        ((2, 0), ()),  # neither is an end at the beginning
        ((1, 2, 0, 0), (1, 2)),  # nothing follows the end
        ((0, 0, 1, 2), (0, 0, 1, 2)),
        ((0, 0, 0, 0), (0, 0, 0)),
    ],
)
def test_a_chain_ends_before_the_first_token_that_is_not_allowed(tokens: tuple[int, ...], kept: tuple[int, ...]):
    cut = cut_draft(chain(*tokens), grammar())
    assert tuple(cut.tokens) == kept
    assert cut.confidences == [0.5] * len(kept)
    assert (cut.parents, cut.probs, cut.source) == (None, None, "x")


@pytest.mark.parametrize(
    ("tokens", "kept"), [((0, 1, 1, 0), (0, 1, 1)), ((2, 0), (2,)), ((1, 2, 0, 0), (1, 2)), ((0, 1, 0), (0, 1, 0))]
)
def test_a_drawn_token_stays_and_ends_the_draft(tokens: tuple[int, ...], kept: tuple[int, ...]):
    probs = np.arange(3.0 * len(tokens), dtype=np.float32).reshape(-1, 3)
    cut = cut_draft(Draft(list(tokens), probs=probs), grammar())
    assert tuple(cut.tokens) == kept
    assert np.array_equal(cut.probs, probs[: len(kept)])
    assert cut.probs.flags.c_contiguous


def test_a_tree_loses_what_is_not_allowed_and_what_hangs_on_it():
    tree = Draft([2, 0, 1, 1, 1, 2, 0], parents=[-1, -1, -1, 0, 2, 2, 5])
    cut = cut_draft(tree, grammar())
    assert (cut.tokens, cut.parents) == ([0, 1, 2], [-1, -1, 1])


def test_drawn_children_stay_and_what_hangs_on_them_goes():
    probs = np.arange(15, dtype=np.float32).reshape(5, 3)
    cut = cut_draft(Draft([2, 1, 0, 1, 0], parents=[-1, -1, 0, 1, 1], probs=probs), grammar())
    assert (cut.tokens, cut.parents) == ([2, 1, 1, 0], [-1, -1, 1, 1])
    assert np.array_equal(cut.probs, probs[[0, 1, 3, 4]])


def allowed(masks: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(unpack_mask(row, 3)).tolist() for row in masks]


def test_each_row_has_the_mask_of_its_own_place():
    assert allowed(masks_along(Draft(), grammar())) == [[0, 1]]
    assert allowed(masks_along(chain(0, 1, 0), grammar())) == [[0, 1], [0, 1], [0, 2], [2]]
    tree = Draft([0, 1, 1, 0], parents=[-1, -1, 0, 1])
    assert allowed(masks_along(tree, grammar())) == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 1]]


def test_anything_may_follow_the_end_and_a_token_that_will_be_rejected():
    assert allowed(masks_along(chain(1, 2), grammar())) == [[0, 1], [0, 2], [0, 1, 2]]
    assert allowed(masks_along(Draft([1, 1], probs=np.ones((2, 3))), grammar())) == [[0, 1], [0, 2], [0, 1, 2]]


def test_masks_follow_the_committed_text():
    place = grammar()
    assert not place.advance(1)
    assert allowed(masks_along(chain(0), place)) == [[0, 2], [0, 1]]
    assert place.advance(2)
