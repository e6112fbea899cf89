"""Figures of traces that were worked out by hand."""

import pytest

from foredraft.bench.figures import ALL, Row, geometric_mean, relative_deviation, summarise
from tests.bench.traces import run, sample, speculation


def only_row(rows: list[Row], drafter: str, workload: str = "w") -> Row:
    (row,) = [row for row in rows if (row.drafter, row.workload) == (drafter, workload)]
    return row


def test_speed_is_the_geometric_mean_over_prompts_of_the_median_over_repeats() -> None:
    plain = [sample("none", run(decode_s=1.0), prompt=p, repeat=r) for p in "ab" for r in range(3)]
    fast_a = [sample("ngram", run(decode_s=s), prompt="a", repeat=r) for r, s in enumerate((0.25, 0.5, 5.0))]  # 20/s
    fast_b = [sample("ngram", run(decode_s=s), prompt="b", repeat=r) for r, s in enumerate((0.125,) * 3)]  # 80/s
    row = only_row(summarise(plain + fast_a + fast_b, "none"), "ngram")
    assert row.speed.tokens_per_s == pytest.approx(40.0)
    assert row.speed.plain_tokens_per_s == pytest.approx(10.0)
    assert row.speed.speedup == pytest.approx(4.0)


def test_extremes_are_those_of_whole_repeats() -> None:
    plain = [sample("none", run(decode_s=s), repeat=r) for r, s in enumerate((1.0, 2.0, 4.0))]
    other = [sample("ngram", run(decode_s=s), repeat=r) for r, s in enumerate((0.5, 2.0, 1.0))]
    speed = only_row(summarise(plain + other, "none"), "ngram").speed
    assert (speed.speedup_min, speed.speedup_max) == (pytest.approx(1.0), pytest.approx(4.0))


def test_spread_is_the_median_absolute_deviation_of_the_median() -> None:
    assert relative_deviation([8.0, 10.0, 13.0]) == pytest.approx(0.2)
    assert relative_deviation([10.0]) == 0.0


@pytest.mark.parametrize(("ids", "num_identical"), [((0, 0), 2), ((0, 1), 1), ((1, 1), 0)])
def test_identical_means_every_run_of_every_prompt(ids: tuple[int, int], num_identical: int) -> None:
    plain = [sample("none", run(), prompt=p, repeat=r) for p in "ab" for r in range(2)]
    other = [sample("ngram", run(), prompt=p) for p in "ab"]
    other += [sample("ngram", run(first_id=i), prompt=p, repeat=1) for p, i in zip("ab", ids, strict=True)]
    row = only_row(summarise(plain + other, "none"), "ngram")
    assert row.num_identical == num_identical
    assert row.identical == (num_identical == 2)


def test_plain_decoding_that_differs_from_itself_is_shown() -> None:
    samples = [sample("none", run(first_id=i), repeat=i) for i in range(2)]
    assert not only_row(summarise(samples, "none"), "none").identical


def test_short_answers_are_compared_but_not_timed() -> None:
    samples = [sample(e, run(num_tokens=n), prompt=p) for e in ("none", "x") for p, n in (("a", 5), ("b", 11))]
    row = only_row(summarise(samples, "none"), "x")
    assert (row.num_prompts, row.num_timed, row.speed.tokens_per_s) == (2, 1, pytest.approx(10.0))
    short = only_row(summarise([s for s in samples if s.prompt == "a"], "none"), "x")
    assert (short.speed.tokens_per_s, short.speed.speedup, short.speed.spread, short.identical) == (None,) * 3 + (True,)


def test_acceptance_counts_are_pooled_before_dividing() -> None:
    counts = [speculation(4, 12, (3, 1), num_passes=6), speculation(1, 8, (1, 1, 1, 1), num_passes=4)]
    samples = [sample("none", run(), prompt=p) for p in "ab"]
    samples += [sample("ngram", run(speculation=c), prompt=p) for p, c in zip("ab", counts, strict=True)]
    work = only_row(summarise(samples, "none"), "ngram").work
    assert work.mean_acceptance_length == pytest.approx(1 + 8 / 5)
    assert work.acceptance_rate == pytest.approx(8 / 20)
    assert work.tokens_per_pass == pytest.approx(20 / 10)
    assert work.accepted_per_position == (4, 2, 1, 1)


def test_costs_are_of_decoded_tokens() -> None:
    samples = [sample("none", run(cpu_s=2.0, joules=30.0, prefill_s=0.5))]
    work = only_row(summarise(samples, "none"), "none").work
    assert (work.cpu_s_per_token, work.joules_per_token, work.prefill_tokens_per_s) == (0.2, 3.0, 200.0)


def test_what_nobody_measured_is_none() -> None:
    work = only_row(summarise([sample("none", run())], "none"), "none").work
    assert (work.joules_per_token, work.mean_acceptance_length, work.tokens_per_pass) == (None, None, None)


def test_an_engine_that_answered_fewer_prompts_is_compared_on_those() -> None:
    plain = [sample("none", run(decode_s=s), prompt=p) for p, s in (("a", 1.0), ("b", 0.1))]
    speed = only_row(summarise([*plain, sample("slow", run(decode_s=2.0), prompt="a")], "none"), "slow").speed
    assert (speed.plain_tokens_per_s, speed.speedup) == (pytest.approx(10.0), pytest.approx(0.5))


def test_workloads_weigh_the_same_in_the_total() -> None:
    samples = [sample("none", run(), workload=w, prompt=f"{w}{i}") for w, n in (("u", 1), ("v", 4)) for i in range(n)]
    samples += [sample("x", run(decode_s=0.5), workload="u", prompt="u0")]  # 2 times as fast, one prompt
    samples += [sample("x", run(decode_s=0.125), workload="v", prompt=f"v{i}") for i in range(4)]  # 8 times, four
    row = only_row(summarise(samples, "none"), "x", ALL)
    assert row.speed.speedup == pytest.approx(4.0)
    assert (row.num_prompts, row.num_tokens) == (5, 55)


def test_one_workload_has_no_total() -> None:
    assert [row.workload for row in summarise([sample("none", run())], "none")] == ["w"]


def test_plain_comes_first_whatever_ran_first() -> None:
    assert [row.drafter for row in summarise([sample("x", run()), sample("none", run())], "none")] == ["none", "x"]


def test_a_prompt_without_plain_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="none has not run on b"):
        summarise([sample("none", run(), prompt="a"), sample("x", run(), prompt="b")], "none")


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


@pytest.mark.parametrize(("num_repeats", "spread"), [(1, None), (2, 0.0)])
def test_a_single_repeat_has_no_spread(num_repeats: int, spread: float | None) -> None:
    samples = [sample("none", run(), repeat=r) for r in range(num_repeats)]
    assert only_row(summarise(samples, "none"), "none").speed.spread == spread
