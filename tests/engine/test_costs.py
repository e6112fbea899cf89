"""What passes cost, by rows and context."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from foredraft.engine.costs import CONTEXTS, ROWS, PassCosts, measure_pass_costs
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.testing import TinyModel

FLAT = [1.0 + 0.01 * n for n in ROWS]


def test_costs_follow_what_passes_take() -> None:
    costs = PassCosts(FLAT)
    before = costs.base_s(8)
    for _ in range(50):
        costs.observe([(8, 0)], 1.5 * before)
    assert costs.base_s(8) == pytest.approx(1.5 * before, rel=0.1)
    assert costs.base_s(16) >= costs.base_s(8) >= costs.base_s(4) >= costs.base_s(1)
    costs.observe([(512, 0)], 100.0)  # a prompt
    assert costs.base_s(64) < 10


def test_a_cost_overestimated_once_is_forgotten() -> None:
    costs = PassCosts(FLAT)
    before = costs.base_s(8)
    for _ in range(50):
        costs.observe([(8, 0)], 2.0 * before)
    for _ in range(600):
        costs.observe([(1, 0)], costs.base_s(1))
    assert costs.base_s(8) / costs.base_s(1) < FLAT[2] / FLAT[0]


def test_hope_grows_until_it_is_disappointed_and_then_more_slowly() -> None:
    costs = PassCosts([1.0, 1.2, 2.0, 4.0, 8.0, 16.0])

    def passes_until_tried() -> int:
        for count in range(10_000):
            if costs.base_s(16) < 3.0:
                costs.observe([(16, 0)], 4.0)
                return count
            costs.observe([(2, 0)], costs.base_s(2))
        raise AssertionError("never tried")

    waits = [passes_until_tried() for _ in range(4)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(waits))
    assert costs.base_s(16) == pytest.approx(4.0, rel=0.05)


def test_a_count_overestimated_at_load_is_put_right_once_tried() -> None:
    costs = PassCosts([1.0, 5.0, 5.0, 5.0, 10.0, 20.0])
    for _ in range(10):
        costs.observe([(4, 0)], 1.1)
    assert costs.base_s(4) < 1.2


def test_rows_beyond_the_last_count_cost_in_proportion() -> None:
    costs = PassCosts(FLAT)
    assert costs.base_s(512) == pytest.approx(8 * costs.base_s(64))
    assert costs.with_draft(60, 8) == [costs.base_s(60 + m) for m in range(9)]


def test_context_adds_along_its_curve_and_on_as_it_ends() -> None:
    costs = PassCosts(FLAT, (0, 512, 2048), (0.0, 0.1, 0.2))  # flattens as windows do
    assert costs.row_s(256) == pytest.approx(0.05)
    assert costs.row_s(1280) == pytest.approx(0.15)
    assert costs.row_s(2048 + 1536) == pytest.approx(0.3)
    assert PassCosts(FLAT).row_s(10_000) == 0


def test_rows_and_context_are_told_apart() -> None:
    """Attention takes three times what it did at load, the rest what it did."""
    costs = PassCosts([0.02 + 0.0001 * n for n in ROWS], (0, 2048), (0.0, 0.002))
    rng = np.random.default_rng(0)
    for _ in range(600):
        shares = [(int(rng.integers(1, 8)), int(c)) for c in rng.integers(0, 4000, rng.integers(1, 4))]
        rows = sum(n for n, _ in shares)
        costs.observe(shares, 0.02 + 0.0001 * rows + 3 * sum(n * c * 0.002 / 2048 for n, c in shares))
    assert costs.row_s(2048) == pytest.approx(0.006, rel=0.15)
    assert costs.base_s(4) == pytest.approx(0.0204, rel=0.15)


class Clock:
    """A model whose passes take what `pass_s` (rows, context) says, on a clock of its own."""

    max_model_len, num_blocks = 4096, 200

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pass_s: Callable[[int, int], float]) -> None:
        self.pass_s, self.now, self.num_passes, self.hiccup_at = pass_s, 0.0, 0, 0
        monkeypatch.setattr("foredraft.engine.costs.perf_counter", lambda: self.now)

    def forward(self, batch: list[Rows], hidden_layers: object = ()) -> None:
        self.num_passes += 1
        seconds = self.pass_s(len(batch[0].tokens), batch[0].start)
        self.now += 40 * seconds if self.num_passes == self.hiccup_at else seconds


def test_what_a_context_adds_is_told_by_row_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Clock(monkeypatch, lambda rows, context: 0.010 + 0.001 * rows + context * (0.00002 + 0.00001 * rows))
    costs = measure_pass_costs(model, range(2))  # type: ignore[arg-type]
    assert costs.base_s(1) == pytest.approx(0.011)
    assert costs.row_s(1024) == pytest.approx(0.01024)
    assert costs.context_s(5, 4096) == pytest.approx(4096 * (0.00002 + 0.00005))


def test_costs_go_on_along_the_line_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measure_pass_costs(Clock(monkeypatch, lambda rows, _: 0.02 + 0.001 * rows), range(2))  # type: ignore[arg-type]
    assert [costs.base_s(n) for n in (1, 8, 16, 32, 48, 64)] == pytest.approx(
        [0.021, 0.028, 0.036, 0.052, 0.068, 0.084]
    )


@pytest.mark.parametrize("hiccup_at", range(3, 19))
def test_one_slow_moment_at_load_does_not_make_more_work_dear(hiccup_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes so slow that most are timed once or twice; whichever is disturbed, those after it tell that it was."""
    model = Clock(monkeypatch, lambda rows, context: 0.1 + 0.001 * rows + 0.00001 * context)
    model.hiccup_at = hiccup_at
    costs = measure_pass_costs(model, range(2))  # type: ignore[arg-type]
    assert costs.base_s(16) < 0.2
    assert costs.context_s(4, 512) < 0.05


@pytest.mark.parametrize("max_model_len", [64, 512, 4096])
def test_measuring_leaves_the_cache_alone_but_for_its_blocks(max_model_len: int) -> None:
    """Long contexts are timed without computing them, and without touching their memory."""
    seen: list[tuple[int, int]] = []

    class Model(TinyModel):
        def forward(self, batch, hidden_layers=()):  # type: ignore[no-untyped-def]
            seen.append((batch[0].start, len(batch[0].tokens)))
            return super().forward(batch, hidden_layers)

    model = Model(max_model_len=max_model_len, num_blocks=200)
    costs = measure_pass_costs(model, range(2))
    assert not model._slots[2 * BLOCK_SIZE :].any()
    contexts = {start for start, _ in seen}
    assert max(contexts) == {64: 32, 512: 480, 4096: CONTEXTS[-1]}[max_model_len]
    assert costs.base_s(1) > 0
    assert max(count for _, count in seen) == 16


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 33])
def test_a_cache_smaller_than_the_timed_contexts_is_measured_too(num_blocks: int) -> None:
    costs = measure_pass_costs(TinyModel(max_model_len=4096, num_blocks=num_blocks), range(min(2, num_blocks)))
    assert costs.row_s(0) == 0.0
    assert costs.base_s(1) > 0
