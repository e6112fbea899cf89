"""Costs of passes on a model whose clock is set by hand."""

import pytest

from foredraft.bench.machine import Reading, Spent
from foredraft.bench.passes import PassCost, measure_passes, pass_cost
from foredraft.errors import ParameterError
from foredraft.testing.tiny_model import TinyModel


class RowMeter:
    """Time goes on by 1 ms a pass and 1 ms a row of the model."""

    def __init__(self, model: TinyModel) -> None:
        self._model = model

    def read(self) -> Reading:
        return Reading(1e-3 * (len(self._model.rows_per_pass) + sum(self._model.rows_per_pass)), 0.0, ())

    def between(self, begin: Reading, end: Reading) -> Spent:
        return Spent(end.wall_s - begin.wall_s, 0.0, None)


def costs_of(model: TinyModel, rows: list[int], contexts: list[int], num_repeats: int = 2) -> list[PassCost]:
    meter = RowMeter(model)
    return measure_passes(model, rows, contexts, num_repeats=num_repeats, read_gb_per_s=10.0, meter=meter)


def test_costs_are_relative_to_one_row() -> None:
    costs = costs_of(TinyModel(), [1, 4, 7], [64])
    assert [(cost.rows, cost.context) for cost in costs] == [(1, 64), (4, 64), (7, 64)]
    assert [cost.ms for cost in costs] == pytest.approx([2.0, 5.0, 8.0])
    assert [cost.ratio for cost in costs] == pytest.approx([1.0, 2.5, 4.0])


def test_one_row_is_timed_even_if_not_asked_for() -> None:
    (cost,) = costs_of(TinyModel(), [3], [33])
    assert cost.ratio == pytest.approx(2.0)


def test_passes_alternate_after_a_context_filled_in_chunks() -> None:
    model = TinyModel(max_model_len=1024)
    costs_of(model, [1, 2], [600])
    assert model.rows_per_pass == [512, 88, 1, 2, 1, 2]


def test_bandwidth_is_weights_over_time() -> None:
    cost = pass_cost(4, 512, 0.040, 0.020, weight_bytes=1_000_000_000, read_gb_per_s=50.0)
    assert (cost.ms, cost.ratio) == (pytest.approx(40.0), pytest.approx(2.0))
    assert (cost.gb_per_s, cost.bandwidth_share) == (pytest.approx(25.0), pytest.approx(0.5))


def test_a_context_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ParameterError, match="--context 510 and 4 rows do not fit in 512 tokens"):
        costs_of(TinyModel(), [4], [64, 510])
