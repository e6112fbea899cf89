"""The controller's choices, with costs given and no clock."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from foredraft.drafters.base import DraftNeeds
from foredraft.engine.controller import Controller
from foredraft.engine.costs import ROWS, PassCosts
from foredraft.engine.scheduler import Planned
from foredraft.types import Draft, SamplingParams
from tests.engine.build import generator

FLAT = [1.0 + 0.01 * n for n in ROWS]


class Named:
    needs = DraftNeeds(least_acceptance=0.25)

    def __init__(self, name: str) -> None:
        self.name = name


def make(  # type: ignore[no-untyped-def]
    *names: str, seconds: float = 0.3, max_draft: int = 8, params: SamplingParams | None = None
):
    drafters = [Named(n) for n in names]
    controller = Controller(drafters, PassCosts(FLAT), max_draft=max_draft)  # type: ignore[arg-type]
    gen = generator()
    seq = gen._make_sequences(gen.prepare([[1, 2, 3]], SamplingParams(temperature=0)))[0]
    seq.params = params or seq.params
    seq.max_len = 10_000
    seq.tokens.append(5)
    seq.origins.append("target")
    controller.begin(seq)
    for d in drafters:
        controller.observe_draft(d, [Draft([1], source=d.name)], seconds)  # type: ignore[arg-type]
    return controller, seq, drafters


def ask(controller, seq, drafter):  # type: ignore[no-untyped-def]
    """What the drafter is asked for in the next pass, if at all."""
    planned = [Planned(seq, 1, completes=True, num_draft_slots=64)]
    controller.begin_pass(planned)
    requests = controller.requests(drafter, planned)
    return requests[0] if requests else None


def play(controller, seq, drafter, num_accepted: int) -> bool:  # type: ignore[no-untyped-def]
    """One round in which so many tokens are right at most; whether there was a draft."""
    request = ask(controller, seq, drafter)
    proposed = 0 if request is None else request.num_tokens
    draft = Draft([5] * proposed, source="its own word")
    if request is not None:
        assert controller.settle(drafter, draft, request, [], 1)
    accepted = min(num_accepted, proposed)
    seq.tokens += [5] * (accepted + 1)
    seq.origins += [drafter.name] * accepted + ["target"]
    controller.observe_verdict(seq, draft, accepted)
    return proposed > 0


def test_a_useless_drafter_is_off_within_64_tokens_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    controller, seq, (drafter,) = make("model")
    with caplog.at_level(logging.INFO, logger="foredraft"):
        while len(seq.origins) < 64:
            play(controller, seq, drafter, 0)
        later = [play(controller, seq, drafter, 0) for _ in range(300)]
    assert sum(later) <= 8  # probes
    assert sum(later) > 0
    assert "request 1: model pauses for " in caplog.text


def test_a_drafter_that_is_off_is_asked_for_trials() -> None:
    controller, seq, (drafter,) = make("model")
    assert not ask(controller, seq, drafter).is_trial
    for _ in range(64):
        play(controller, seq, drafter, 0)
    while (request := ask(controller, seq, drafter)) is None:
        play(controller, seq, drafter, 0)
    assert request.is_trial


def test_a_draft_that_was_slow_once_is_timed_again() -> None:
    controller, seq, (drafter,) = make("model", seconds=30.0)
    times = 0
    for _ in range(200):
        if play(controller, seq, drafter, 8):
            times += 1
            controller.observe_draft(drafter, [Draft([1], source=drafter.name)], 0.1)
    assert times > 100
    controller, seq, (drafter,) = make("model", seconds=30.0)
    controller.observe_draft(drafter, [Draft([1], source=drafter.name)], 30.0)
    assert not any(play(controller, seq, drafter, 8) for _ in range(200))  # it is as slow as that


def test_it_comes_back_when_the_text_changes() -> None:
    controller, seq, (drafter,) = make("model")
    for _ in range(64):
        play(controller, seq, drafter, 0)
    drafted = [play(controller, seq, drafter, 8) for _ in range(200)]
    assert all(drafted[-20:])


def test_a_perfect_drafter_gets_the_whole_length() -> None:
    controller, seq, (drafter,) = make("model", seconds=0.05)
    for _ in range(30):
        play(controller, seq, drafter, 8)
    assert ask(controller, seq, drafter).num_tokens == 8


def test_half_right_gets_a_short_draft() -> None:
    controller, seq, (drafter,) = make("model")
    for i in range(60):
        play(controller, seq, drafter, 1 + i % 2)
    assert 1 <= ask(controller, seq, drafter).num_tokens <= 3


def test_the_last_tokens_are_not_overdrafted() -> None:
    controller, seq, (drafter,) = make("model", seconds=0.01)
    seq.max_len = len(seq.tokens) + 3
    assert ask(controller, seq, drafter).num_tokens == 2
    seq.max_len = len(seq.tokens) + 1
    assert ask(controller, seq, drafter) is None


def test_the_cheaper_draft_is_taken_only_if_it_promises_more() -> None:
    controller, seq, (cheap, dear) = make("ngram", "model")
    for _ in range(20):
        play(controller, seq, dear, 5)
    request = ask(controller, seq, cheap)
    good = Draft([1] * 8, confidences=[0.99] * 8, source="ngram")
    poor = Draft([1], confidences=[0.2], source="ngram")
    assert controller.settle(cheap, good, request, [dear], 1)
    assert not controller.settle(cheap, poor, request, [dear], 1)
    assert controller.settle(cheap, poor, request, [], 1)


def test_a_draft_that_was_not_made_for_the_target_is_named(caplog: pytest.LogCaptureFixture) -> None:
    controller, seq, (drafter,) = make("model")
    num_drafts = 0
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        for _ in range(9000):
            num_drafts += play(controller, seq, drafter, num_drafts % 8 == 7)
    assert caplog.text.count("model: 2 of its first 16 drafts") == 1
    assert caplog.text.count("abnormally few: is the draft of the same family") == 1


def test_what_does_not_pay_is_back_only_by_a_trial_that_is_right() -> None:
    controller, seq, (drafter,) = make("model")
    assert not all(play(controller, seq, drafter, 0) for _ in range(100))
    trials = []
    for _ in range(200):
        before = len(seq.origins)
        if play(controller, seq, drafter, 1):  # half right: the estimate alone would say that it pays again
            trials.append(before)
    assert 2 <= len(trials) <= 3
    assert any(play(controller, seq, drafter, 8) for _ in range(1000))
    assert [play(controller, seq, drafter, 8) for _ in range(50)] == [True] * 50


def test_luck_in_a_trial_does_not_shorten_the_wait_for_the_next() -> None:
    controller, seq, (drafter,) = make("model")
    trials = []
    for _ in range(1000):
        request = ask(controller, seq, drafter)
        is_trial = request is not None and request.is_trial
        if is_trial:
            trials.append(len(seq.origins))
        play(controller, seq, drafter, 8 if is_trial else 0)
    waits = [b - a for a, b in pairwise(trials)]
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]


def test_a_request_names_its_drafters() -> None:
    controller, seq, drafters = make("ngram", "model", params=SamplingParams(drafters=["model"]))
    assert [ask(controller, seq, d) is not None for d in drafters] == [False, True]
    for params in (SamplingParams(drafters=()), SamplingParams(num_speculative_tokens=0)):
        controller, seq, drafters = make("ngram", "model", params=params)
        assert [ask(controller, seq, d) for d in drafters] == [None, None]
    controller, seq, (drafter,) = make("model", seconds=0.01, params=SamplingParams(num_speculative_tokens=2))
    assert ask(controller, seq, drafter).num_tokens == 2
