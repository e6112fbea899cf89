"""The run itself: every engine answers every prompt, in turns, so that all share a slow minute of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from foredraft.bench.figures import Run, Sample
from foredraft.bench.workloads import Prompt

T = TypeVar("T")
Messages = list[Mapping[str, str]]

#: Between two engines: the threads of the one before have stopped spinning.
PAUSE_S = 0.02
WARM_UP_TOKENS = 8


class Engine(Protocol):
    """What answers prompts: the library with one drafter, or a peer. Greedy."""

    @property
    def name(self) -> str: ...
    @property
    def max_num_prompts(self) -> int | None:
        """Of each workload, for engines too slow to answer all. None: no limit."""
        ...

    def run(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Token ids in, at most `max_tokens` out, an end-of-text token included."""
        ...


def measure(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    encode: Callable[[Messages], Sequence[int]],
    *,
    max_tokens: int,
    num_repeats: int,
    on_sample: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Answers of all engines to all turns. The first engine is plain decoding.

    `encode` makes a chat into token ids, the same for all engines. A further turn builds on plain decoding's answer, so
    that all engines see the same conversation.
    """
    plain = engines[0]
    warm_up(engines, encode([{"role": "user", "content": prompts[0].turns[0]}]))
    samples: list[Sample] = []
    for number, prompt in enumerate(prompts):
        rank = sum(other.category == prompt.category for other in prompts[:number])
        chosen = [engine for engine in engines if engine.max_num_prompts is None or rank < engine.max_num_prompts]
        messages: Messages = []
        for turn, question in enumerate(prompt.turns, start=1):
            messages.append({"role": "user", "content": question})
            ids = encode(messages)
            name = f"{prompt.id}/{turn}"
            answers = {}
            for repeat in range(num_repeats):
                for engine in rotate(chosen, number + repeat):
                    time.sleep(PAUSE_S)
                    run = engine.run(ids, max_tokens)
                    answers[engine.name] = run.text
                    samples.append(Sample(prompt.category, name, engine.name, repeat, run))
                    if on_sample is not None:
                        on_sample(samples[-1])
            messages.append({"role": "assistant", "content": answers[plain.name]})
    return samples


def warm_up(engines: Sequence[Engine], prompt: Sequence[int]) -> None:
    """A short answer of each, not counted: weights come into memory, threads start."""
    for engine in engines:
        engine.run(prompt, WARM_UP_TOKENS)


def count_runs(engines: Sequence[Engine], prompts: Sequence[Prompt], num_repeats: int) -> int:
    """How many samples `measure` will make, for a progress bar."""
    turns: dict[str, list[int]] = {}
    for prompt in prompts:
        turns.setdefault(prompt.category, []).append(len(prompt.turns))
    return num_repeats * sum(sum(of[: engine.max_num_prompts]) for engine in engines for of in turns.values())


def rotate(items: Sequence[T], by: int) -> list[T]:
    """[a, b, c] by 1: [b, c, a]. Nobody always runs first, or always after the same neighbour's heat."""
    if not items:
        return []
    by %= len(items)
    return [*items[by:], *items[:by]]
