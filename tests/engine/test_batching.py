"""Many at once, in a cache that is too small: nobody's answer changes, nobody starves, no block is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.generator import Generator
from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import Round
from foredraft.errors import PromptTooLongError
from foredraft.models.base import BLOCK_SIZE
from foredraft.models.gguf import load_core
from foredraft.models.load import load_model
from foredraft.testing import ByteTokenizer, make_tiny_gguf
from foredraft.types import Completion, SamplingParams
from tests.engine.build import generator
from tests.engine.test_lossless import SPECS

SYSTEM = list(b"You are a helpful assistant. Answer in one short sentence, and say so if you do not know.\n")
#: Different from each other; some begin alike, some are shorter than a block, some repeat themselves.
PROMPTS = [
    [*(SYSTEM[: 40 * (i % 3)]), *(b"abcdefg"[: i % 7 + 1] * (1 + 3 * (i % 4))), *(b"question %d" % i)]
    for i in range(32)
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95, frequency_penalty=0.3, seed=11)
SMALL = 9  # blocks: one of the longest, and not quite another


def check(gen: Generator) -> None:
    gen.engine.check_integrity()
    for drafter in gen.engine.drafters:
        if not isinstance(drafter, NgramDrafter):
            drafter.check_integrity()  # type: ignore[attr-defined]


def assert_idle(gen: Generator) -> None:
    """Nobody owns a block, here and in the draft's cache."""
    check(gen)
    assert not gen.has_unfinished
    assert gen.snapshot().kv_cache_usage == 0
    for drafter in gen.engine.drafters:
        pool = getattr(getattr(drafter, "_inner", drafter), "_pool", None)
        assert pool is None or pool.num_free == pool.num_blocks


def finish(gen: Generator) -> dict[int, Completion]:
    """Step to the end with every block accounted for after each step. Completions by request."""
    done = {}
    while gen.has_unfinished:
        for chunk in gen.step():
            if chunk.completion is not None:
                done[chunk.request_id] = chunk.completion
        check(gen)
    assert_idle(gen)
    return done


def told(completion: Completion) -> tuple[object, ...]:
    """What a user sees of an answer and must not depend on what else runs."""
    return completion.text, completion.token_ids, completion.finish_reason, completion.logprobs


