from __future__ import annotations

import pytest

from foredraft.drafters.ngram import NgramDrafter
from foredraft.errors import ParameterError
from foredraft.types import Draft, DraftRequest, PassPrice, Verdict
from tests.drafters.views import View


def propose(tokens: list[int], n: int, *, min_match: int = 2, **view: object) -> list[int]:
    drafter, seq = NgramDrafter(min_match=min_match), View(tokens, **view)  # type: ignore[arg-type]
    drafter.begin(seq)
    return list(drafter.propose([DraftRequest(seq, n)])[0].tokens)


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),  # round and round from the end of the text
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the newest of equally long matches
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, [3]),  # the longest match
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 3, 4], 3, []),  # no match
        ([1], 3, []),
        ([1, 2, 3, 2], 3, []),  # one token alone is no match
    ],
)
def test_what_followed_the_longest_earlier_match(tokens: list[int], n: int, expected: list[int]) -> None:
    assert propose(tokens, n) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 2], [3, 2]),  # one token, where no two were seen together
        ([1, 2, 3, *(9, 2) * 40, 7, 1, 2], [3, 9]),  # two that are far back, before one that is near
        ([1, 2, 3], []),
    ],
)
def test_one_token_matches_if_two_do_not(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens, 2, min_match=1) == expected


def test_a_prediction_is_searched_too_but_not_across_its_border() -> None:
    assert propose([1, 2], 3, prediction=(1, 2, 3, 4, 5)) == [3, 4, 5]
    assert propose([2, 5, 1, 2], 3, prediction=(7, 1)) == []


@pytest.mark.parametrize(
    ("tokens", "num_prompt", "expected"),
    [
        ([1, 2], 1, ([3, 4], "prediction")),
        ([1, 2, 3, 9, 1, 2], 4, ([3, 4], "prediction")),  # the prompt has it too
        ([9, 1, 2, 5, 9, 1, 2], 0, ([5, 9], "ngram")),  # the answer went on otherwise
        ([8, 1, 2, 5, 8, 1, 2], 4, ([5, 8], "ngram")),  # a longer match
        ([3, 4], 1, ([], "")),  # nothing is predicted after the prediction's end
    ],
)
def test_drafts_say_whether_the_prediction_made_them(
    tokens: list[int], num_prompt: int, expected: tuple[list[int], str]
) -> None:
    drafter, seq = NgramDrafter(), View(tokens, num_prompt_tokens=num_prompt, prediction=(1, 2, 3, 4))
    drafter.begin(seq)
    draft = drafter.propose([DraftRequest(seq, 2)])[0]
    assert (draft.tokens, draft.source) == (expected[0], expected[1]) or (not draft.tokens and not expected[0])


def test_the_prediction_has_its_own_acceptance() -> None:
    drafter, seq = NgramDrafter(), View([1, 2], prediction=(1, 2, 3, 4))
    drafter.begin(seq)
    for _ in range(20):
        draft = drafter.propose([DraftRequest(seq, 1)])[0]
        drafter.observe(seq, draft, Verdict([], 9), None)
    after_misses = drafter.propose([DraftRequest(seq, 1)])[0].confidences
    seq.tokens = [1, 2, 3, 7, 2, 3]
    untouched = drafter.propose([DraftRequest(seq, 1)])[0]
    assert untouched.source == "ngram"
    assert after_misses[0] < 0.1 < untouched.confidences[0]  # type: ignore[index]


def test_a_batch_shares_the_rows_of_a_pass() -> None:
    """Five rows are free, further ones dear: the surest matches get them."""
    drafter = NgramDrafter()
    short, long = View([1, 2, 3, 4, 1, 2], id=1), View([*range(20, 35), *range(20, 33)], id=2)
    for seq in (short, long):
        drafter.begin(seq)
    price = PassPrice([1.0] * 3 + [1.0 + m for m in range(1, 15)], tokens=2.0)
    drafts = drafter.propose([DraftRequest(short, 4, price), DraftRequest(long, 4, price)])
    assert [len(d.tokens) for d in drafts] == [0, 2]
    drafts = drafter.propose([DraftRequest(short, 4, price), DraftRequest(long, 4, price, row_s=0.5)])
    assert [len(d.tokens) for d in drafts] == [2, 0]


def test_the_index_follows_the_text() -> None:
    drafter, seq = NgramDrafter(), View([1, 2, 3])
    drafter.begin(seq)
    assert not drafter.propose([DraftRequest(seq, 4)])[0].tokens
    seq.tokens += [1, 2]
    assert drafter.propose([DraftRequest(seq, 4)])[0].tokens == [3, 1, 2, 3]


def test_what_fails_is_drafted_no_longer() -> None:
    drafter, seq = NgramDrafter(), View([1, 2, 3, 4, 5, 6, 1, 2])
    drafter.begin(seq)
    price = PassPrice([1.0 + 0.1 * k for k in range(9)])
    lengths = []
    for new in range(100, 112):
        draft = drafter.propose([DraftRequest(seq, 8, price)])[0]
        lengths.append(len(draft.tokens))
        drafter.observe(seq, draft, Verdict([], 9), None)
        seq.tokens += [new, 1, 2]
        drafter.observe(seq, Draft([1], source="another"), Verdict([], 9), None)
    assert lengths[0] > 0
    assert lengths[-1] == 0


def test_impossible_match_lengths_are_refused() -> None:
    with pytest.raises(ParameterError, match="prompt_lookup_min"):
        NgramDrafter(min_match=3, max_match=2)
