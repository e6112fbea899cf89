from __future__ import annotations

from foredraft.drafters.calibration import Calibration, RunningCost


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
    for seconds in (0.3, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005):
        cost.observe(seconds)
    assert cost.seconds < 0.01
    cost.observe(5.0)
    assert cost.seconds < 0.012
