"""Acceptance numbers of a trace counted by hand."""

from __future__ import annotations

from foredraft.engine.stats import RequestStats, Round
from foredraft.types import TARGET, Draft, SamplingParams

from .build import generator


def test_a_trace_by_hand() -> None:
    # prompt pass -> 1 token; then drafts of 3 (3 accepted), 3 (1 accepted), none, 2 of another drafter (0 accepted)
    stats = RequestStats()
    stats.start()
    origins = [TARGET]
    stats.count_tokens(1.0)
    for draft, accepted in [
        (Draft([1, 2, 3], source="a"), 3),
        (Draft([1, 2, 3], source="a"), 1),
        (Draft(), 0),
        (Draft([1, 2], source="b"), 0),
    ]:
        stats.count_tokens(2.0)
        stats.count_draft(draft, accepted)
        origins += [draft.source] * accepted + [TARGET]
    got = stats.speculation(origins)
    assert got.num_passes == 4
    assert got.num_drafts == 3
    assert got.num_draft_tokens == 8
    assert got.num_accepted_tokens == 4
    assert got.acceptance_rate == 0.5
    assert got.mean_acceptance_length == 1 + 4 / 3
    assert got.tokens_per_pass == 8 / 4
    assert got.accepted_per_position == (2, 1, 1)
    assert got.by_drafter == {
        "a": {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 4},
        "b": {"drafts": 1, "draft_tokens": 2, "accepted_tokens": 0},
    }
    assert stats.timing(0.5, len(origins)).tokens_per_s == 8 / 1.0


def test_positions_that_were_drafted_in_vain_are_zeros() -> None:
    stats = RequestStats()
    stats.count_draft(Draft([1, 2, 3], source="a"), 0)
    assert stats.speculation([]).accepted_per_position == (0, 0, 0)
    stats.count_draft(Draft([1, 2, 3, 4, 5], parents=[-1, -1, 0, 2, 0], source="a"), 1)  # a tree of three levels
    assert stats.speculation([]).accepted_per_position == (1, 0, 0)
    stats.count_draft(Draft([1, 2, 3, 4], source="a"), 2)
    assert stats.speculation([]).accepted_per_position == (2, 1, 0, 0)


def test_rounds_add_up_to_the_answer_wherever_it_ends() -> None:
    rounds: list[Round] = []
    llm = generator("model")
    llm.on_round(rounds.append)
    for max_tokens in range(1, 16):
        rounds.clear()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        answer = llm.generate(list(b"abcabcabc"), params)[0]
        told = [token for r in rounds for token in [*r.accepted, *([] if r.token is None else [r.token])]]
        assert told == list(answer.token_ids)
        assert sum(len(r.accepted) for r in rounds) == answer.speculation.num_accepted_tokens
    assert sum(r.num_prompt_rows for r in rounds) > 0