@pytest.fixture(scope="module")
def alone() -> dict[int, list[tuple[object, ...]]]:
    return {id(params): [told(generator().generate(p, params)[0]) for p in PROMPTS] for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_many_at_once_in_a_small_cache_are_each_as_alone(
    alone: dict[int, list[tuple[object, ...]]], spec: str, params: SamplingParams
) -> None:
    gen = generator(spec, num_blocks=SMALL, num_draft_blocks=SMALL, max_num_batched_tokens=50)
    requests = [gen.submit(prompt, params)[0].request_id for prompt in PROMPTS]
    done = finish(gen)
    assert [told(done[request]) for request in requests] == alone[id(params)]
    assert gen.snapshot().num_preemptions > 0
    assert gen.snapshot().prefix_cache_hits > 0
    if spec != "none":
        assert sum(completion.speculation.num_accepted_tokens for completion in done.values()) > 0


def test_a_preempted_sequence_goes_on_as_if_nothing_had_been() -> None:
    """In a cache with room for drafts: drafts, acceptance and stats are the same, too."""
    whole = generator("ngram+model").generate([SYSTEM], SEEDED)[0]
    num_rounds = 2 + whole.speculation.num_passes  # two for the prompt
    for num_steps in range(1, num_rounds):
        gen = generator("ngram+model", max_num_batched_tokens=48)
        [seq] = gen.submit(SYSTEM, SEEDED)
        for _ in range(num_steps):
            gen.step()
        gen.engine.scheduler._preempt_last()
        check(gen)
        [completion] = finish(gen).values()
        assert told(completion) == told(whole)
        assert (completion.speculation, completion.origins) == (whole.speculation, whole.origins)
        assert seq.num_preemptions == 1


@pytest.mark.parametrize("spec", ["none", "model"])
def test_real_kernels_in_a_small_cache(spec: str, tmp_path: Path) -> None:
    make_tiny_gguf("gemma3", tmp_path / "tiny.gguf")
    make_tiny_gguf("gemma3", tmp_path / "draft.gguf", seed=1)
    threads = load_core().ThreadPool(2)

    def make(max_num_seqs: int) -> Generator:
        model, draft = (
            load_model(tmp_path / name, pool=threads, max_model_len=224, max_num_seqs=max_num_seqs, cache=False)
            for name in ("tiny.gguf", "draft.gguf")
        )
        drafters = [] if spec == "none" else [ModelDrafter("model", draft, model.vocab_size)]
        return Generator(model, ByteTokenizer(), drafters, num_speculative_tokens=3, adaptive=False)

    for params in (GREEDY, SEEDED):
        one_by_one = make(8)
        expected = [told(one_by_one.generate(prompt, params)[0]) for prompt in PROMPTS]
        gen = make(1)
        requests = [gen.submit(prompt, params)[0].request_id for prompt in PROMPTS]
        done = finish(gen)
        assert [told(done[request]) for request in requests] == expected
        assert gen.snapshot().num_preemptions > 0


def rows_of(gen: Generator, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[Completion, int]:
    """An answer, and how many rows the target computed for it."""
    begin = len(gen.model.rows_per_pass)  # type: ignore[attr-defined]
    completion = gen.generate(prompt, params)[0]
    return completion, sum(gen.model.rows_per_pass[begin:])  # type: ignore[attr-defined]


def test_a_chat_s_next_turn_computes_only_what_is_new() -> None:
    gen = generator()
    first, _ = rows_of(gen, SYSTEM)
    turn = [*SYSTEM, *first.token_ids, *b"and then?"]
    again, num_rows = rows_of(gen, turn)
    num_new = len(turn) - (len(SYSTEM) + len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_rows == num_new + GREEDY.max_tokens - 1  # type: ignore[operator]
    assert gen.snapshot().prefix_cache_hits == len(turn) - num_new
    fresh = generator(enable_prefix_caching=False)
    assert told(again) == told(fresh.generate(turn, GREEDY)[0])
    assert rows_of(fresh, turn)[1] > num_rows


def test_a_draft_model_s_cache_is_shared_alike() -> None:
    gen = generator("model")
    [drafter] = gen.engine.drafters
    first, again = (gen.generate(SYSTEM, GREEDY)[0] for _ in range(2))
    assert told(first) == told(again)
    assert first.speculation == again.speculation
    passes = drafter._chains.model.rows_per_pass  # type: ignore[attr-defined]
    assert [rows for rows in passes if rows > 2] == [len(SYSTEM) - 1, len(SYSTEM) - 1 - 2 * BLOCK_SIZE]


def test_those_who_begin_alike_at_once_compute_it_once() -> None:
    gen = generator(max_num_batched_tokens=64)
    prompts = [[*SYSTEM, *b"question", i] for i in range(6)]
    seqs = [gen.submit(prompt, GREEDY)[0] for prompt in prompts]
    gen.submit(list(b"something else"), GREEDY)
    gen.step()
    assert gen.snapshot().num_running == 2  # the others wait for the first one's blocks, and hold nobody up
    begin = len(gen.model.rows_per_pass)  # type: ignore[attr-defined]
    done = finish(gen)
    assert sum(gen.model.rows_per_pass[begin - 1 :]) < 2 * len(SYSTEM) + 7 * (BLOCK_SIZE + 40)  # type: ignore[attr-defined]
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert told(done[seq.request_id]) == told(generator().generate(prompt, GREEDY)[0])


def test_choices_of_one_prompt_share_its_blocks() -> None:
    gen = generator("model")
    seqs = gen.submit(SYSTEM, replace(SEEDED, n=5))
    while not all(seq.origins for seq in seqs):
        gen.step()
        check(gen)
    assert len({tuple(seq.table.blocks[:2].tolist()) for seq in seqs}) == 1
    texts = {(seq.index, tuple(seq.tokens)) for seq in seqs}
    assert len(texts) == 5
    finish(gen)
    assert [seq.output for seq in seqs] == [
        list(c.token_ids) for c in generator().generate(SYSTEM, replace(SEEDED, n=5))
    ]


def test_salts_do_not_share_here_or_in_the_draft() -> None:
    gen = generator("model")
    passes = gen.engine.drafters[0]._chains.model.rows_per_pass  # type: ignore[attr-defined]
    hits = []
    for salt in ("", "alice", "bob", "alice"):
        gen.submit(SYSTEM, GREEDY, cache_salt=salt)
        begin, before = len(passes), gen.snapshot().prefix_cache_hits
        finish(gen)
        hits.append(gen.snapshot().prefix_cache_hits - before)
        assert (max(passes[begin:]) == len(SYSTEM) - 1) == (hits[-1] == 0)
    assert hits == [0, 0, 0, 2 * BLOCK_SIZE]


@pytest.mark.parametrize("spec", ["none", "ngram+model", "tree"])
def test_an_abort_at_any_step_frees_every_block(spec: str) -> None:
    for num_steps in range(0, 40, 3):
        gen = generator(spec, num_blocks=SMALL, num_draft_blocks=SMALL, max_num_batched_tokens=20)
        requests = [gen.submit(prompt, GREEDY)[0].request_id for prompt in PROMPTS[:6]]
        for _ in range(num_steps):
            gen.step()
        for request in requests[::-1]:
            gen.abort(request)
            check(gen)
        assert_idle(gen)
        assert gen.step() == []


def admissions(gen: Generator, seqs: list[Sequence]) -> list[int]:
    """Steps until each has its first token."""
    first: dict[int, int] = {}
    step = 0
    while gen.has_unfinished:
        step += 1
        gen.step()
        for seq in seqs:
            if seq.origins:
                first.setdefault(seq.id, step)
    return [first[seq.id] for seq in seqs]


def test_first_come_first_served() -> None:
    gen = generator(num_blocks=SMALL, max_num_seqs=4)
    seqs = [gen.submit([*b"prompt", i, *SYSTEM], GREEDY)[0] for i in range(12)]
    order = admissions(gen, seqs)
    assert order == sorted(order)


def test_a_prompt_moves_on_however_many_decode() -> None:
    gen = generator(max_num_seqs=8, max_num_batched_tokens=4)
    early = [gen.submit([i], replace(GREEDY, max_tokens=400))[0] for i in range(3)]
    gen.step()
    late = gen.submit(SYSTEM, GREEDY)[0]
    for num_steps in range(1, len(SYSTEM)):
        gen.step()
        assert late.num_computed == num_steps
        assert all(len(seq.origins) == 1 + num_steps for seq in early)


def test_decoding_goes_on_while_a_prompt_is_computed() -> None:
    gen = generator("model", max_num_batched_tokens=16)
    early = gen.submit(list(b"early"), GREEDY)[0]
    gen.step()
    late = gen.submit(SYSTEM, GREEDY)[0]
    while not late.origins:
        before = len(early.origins)
        gen.step()
        assert len(early.origins) > before
    finish(gen)


def test_the_oldest_goes_on_when_the_youngest_give_way() -> None:
    gen = generator(num_blocks=6, enable_prefix_caching=False)
    seqs = [gen.submit([i] * 60, replace(GREEDY, max_tokens=100))[0] for i in range(3)]
    oldest, length = seqs[0], 0
    while oldest.finish_reason is None:
        gen.step()
        assert len(oldest.tokens) > length
        length = len(oldest.tokens)
    assert oldest.num_preemptions == 0
    assert sum(seq.num_preemptions for seq in seqs) > 0
    finish(gen)


def test_a_prompt_beyond_the_whole_cache_is_refused_with_the_cure() -> None:
    with pytest.raises(
        PromptTooLongError, match=r"the context holds 96 tokens with the answer: .* raise kv_cache_tokens"
    ):
        generator(num_blocks=3).submit([1] * 96)


def test_the_longest_text_fills_the_cache_alone() -> None:
    gen = generator("model", num_blocks=3, num_draft_blocks=3)
    params = replace(GREEDY, max_tokens=None)
    long, other = gen.submit([1] * 90, params)[0], gen.submit([2, 3], GREEDY)[0]
    done = finish(gen)
    assert done[long.request_id].usage.completion_tokens == 3 * BLOCK_SIZE - 90
    assert told(done[other.request_id]) == told(generator().generate([2, 3], GREEDY)[0])


@pytest.mark.parametrize("spec", ["model", "tree"])
def test_drafts_take_only_the_slots_that_texts_leave(spec: str) -> None:
    """Two texts in a block each, and one more block."""
    gen = generator(spec, num_blocks=3, num_speculative_tokens=8)
    params = replace(GREEDY, max_tokens=BLOCK_SIZE)
    prompts = [[i] * 10 for i in range(2)]
    requests = [gen.submit(prompt, params)[0].request_id for prompt in prompts]
    done = finish(gen)
    for request, prompt in zip(requests, prompts, strict=True):
        assert told(done[request]) == told(generator().generate(prompt, params)[0])
        assert done[request].speculation.num_drafts > 0


@pytest.mark.parametrize("num_draft_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", ["model", "tree"])
def test_a_draft_cache_without_room_fails_nobody(
    alone: dict[int, list[tuple[object, ...]]], spec: str, num_draft_blocks: int
) -> None:
    gen = generator(spec, num_draft_blocks=num_draft_blocks)
    requests = [gen.submit(prompt, GREEDY)[0].request_id for prompt in PROMPTS[:12]]
    done = finish(gen)
    assert [told(done[request]) for request in requests] == alone[id(GREEDY)][:12]
    if num_draft_blocks > 1:
        assert sum(completion.speculation.num_drafts for completion in done.values()) > 0


def test_a_draft_follows_a_prompt_chunk_by_chunk() -> None:
    gen = generator("model", max_num_batched_tokens=16)
    gen.submit([i % 250 for i in range(400)], GREEDY)
    gen.submit([*b"another", *range(200)], GREEDY)
    passes = gen.engine.drafters[0]._chains.model.rows_per_pass  # type: ignore[attr-defined]
    before = len(passes)
    gen.step()
    assert sum(passes[before:]) <= 512
    finish(gen)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 30), st.sampled_from(["", "a"])),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    events=EVENTS,
    spec=st.sampled_from(["none", "ngram+model", "tree"]),
    num_blocks=st.integers(6, 16),
    budget=st.sampled_from([3, 17, 200]),
)
def test_whatever_comes(
    alone: dict[int, list[tuple[object, ...]]], events: list[tuple], spec: str, num_blocks: int, budget: int
) -> None:  # type: ignore[type-arg]
    gen = generator(spec, num_blocks=num_blocks, num_draft_blocks=num_blocks, max_num_batched_tokens=budget)
    expected: dict[int, tuple[int, int]] = {}
    texts: dict[int, list[int]] = {}

    def step() -> None:
        for chunk in gen.step():
            texts[chunk.request_id] += chunk.token_ids
        check(gen)

    for event in events:
        if event[0] == "submit":
            [seq] = gen.submit(PROMPTS[event[1]], replace(GREEDY, max_tokens=event[2]), cache_salt=event[3])
            expected[seq.request_id] = event[1], event[2]
            texts[seq.request_id] = []
        elif event[0] == "abort" and event[1] in expected:
            gen.abort(event[1])
            del expected[event[1]]
            check(gen)
        elif event[0] == "step":
            for _ in range(event[1]):
                step()
    while gen.has_unfinished:
        step()
    assert_idle(gen)
    for request, (number, max_tokens) in expected.items():
        assert texts[request] == list(alone[id(GREEDY)][number][1])[:max_tokens]  # type: ignore[call-overload]


