"""The library as an engine of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.bench.figures import Run
from foredraft.bench.machine import Meter, Reading
from foredraft.engine.generator import Generator
from foredraft.errors import ForedraftError
from foredraft.types import SamplingParams


class LibraryEngine:
    """`Generator` with one drafter, measured from outside, as a user sees it: by the chunks of its stream."""

    max_num_prompts = None

    def __init__(self, name: str, generator: Generator, meter: Meter) -> None:
        self.name = name
        self._generator = generator
        self._meter = meter

    def run(self, prompt: Sequence[int], max_tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        begin = self._meter.read()
        first: Reading | None = None
        num_first = 0
        completion = None
        for chunk in self._generator.stream(list(prompt), params):
            if first is None and chunk.token_ids:
                first, num_first = self._meter.read(), len(chunk.token_ids)
            completion = chunk.completion or completion
        end = self._meter.read()
        if completion is None or first is None:
            raise ForedraftError(f"{self.name} ended without an answer")
        return Run(
            token_ids=tuple(completion.token_ids),
            text=completion.text,
            num_prompt_tokens=completion.usage.prompt_tokens,
            prefill=self._meter.between(begin, first),
            decode=self._meter.between(first, end),
            speculation=completion.speculation,
            num_first=num_first,
        )
