"""Speculation under load: the sum of all sequences' tokens a second, on a clock that is a sum."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from foredraft.engine.scheduler import Planned
from foredraft.types import SamplingParams
from tests.engine.worlds import World, flat_to_eight


def test_drafts_are_long_for_one_and_gone_when_the_batch_fills_the_flat_region() -> None:
    total = {}
    for num_seqs in (1, 2, 3, 4, 6, 8, 12, 16):
        world = World(flat_to_eight, [0.8] * num_seqs)
        for _ in range(40):
            world.step()
        total[num_seqs] = max(world.lengths())
    assert total[1] >= 6
    assert total[16] == 0
    assert list(total.values()) == sorted(total.values(), reverse=True)


def test_when_others_have_ended_drafts_are_back_at_once() -> None:
    world = World(flat_to_eight, [0.8] * 16)
    for _ in range(40):
        world.step()
    assert not any(world.lengths())
    for seq in world.seqs[1:]:
        world.controller.end(seq)
    world.seqs, world.acceptance = world.seqs[:1], [0.8]
    assert world.lengths()[0] >= 3


def test_the_surest_texts_get_the_rows() -> None:
    world = World(flat_to_eight, [0.95, 0.95, 0.3, 0.3])
    for _ in range(150):
        world.step()
    lengths = world.lengths()
    assert min(lengths[:2]) > max(lengths[2:])


def test_long_contexts_are_drafted_for_less() -> None:
    world = World(flat_to_eight, [0.8, 0.8], contexts=[0, 60_000])  # 6 ms a row beside a pass of 20 ms
    for _ in range(60):
        world.step()
    assert world.lengths()[0] > world.lengths()[1]


@pytest.mark.parametrize("seed", range(20))
def test_speculation_never_makes_the_sum_slower(seed: int) -> None:
    """Whatever passes and drafts cost and however often drafts are right: at worst what learning it takes."""
    rng = np.random.default_rng(seed)
    num_seqs = int(rng.integers(1, 20))
    row, flat, attention = rng.uniform(0, 0.3), rng.integers(1, 20), rng.uniform(0, 1e-6)

    def pass_s(num_rows: int, context: int) -> float:
        return 0.02 * (1 + row * max(0, num_rows - flat) + 0.005 * num_rows) + attention * context

    world = World(
        pass_s,
        rng.uniform(0, 1, num_seqs) ** rng.uniform(0.1, 3),
        draft_s=float(rng.choice([0.0, 0.002, 0.01, 0.03])),
        contexts=rng.integers(0, 3000, num_seqs).tolist(),
    )
    first, later = world.rate(150), world.rate(350)
    assert first > 0.9 * world.plain_rate()
    assert later > 0.98 * world.plain_rate()


@pytest.mark.parametrize(("num_seqs", "gain"), [(1, 2.5), (2, 1.8), (4, 1.2), (8, 1.0), (16, 1.0)])
def test_what_good_drafts_are_worth_at_each_load(num_seqs: int, gain: float) -> None:
    world = World(flat_to_eight, [0.85] * num_seqs)
    assert world.rate(300) >= 0.99 * gain * world.plain_rate()


def test_useless_drafters_of_a_batch_are_off_within_64_tokens_and_each_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(flat_to_eight, [0.0] * 3 + [0.9], draft_s=0.001)
    with caplog.at_level(logging.INFO, logger="foredraft"):
        while min(len(seq.origins) for seq in world.seqs) < 64:
            world.step()
        later = [world.step() for _ in range(400)]
    for seq in world.seqs[:3]:
        assert f"request {seq.request_id}: oracle pauses for " in caplog.text
    drafted = np.count_nonzero(later, axis=0)
    assert (drafted[:3] > 0).all()  # probes
    assert (drafted[:3] <= 10).all()
    assert drafted[3] > 300


def test_a_busy_batch_says_once_that_drafts_wait(caplog: pytest.LogCaptureFixture) -> None:
    world = World(flat_to_eight, [0.8] * 16)
    with caplog.at_level(logging.INFO, logger="foredraft"):
        for _ in range(50):
            world.step()
    assert caplog.text.count(": oracle waits: ") == 16
    assert "16 requests decode at once" in caplog.text


def test_a_prompt_in_the_pass_does_not_make_drafts_look_cheap() -> None:
    """Its rows fill the flat region, so that every drafted row costs arithmetic."""
    world = World(flat_to_eight, [0.8] * 4)
    for _ in range(40):
        world.step()
    alone = sum(world.lengths())
    prompt = World(flat_to_eight, [0.8]).seqs[0]
    world.controller.begin_pass([*world.planned(), Planned(prompt, 500, completes=False, num_draft_slots=0)])
    beside = sum(r.num_tokens for r in world.controller.requests(world.drafter, world.planned()))
    assert beside < alone


def test_drafters_read_prompts_only_where_they_would_draft() -> None:
    few, many = World(flat_to_eight, [0.8]), World(flat_to_eight, [0.8] * 16)
    assert few.controller.is_promising(few.seqs[0], few.drafter)
    assert not many.controller.is_promising(many.seqs[0], many.drafter)
    excluded = World(flat_to_eight, [0.8], params=SamplingParams(drafters=()))
    assert not excluded.controller.is_promising(excluded.seqs[0], excluded.drafter)


def test_a_long_prompt_among_others_is_read_only_for_a_long_answer() -> None:
    world = World(flat_to_eight, [0.8] * 2, draft_s=0.004)
    seq = world.seqs[0]
    seq.tokens = [1] * 2000
    for num_remaining, seconds, is_worth_it in ((20, 0.001, False), (200, 0.0001, True), (200, 0.1, False)):
        seq.max_len = 2000 + num_remaining
        for _ in range(50):
            world.controller.observe_reading(world.drafter, 1000, 1000 * seconds)
        assert world.controller.is_promising(seq, world.drafter) == is_worth_it
    assert world.lengths()[0] == 0
    world.controller.end(world.seqs.pop())
    assert world.controller.is_promising(seq, world.drafter)  # nobody else waits


def test_a_load_that_was_timed_on_a_busy_machine_is_overcome() -> None:
    world = World(flat_to_eight, [0.85])
    world.controller._costs._seconds[1:] *= 5
    world.rate(300)
    assert world.rate(200) > 1.8 * world.plain_rate()
