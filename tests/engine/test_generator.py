"""The surface that servers drive: submit, step, abort; none of them waits."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.engine.generator import Generator
from foredraft.errors import ForedraftError, NumericalError, ParameterError, PromptTooLongError
from foredraft.testing import ByteTokenizer
from foredraft.types import Chunk, SamplingParams
from tests.engine.build import VOCAB, generator
from tests.engine.test_ending import Poisoned
from tests.engine.test_lossless import GREEDY, PROMPTS

IDS = [list(prompt.encode()) for prompt in PROMPTS]


def run(gen: Generator) -> dict[tuple[int, int], list[Chunk]]:
    """Every chunk until nothing is left, by request and choice."""
    chunks: dict[tuple[int, int], list[Chunk]] = {}
    while gen.has_unfinished:
        for chunk in gen.step():
            chunks.setdefault((chunk.request_id, chunk.index), []).append(chunk)
    return chunks


@pytest.mark.parametrize("spec", ["none", "ngram+model", "tree"])
def test_steps_give_what_a_stream_gives(spec: str) -> None:
    gen = generator(spec)
    seqs = [seq for prompt in IDS for seq in gen.submit(prompt, GREEDY)]
    chunks = run(gen)
    for seq, plain in zip(seqs, generator().generate(PROMPTS, GREEDY), strict=True):
        own = chunks[seq.request_id, 0]
        assert tuple(t for c in own for t in c.token_ids) == plain.token_ids
        assert "".join(c.text for c in own) == plain.text
        assert own[-1].completion is not None
        assert own[-1].completion.text == plain.text
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
        assert sum(c.num_draft_tokens for c in own) == own[-1].completion.speculation.num_draft_tokens
    assert gen.step() == []


def test_choices_share_a_request() -> None:
    gen = generator()
    seqs = gen.submit(IDS[0], SamplingParams(n=3, seed=1, max_tokens=5))
    assert [(seq.request_id, seq.index) for seq in seqs] == [(1, 0), (1, 1), (1, 2)]  # people count from 1
    assert set(run(gen)) == {(1, 0), (1, 1), (1, 2)}


def test_streams_get_their_chunks_whoever_steps() -> None:
    gen = generator("model")
    stream = gen.stream(PROMPTS[0], GREEDY)
    got = [next(stream)]
    gen.submit(IDS[1], GREEDY)
    run(gen)
    got += stream
    assert [t for c in got for t in c.token_ids] == list(generator().generate(PROMPTS[0], GREEDY)[0].token_ids)


def test_an_aborted_request_is_gone_at_once() -> None:
    gen = generator("model", max_num_seqs=1)
    running, waiting, other = (gen.submit(prompt, GREEDY)[0].request_id for prompt in IDS[:3])
    gen.step()
    gen.abort(running)
    gen.abort(waiting)
    gen.abort(waiting)
    gen.engine.check_integrity()
    assert {request for request, _ in run(gen)} == {other}
    gen.engine.check_integrity()


def test_an_aborted_stream_ends() -> None:
    gen = generator()
    stream = gen.stream(PROMPTS[0], GREEDY)
    gen.abort(next(stream).request_id)
    assert list(stream) == []


@pytest.mark.parametrize("spec", ["none", "model"])
def test_a_stream_that_is_closed_in_the_midst_of_a_step_leaves_with_it(spec: str) -> None:
    """A garbage collector closes streams that nobody holds wherever it happens to run."""
    gen = generator(spec)
    expected = "".join(chunk.text for chunk in gen.stream(PROMPTS[1], GREEDY))
    abandoned, plan = gen.stream(PROMPTS[0], GREEDY), gen.engine.scheduler.plan
    next(abandoned)

    def plan_and_close() -> Any:
        planned = plan()
        abandoned.close()
        return planned

    gen.engine.scheduler.plan = plan_and_close  # type: ignore[method-assign]
    assert "".join(chunk.text for chunk in gen.stream(PROMPTS[1], GREEDY)) == expected
    assert not gen.has_unfinished
    gen.engine.check_integrity()


def test_a_step_within_a_step_is_refused() -> None:
    gen = generator()
    gen.model.forward = lambda *args: gen.step()  # type: ignore[method-assign]
    gen.submit(IDS[0], GREEDY)
    with pytest.raises(ForedraftError, match="one step at a time"):
        gen.step()


def test_a_failure_is_told_in_the_last_chunk() -> None:
    gen = Generator(Poisoned(VOCAB, kinship=4.0, num_blocks=160), ByteTokenizer(), native=False)
    failing = gen.submit([1, 2, 7], GREEDY)[0]
    other = gen.submit(IDS[0], GREEDY)[0]
    chunks = run(gen)
    [last] = chunks[failing.request_id, 0]
    assert isinstance(last.error, NumericalError)
    assert last.finish_reason == "abort"
    assert last.completion is not None
    assert last.completion.token_ids == ()
    assert all(chunk.error is None for chunk in chunks[other.request_id, 0])


def test_what_cannot_run_is_refused_before_it_is_queued() -> None:
    gen = generator()
    for prompt, error in [([], ParameterError), ([VOCAB], ParameterError), ([1] * 512, PromptTooLongError)]:
        with pytest.raises(error):
            gen.submit(prompt)
    assert not gen.has_unfinished


def test_the_snapshot_counts_sequences_blocks_and_prefixes() -> None:
    gen = generator(max_num_seqs=2)
    for prompt in IDS[:3]:
        gen.submit(prompt, GREEDY)
    before = gen.snapshot()
    assert (before.num_running, before.num_waiting, before.kv_cache_usage) == (0, 3, 0.0)
    gen.step()
    during = gen.snapshot()
    assert (during.num_running, during.num_waiting) == (2, 1)
    assert 0 < during.kv_cache_usage < 1
    run(gen)
    after = gen.snapshot()
    assert (after.num_running, after.num_waiting, after.kv_cache_usage) == (0, 0, 0.0)
    assert after.prefix_cache_queries == sum(len(prompt) for prompt in IDS[:3])
