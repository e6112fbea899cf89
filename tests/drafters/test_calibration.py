from __future__ import annotations

from foredraft.drafters.calibration import BatchCost, Calibration, RunningCost


def test_rates_move_from_the_prior_to_what_is_seen() -> None:
    rates = Calibration((0.5, 0.9))
    for _ in range(100):
        rates.update(0, False)
    assert rates.estimate(0) < 0.02
    assert rates.estimate(1) == 0.9


def test_old_observations_fade() -> None:
    rates = Calibration((0.5,))
    for _ in range(1000):
        rates.update(0, True)
    for _ in range(40):
        rates.update(0, False)
    assert rates.estimate(0) < 0.35


def test_one_slow_start_is_soon_forgotten_and_one_hiccup_hardly_seen() -> None:
    cost = RunningCost()
    cost.observe(0.3)
    assert not cost.is_sure
    cost.observe(0.005)
    assert cost.is_sure
    assert cost.seconds == 0.005
    cost.observe(5.0)
    assert cost.seconds < 0.012


def test_a_batch_that_was_never_seen_costs_what_the_nearest_smaller_does() -> None:
    cost = BatchCost()
    assert cost.seconds(3) == 0.0
    cost.observe(4, 2.0)
    assert cost.seconds(1) == cost.seconds(3) == cost.seconds(16) == 2.0
    cost.observe(1, 1.0)
    cost.observe(9, 3.0)
    assert not cost.is_sure
    cost.observe(1, 1.5)
    assert cost.is_sure
    assert [cost.seconds(n) for n in (1, 2, 4, 8, 16, 99)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    cost.observe(2, 9.0)
    assert cost.seconds(2) == 2.0  # as two passes of one