def test_the_usage_tells_what_the_cache_held() -> None:
    gen = generator()
    params = replace(GREEDY, max_tokens=2)
    prompt = list(range(100))
    cached = [gen.generate(p, params)[0].usage.num_cached_tokens for p in (prompt, prompt, [*prompt[:70], 7, 8, 9])]
    assert cached == [0, 96, 64]
    assert all(n % BLOCK_SIZE == 0 for n in cached)
    without = generator(enable_prefix_caching=False)
    assert [without.generate(prompt, params)[0].usage.num_cached_tokens for _ in range(2)] == [0, 0]


def test_what_a_preempted_one_finds_again_was_not_cached() -> None:
    gen = generator(num_blocks=SMALL)
    seqs = [gen.submit(list(range(first, first + 100)), GREEDY)[0] for first in (0, 100)]
    done = finish(gen)
    assert gen.snapshot().num_preemptions > 0
    assert all(done[seq.request_id].usage.num_cached_tokens == 0 for seq in seqs)


def test_a_long_prompt_comes_in_smaller_pieces_while_answers_run() -> None:
    gen = generator(max_num_batched_tokens=512)
    prompts = [list(b"abc"), [i % 250 for i in range(400)], [i % 240 + 3 for i in range(300)]]
    params = replace(GREEDY, max_tokens=20)
    done: dict[int, list[Round]] = {}
    gen.on_round(lambda round: done.setdefault(round.sequence_id, []).append(round))
    first = gen.submit(prompts[0], params)[0]
    gen.step()
    others = [gen.submit(prompt, params)[0] for prompt in prompts[1:]]
    completions = finish(gen)
    assert [round.num_prompt_rows for round in done[others[0].id]][:4] == [128, 128, 128, 16]
    assert sum(round.num_prompt_rows for round in done[others[1].id]) == 300
    assert all(round.token is not None for round in done[first.id])  # one with every pass
    alone: list[Round] = []
    other = generator(max_num_batched_tokens=512)
    other.on_round(alone.append)
    assert told(other.generate(prompts[1], params)[0]) == told(completions[others[0].request_id])
    assert alone[0].num_prompt_rows == 400
