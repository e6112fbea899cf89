"""Synthetic streams of answers: what raises an alarm, with which cause, how soon; and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from foredraft.server.alarm import DROP_SHARE, NUM_RECENT, AcceptanceAlarm, Alarm, Answer

Rng = np.random.Generator
FLOOR = 0.25


def make_answer(rate: float, rng: Rng, **traits: Any) -> Answer:
    """40 drafts of 3 tokens, of which each is right with chance `rate`, so the accepted count scatters as it does."""
    known: dict[str, Any] = {"is_chat": True, "temperature": 0.0, "num_prompt_tokens": 100}
    return Answer(40, 120, int(rng.binomial(120, rate)), **(known | traits))


def run(answers: Iterable[Answer], floor: float = FLOOR) -> list[tuple[int, Alarm]]:
    """Alarms with the number of answers seen before."""
    alarm = AcceptanceAlarm()
    alarm.watch("d", floor)
    return [(i, found) for i, answer in enumerate(answers) for found in alarm.observe("d", answer)]


def same(rate: float, count: int, seed: int = 0, **traits: Any) -> list[Answer]:
    rng = np.random.default_rng(seed)
    return [make_answer(rate, rng, **traits) for _ in range(count)]


def test_a_wrong_drafter_is_noticed_at_once_and_named() -> None:
    [(when, alarm)] = run(same(0.04, 200))
    assert when == NUM_RECENT - 1
    assert (alarm.kind, alarm.is_on, alarm.cause) == ("low", True, "drafter")


def test_another_tokenizer_is_named() -> None:
    [(_, alarm)] = run(same(0.003, 200))
    assert (alarm.kind, alarm.cause) == ("low", "tokenizer")


def test_a_drafter_without_a_floor_may_be_low() -> None:
    assert run(same(0.01, 200), floor=0.0) == []


def test_short_drafts_say_nothing() -> None:
    assert run([Answer(2, 7, 0, True, 0.0, 100)] * 500) == []


def test_a_sudden_drop_is_noticed_within_the_window() -> None:
    [(when, alarm), *_] = run(same(0.7, 100) + same(0.3, 100))
    assert 100 <= when < 100 + NUM_RECENT
    assert (alarm.kind, alarm.is_on, alarm.cause) == ("drop", True, "template")
    assert "dropped from 70%" in alarm.message


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ({}, {"is_chat": False}, "traffic"),
        ({}, {"temperature": 1.0}, "sampling"),
        ({}, {"num_prompt_tokens": 3000}, "prompt_length"),
        ({"is_chat": False}, {"is_chat": False}, "traffic"),
    ],
)
def test_a_drop_is_put_down_to_what_changed(before: dict[str, Any], after: dict[str, Any], cause: str) -> None:
    [(_, alarm), *_] = run(same(0.7, 100, **before) + same(0.2, 40, **after))
    assert (alarm.kind, alarm.cause) == ("drop", cause)


def test_a_new_kind_of_text_among_the_old() -> None:
    rng = np.random.default_rng(1)
    mixed = [make_answer(0.1 if i % 2 else 0.8, rng) for i in range(60)]
    [(_, alarm), *_] = run(same(0.8, 100) + mixed)
    assert (alarm.kind, alarm.cause) == ("drop", "traffic")
    assert "of 6 requests, the others are as before" in alarm.message


@pytest.mark.parametrize(
    ("suspect", "cause"),
    [
        ({"is_chat": True}, "template"),
        ({"temperature": 1.5}, "sampling"),
        ({"num_prompt_tokens": 100}, "traffic"),  # nothing tells them apart
    ],
)
def test_low_for_some_requests_only(suspect: dict[str, Any], cause: str) -> None:
    rng = np.random.default_rng(2)
    fine = {"is_chat": "is_chat" not in suspect}
    answers = [make_answer(0.02, rng, **suspect) if i % 4 else make_answer(0.15, rng, **fine) for i in range(100)]
    [(_, alarm), *_] = run(answers)
    assert (alarm.kind, alarm.cause) == ("low", cause)


def test_an_alarm_ends_when_acceptance_is_back() -> None:
    got = [alarm for _, alarm in run(same(0.7, 100) + same(0.2, 60) + same(0.7, 100))]
    assert [(a.kind, a.is_on) for a in got] == [("drop", True), ("drop", False)]
    assert got[0].cause == got[1].cause
    got = [alarm for _, alarm in run(same(0.03, 100) + same(0.5, 100))]
    assert [(a.kind, a.is_on) for a in got] == [("low", True), ("low", False)]


def test_a_drop_that_stays_becomes_usual_and_can_be_left_again() -> None:
    got = run(same(0.7, 100) + same(0.4, 500) + same(0.15, 100))
    assert [(a.kind, a.is_on) for _, a in got] == [("drop", True), ("drop", False), ("drop", True)]
    assert "usual from now on" in got[1][1].message
    assert 600 <= got[2][0] < 600 + NUM_RECENT


def test_a_drop_below_the_floor_is_one_alarm_and_never_usual() -> None:
    """It has been better, so the drafter is made for the target."""
    [(_, alarm)] = run(same(0.7, 100) + same(0.02, 600))
    assert (alarm.kind, alarm.is_on) == ("drop", True)


def test_an_alarm_does_not_flicker_at_its_limit() -> None:
    at_limit = same(0.7 * DROP_SHARE, 200)
    got = [alarm for _, alarm in run(same(0.7, 100) + same(0.2, 20) + at_limit)]
    assert [(a.kind, a.is_on) for a in got] == [("drop", True)]


def test_wavering_around_the_limit_does_not_flood_the_log() -> None:
    rng = np.random.default_rng(3)
    wavering = [make_answer(0.7 if (i // 5) % 2 else 0.25, rng) for i in range(2000)]  # means near 2/3 of the usual
    assert len(run(same(0.7, 100) + wavering)) <= 2 * 2000 / 256 + 2
    at_floor = [make_answer(float(rng.uniform(0.05, 0.12)), rng) for _ in range(2000)]
    assert len(run(at_floor)) <= 40


def steady(rng: Rng) -> Iterator[float]:
    while True:
        yield 0.6


def scattered(rng: Rng) -> Iterator[float]:
    """Texts of every kind: rates anywhere."""
    while True:
        yield float(rng.beta(3, 2))


def two_kinds(rng: Rng) -> Iterator[float]:
    """Edits, nearly always right, and free prose, mixed at random."""
    while True:
        yield 0.9 if rng.random() < 0.6 else 0.25


def sessions(rng: Rng) -> Iterator[float]:
    """Successive requests are alike: a first-order autoregression with correlation 0.6."""
    level = 0.0
    while True:
        level = 0.6 * level + 0.8 * float(rng.normal(0, 0.15))
        yield min(max(0.6 + level, 0.02), 0.98)


@pytest.mark.parametrize("stream", [steady, scattered, two_kinds, sessions])
def test_stationary_traffic_raises_no_false_alarm(stream: Callable[[Rng], Iterator[float]]) -> None:
    """40,000 answers over 20 servers: less than 1 false alarm in 10,000."""
    num_false = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rates = stream(rng)
        num_false += sum(alarm.is_on for _, alarm in run(make_answer(next(rates), rng) for _ in range(2000)))
    assert num_false < 4
