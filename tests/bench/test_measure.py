"""Who runs when, on what, and how often."""

import pytest

from foredraft.bench.figures import Run, Sample
from foredraft.bench.measure import Messages, count_runs, measure, rotate
from foredraft.bench.workloads import Prompt
from tests.bench.traces import spent

PROMPTS = [Prompt("a", "u", ("one",)), Prompt("b", "u", ("two", "three")), Prompt("c", "v", ("four",))]


class Recorder:
    """Answers with its own name and remembers what it was asked."""

    def __init__(self, name: str, log: list[tuple[str, tuple[int, ...]]], max_num_prompts: int | None = None) -> None:
        self.name = name
        self.max_num_prompts = max_num_prompts
        self._log = log

    def run(self, prompt: list[int], max_tokens: int) -> Run:
        self._log.append((self.name, tuple(prompt)))
        return Run(tuple(range(max_tokens)), f"<{self.name}>", len(prompt), spent(1.0), spent(1.0))


def encode(messages: Messages) -> list[int]:
    return list("".join(message["content"] for message in messages).encode())


def asked(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.fixture
def log() -> list[tuple[str, tuple[int, ...]]]:
    return []


def test_engines_take_turns_and_start_in_rotation(log: list) -> None:
    engines = [Recorder(name, log) for name in ("none", "x", "y")]
    samples = measure(engines, PROMPTS[:1], encode, max_tokens=9, num_repeats=3)
    assert [name for name, _ in log[3:]] == ["none", "x", "y", "x", "y", "none", "y", "none", "x"]
    assert [sample.repeat for sample in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_next_turn_builds_on_the_plain_answer(log: list) -> None:
    engines = [Recorder("none", log), Recorder("x", log)]
    measure(engines, PROMPTS[1:2], encode, max_tokens=9, num_repeats=1)
    assert {prompt for _, prompt in log[2:]} == {asked("two"), asked("two<none>three")}


def test_samples_say_where_they_belong(log: list) -> None:
    seen: list[Sample] = []
    samples = measure([Recorder("none", log)], PROMPTS, encode, max_tokens=9, num_repeats=1, on_sample=seen.append)
    assert seen == samples
    places = [(sample.workload, sample.prompt) for sample in samples]
    assert places == [("u", "a/1"), ("u", "b/1"), ("u", "b/2"), ("v", "c/1")]


def test_the_warm_up_is_short_and_not_a_sample(log: list) -> None:
    samples = measure([Recorder("none", log)], PROMPTS[:1], encode, max_tokens=9, num_repeats=1)
    assert (len(log), len(samples)) == (2, 1)


def test_a_slow_engine_gets_the_first_prompts_of_each_workload(log: list) -> None:
    engines = [Recorder("none", log), Recorder("slow", log, max_num_prompts=1)]
    samples = measure(engines, PROMPTS, encode, max_tokens=9, num_repeats=2)
    assert {sample.prompt for sample in samples if sample.engine == "slow"} == {"a/1", "c/1"}
    assert len(samples) == count_runs(engines, PROMPTS, 2)


def test_rotate() -> None:
    assert rotate("abc", 4) == ["b", "c", "a"]
    assert rotate([], 1) == []
