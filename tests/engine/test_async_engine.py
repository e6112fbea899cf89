"""The engine beside an event loop: the same texts as alone, and nothing lost when requests come, leave and fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from foredraft.engine.async_engine import AnswerStream, AsyncEngine
from foredraft.engine.generator import Generator
from foredraft.engine.grammar import Grammar, GrammarCompiler
from foredraft.errors import (
    EngineFailedError,
    EngineUnavailableError,
    ModelFileError,
    NumericalError,
    ParameterError,
    PromptTooLongError,
    QueueFullError,
)
from foredraft.testing import ByteTokenizer
from foredraft.types import Chunk, SamplingParams, StructuredOutputs
from tests.engine.build import generator

T = TypeVar("T")

PATIENCE = 60.0
PROMPT = list(b"abcabcabc")


def run(
    work: Callable[[AsyncEngine], Awaitable[T]],
    load: Callable[[], Generator] = lambda: generator("ngram"),
    max_num_waiting: int = 64,
) -> T:
    """`work` with an engine that has loaded, which must be idle and whole in the end."""

    async def main() -> T:
        engine = AsyncEngine(load, max_num_waiting=max_num_waiting)
        engine.start()
        made = await engine.loaded()
        result = await asyncio.wait_for(work(engine), PATIENCE)
        await engine.close()
        made.engine.check_integrity()
        assert not made.has_unfinished
        return result

    return asyncio.run(main())


async def read(stream: AnswerStream) -> list[str]:
    """Texts of all choices."""
    texts: dict[int, str] = {}
    with stream:
        async for chunks in stream:
            for chunk in chunks:
                texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
                assert chunk.completion is None or chunk.completion.text == texts[chunk.index]
    return [texts[index] for index in sorted(texts)]


class Gate:
    """Holds the steps of a generator."""

    def __init__(self, held: Generator) -> None:
        self.open = threading.Event()
        self.num_steps = 0
        step = held.step

        def step_when_open() -> list[Chunk]:
            assert self.open.wait(PATIENCE)
            self.num_steps += 1
            return step()

        held.step = step_when_open  # type: ignore[method-assign]


def test_many_requests_at_once_are_each_what_they_are_alone() -> None:
    requests = [SamplingParams(seed=seed, max_tokens=10 + seed, n=1 + seed % 3) for seed in range(12)]

    async def work(engine: AsyncEngine) -> list[list[str]]:
        async def ask(params: SamplingParams) -> list[str]:
            return await read(await engine.submit([PROMPT], params))

        return await asyncio.gather(*map(ask, requests))

    alone = [[c.text for c in generator("ngram").generate(PROMPT, params)] for params in requests]
    assert run(work) == alone


def test_choices_of_several_prompts_are_numbered_through() -> None:
    prompts = [list(b"abab"), list(b"xyxyxy")]
    params = SamplingParams(seed=1, max_tokens=12, n=2)
    texts = run(lambda engine: _ask(engine, prompts, params))
    assert texts == [c.text for prompt in prompts for c in generator("ngram").generate(prompt, params)]


async def _ask(engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams) -> list[str]:
    return await read(await engine.submit(prompts, params))


def test_a_stream_that_is_left_is_aborted_before_the_next_step() -> None:
    held = generator("ngram")
    gate = Gate(held)

    async def work(engine: AsyncEngine) -> int:
        stream = await engine.submit([PROMPT], SamplingParams(max_tokens=400, ignore_eos=True, n=3))
        with stream:
            pass
        gate.open.set()
        while engine.snapshot().num_running or engine.snapshot().num_waiting or not gate.num_steps:
            await asyncio.sleep(0.001)
        return gate.num_steps

    assert run(work, lambda: held) == 1  # the one that had begun


def test_all_prompts_of_a_request_or_none() -> None:
    async def work(engine: AsyncEngine) -> list[str]:
        for bad, error in (([], ParameterError), ([10**6], ParameterError), ([1] * 600, PromptTooLongError)):
            with pytest.raises(error):
                await engine.submit([PROMPT, bad], SamplingParams(max_tokens=400, ignore_eos=True))
        return await _ask(engine, [PROMPT], SamplingParams(seed=1, max_tokens=4))

    assert len(run(work)) == 1


def test_the_queue_is_full_and_empties_again() -> None:
    held = generator("ngram", max_num_seqs=1)
    gate = Gate(held)
    params = SamplingParams(seed=1, max_tokens=4)

    async def work(engine: AsyncEngine) -> None:
        streams = [await engine.submit([PROMPT], params)]
        waiting = [asyncio.ensure_future(engine.submit([PROMPT], params)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 answers wait already and 2 more are too many"):
            await engine.submit([PROMPT], replace(params, n=2))
        with pytest.raises(QueueFullError):
            await engine.submit([PROMPT, PROMPT], params)
        with pytest.raises(ParameterError, match=r"n asks for 5 answers, all prompts together, and .* takes 4 at most"):
            await engine.submit([PROMPT], replace(params, n=5))
        waiting.append(asyncio.ensure_future(engine.submit([PROMPT], params)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await engine.submit([PROMPT], params)
        gate.open.set()
        for stream in [*streams, *[await submitted for submitted in waiting]]:
            await read(stream)
        assert engine.num_waiting == 0
        await _ask(engine, [PROMPT], params)

    run(work, lambda: held, max_num_waiting=3)


def test_a_queue_that_was_left_is_empty() -> None:
    held = generator("ngram", max_num_seqs=1)
    gate = Gate(held)

    async def work(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, n=5)
        stream = await engine.submit([PROMPT], params)
        stream.close()
        gate.open.set()
        while engine.num_waiting:
            await asyncio.sleep(0.001)
        await _ask(engine, [PROMPT], SamplingParams(max_tokens=2))

    run(work, lambda: held, max_num_waiting=4)


def test_draining_ends_what_runs_and_takes_no_more() -> None:
    async def work(engine: AsyncEngine) -> list[str]:
        stream = await engine.submit([PROMPT], SamplingParams(seed=1, max_tokens=50, ignore_eos=True))
        reading = asyncio.ensure_future(read(stream))
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailableError, match="about to stop"):
            await engine.submit([PROMPT], SamplingParams())
        await draining
        return await reading

    (alone,) = generator("ngram").generate(PROMPT, SamplingParams(seed=1, max_tokens=50, ignore_eos=True))
    assert run(work) == [alone.text]


def test_closing_fails_what_runs() -> None:
    held = generator("ngram")
    gate = Gate(held)

    async def main() -> None:
        engine = AsyncEngine(lambda: held, max_num_waiting=8)
        engine.start()
        await engine.loaded()
        stream = await engine.submit([PROMPT], SamplingParams(max_tokens=400, ignore_eos=True))
        reading = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0)
        gate.open.set()
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await reading
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await engine.submit([PROMPT], SamplingParams())

    asyncio.run(main())
    assert not held.has_unfinished


def test_while_it_loads_nothing_is_taken() -> None:
    may_load = threading.Event()

    def load() -> Generator:
        assert may_load.wait(PATIENCE)
        return generator("none")

    async def main() -> None:
        engine = AsyncEngine(load, max_num_waiting=8)
        engine.start()
        assert engine.state == "loading"
        with pytest.raises(EngineUnavailableError, match="loading"):
            await engine.submit([PROMPT], SamplingParams())
        with pytest.raises(EngineUnavailableError, match="loading"):
            _ = engine.generator
        may_load.set()
        await engine.loaded()
        assert engine.is_ready
        await engine.close()

    asyncio.run(main())


def test_what_loading_raises_is_told() -> None:
    def load() -> Generator:
        raise ModelFileError("no such file")

    async def main() -> None:
        engine = AsyncEngine(load, max_num_waiting=8)
        engine.start()
        with pytest.raises(ModelFileError, match="no such file"):
            await engine.loaded()
        assert engine.state == "failed"
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_breaks_down_fails_all_and_takes_no_more() -> None:
    broken = generator("ngram")

    def fail() -> list[Chunk]:
        raise RuntimeError("a fault")

    broken.step = fail  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(lambda: broken, max_num_waiting=8)
        engine.start()
        await engine.loaded()
        submitted = await asyncio.gather(
            *(engine.submit([PROMPT], SamplingParams(max_tokens=9)) for _ in range(3)), return_exceptions=True
        )
        for answer in submitted:  # those that the engine had not seen yet fail at once
            if isinstance(answer, AnswerStream):
                with pytest.raises(EngineFailedError, match="RuntimeError"):
                    await read(answer)
            else:
                assert isinstance(answer, EngineFailedError)
        with pytest.raises(EngineFailedError):
            await engine.submit([PROMPT], SamplingParams())
        assert engine.state == "failed"
        await engine.close()

    asyncio.run(main())


def test_a_sequence_that_cannot_go_on_harms_no_other() -> None:
    made = generator("ngram")
    step = made.step

    def step_with_fault() -> list[Chunk]:
        return [
            replace(chunk, error=NumericalError("NaN"), finish_reason="abort") if chunk.request_id == 1 else chunk
            for chunk in step()
        ]

    made.step = step_with_fault  # type: ignore[method-assign]

    async def work(engine: AsyncEngine) -> list[str]:
        bad = await engine.submit([PROMPT], SamplingParams(max_tokens=1))
        good = await engine.submit([PROMPT], SamplingParams(seed=1, max_tokens=20))
        with pytest.raises(NumericalError):
            await read(bad)
        return await read(good)

    (alone,) = generator("ngram").generate(PROMPT, SamplingParams(seed=1, max_tokens=20))
    assert run(work, lambda: made) == [alone.text]


def test_preparing_a_request_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grammar is compiled and its prediction tokenised in neither the engine's thread nor the loop's."""
    may_compile = threading.Event()
    compile_now, encode_now = GrammarCompiler._compile, ByteTokenizer.encode
    encoders = []

    def compile_later(self: GrammarCompiler, wanted: StructuredOutputs) -> Grammar:
        assert may_compile.wait(PATIENCE)
        return compile_now(self, wanted)

    def encode(self: ByteTokenizer, text: str) -> list[int]:
        encoders.append((text, threading.current_thread().name))
        return encode_now(self, text)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_later)
    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    plain = SamplingParams(seed=1, max_tokens=4)
    wanted = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="yes"))

    async def work(engine: AsyncEngine) -> list[str]:
        slow = asyncio.ensure_future(_ask(engine, [PROMPT], wanted))
        await _ask(engine, [PROMPT], plain)
        await _ask(engine, [PROMPT], replace(plain, prediction="abcd"))
        assert not slow.done()
        may_compile.set()
        return await slow

    assert run(work) == ["yes"]
    ((text, thread),) = [entry for entry in encoders if entry[0] == "abcd"]
    assert (text, thread.rpartition("_")[0]) == ("abcd", "foredraft-prepare")


def test_what_is_prepared_while_the_engine_stops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile = threading.Event()
    compile_now = GrammarCompiler._compile

    def compile_later(self: GrammarCompiler, wanted: StructuredOutputs) -> Grammar:
        assert may_compile.wait(PATIENCE)
        return compile_now(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_later)
    wanted = SamplingParams(structured_outputs=StructuredOutputs(regex="yes"))

    async def work(engine: AsyncEngine) -> None:
        late = [asyncio.ensure_future(_ask(engine, [PROMPT], wanted)) for _ in range(5)]
        await asyncio.sleep(0)
        await engine.drain()
        may_compile.set()
        for answer in late:
            with pytest.raises(EngineUnavailableError, match="about to stop"):
                await answer

    run(work)


def test_of_a_long_prediction_no_more_is_read_than_an_answer_can_have() -> None:
    gen = generator("ngram")
    longest = gen.capacity * gen.tokenizer.max_token_length
    request = gen.prepare([PROMPT], SamplingParams(prediction="ab" * longest))
    assert request.prediction == list(b"ab" * (gen.capacity // 2))
