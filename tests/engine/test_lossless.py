"""Greedy and seeded output is plain decoding's, token for token, whatever speculates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.drafters.calibration import BatchCost
from foredraft.engine.costs import PassCosts
from foredraft.engine.sequence import Sequence
from foredraft.engine.step import Engine
from foredraft.models.base import Rows
from foredraft.types import TARGET, Array, Completion, Draft, SamplingParams, Verdict
from tests.engine.build import generator

PROMPTS = ["def f(x):\n    return x", "a", "the cat and the hat and the cat and", "0123456789" * 9]
SPECS = ["ngram", "model", "padded", "narrow", "tree", "ngram+model", "text", "tli"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(c.token_ids) for c in completions]


@pytest.fixture(scope="module")
def plain() -> dict[SamplingParams, list[tuple[int, ...]]]:
    alone = {}
    for params in (GREEDY, SEEDED):
        alone[id(params)] = [ids(generator().generate(p, params))[0] for p in PROMPTS]
    return alone


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("k", range(1, 9))
def test_speculation_changes_nothing(
    plain: dict[int, list[tuple[int, ...]]], spec: str, k: int, params: SamplingParams
) -> None:
    gen = generator(spec, num_speculative_tokens=k)
    outs = gen.generate(PROMPTS, params)
    assert ids(outs) == plain[id(params)]
    gen.engine.check_integrity()


@pytest.mark.parametrize("spec", ["model", "padded", "narrow", "tree", "ngram+model", "text", "tli"])
def test_related_drafts_are_often_accepted(spec: str) -> None:
    outs = generator(spec).generate(PROMPTS, GREEDY)
    assert sum(o.speculation.num_accepted_tokens for o in outs) > 40


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 7}], ids=str)
@pytest.mark.parametrize("spec", ["none", "ngram+model", "tree", "ngram+text", "tli"])
def test_batch_and_chunk_change_nothing(
    plain: dict[int, list[tuple[int, ...]]], spec: str, options: dict[str, int]
) -> None:
    gen = generator(spec, **options)
    assert ids(gen.generate(PROMPTS, GREEDY)) == plain[id(GREEDY)]
    gen.engine.check_integrity()


@pytest.mark.parametrize("spec", ["none", "ngram+model", "tree", "ngram+text", "tli"])
def test_eight_unequal_prompts_are_eight_single_runs(spec: str) -> None:
    prompts = [PROMPTS[2] * n + "x" * (7 - n) for n in range(8)]
    gen = generator(spec, max_num_seqs=8)
    together = ids(gen.generate(prompts, GREEDY))
    assert together == [ids(generator().generate(p, GREEDY))[0] for p in prompts]
    assert len(set(together)) == 8


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("spec", ["ngram+model", "tree", "text", "tli"])
def test_logprobs_are_plain_decoding_s(spec: str, params: SamplingParams) -> None:
    wanted = replace(params, logprobs=5)
    plain, out = (generator(s).generate(PROMPTS[0], wanted)[0] for s in ("none", spec))
    assert out.speculation.num_accepted_tokens > 8
    assert out.logprobs == plain.logprobs
    assert out.logprobs is not None
    assert [scored.token_id for scored in out.logprobs] == list(out.token_ids)
    assert {len(scored.top) for scored in out.logprobs} == {5}


def test_adaptive_lengths_change_nothing(plain: dict[int, list[tuple[int, ...]]]) -> None:
    outs = generator("ngram+model", adaptive=True, num_speculative_tokens=8).generate(PROMPTS, GREEDY)
    assert ids(outs) == plain[id(GREEDY)]


@pytest.mark.parametrize("spec", ["model", "ngram+model", "narrow", "tli"])
@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {}, {"num_blocks": 8, "max_num_seqs": 4}], ids=str)
def test_second_choices_change_nothing(
    plain: dict[int, list[tuple[int, ...]]], spec: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows cost nothing and draft passes much, so that most passes have room for leaves."""
    monkeypatch.setattr("foredraft.engine.generator.measure_pass_costs", lambda *_: PassCosts([1.0] * 6))
    monkeypatch.setattr(BatchCost, "seconds", lambda self, num_sequences: 0.25)
    gen = generator(spec, adaptive=True, num_speculative_tokens=8, **options)
    leaves: list[bool] = []
    verify = Engine._commit

    def commit(engine: Engine, seq: Sequence, rows: Rows, draft: Draft, verdict: Verdict, *arrays: Array) -> int:
        if draft.parents is not None:
            leaves.append(
                draft.parents[verdict.accepted[-1]] != verdict.accepted[-1] - 1 if verdict.accepted else False
            )
        return verify(engine, seq, rows, draft, verdict, *arrays)

    monkeypatch.setattr(Engine, "_commit", commit)
    for params in (GREEDY, replace(GREEDY, repetition_penalty=1.3, min_tokens=9)):
        expected = plain[id(GREEDY)] if params is GREEDY else [ids(generator().generate(p, params))[0] for p in PROMPTS]
        assert ids(gen.generate(PROMPTS, params)) == expected
    assert any(leaves)
    gen.engine.check_integrity()


def test_the_second_identical_prompt_reuses_its_cache_and_accepts_as_much() -> None:
    gen = generator("model")
    first, second = (gen.generate(PROMPTS[2], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.speculation == second.speculation
    assert gen.model.rows_per_pass[-1] <= 5
    prompt_rows = [r for r in gen.model.rows_per_pass if r > 16]
    assert len(prompt_rows) <= 4  # three of the load's timing, one prompt
    assert gen.snapshot().prefix_cache_hits == 32


def test_origins_name_each_token() -> None:
    out = generator("model").generate(PROMPTS[0], GREEDY)[0]
    assert len(out.origins) == len(out.token_ids) == out.usage.completion_tokens
    assert out.origins[0] == TARGET
    assert out.origins.count("model") == out.speculation.num_accepted_tokens > 0


def test_many_choices_differ_and_each_is_its_plain_self() -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    outs = generator("model").generate("abc", params)
    assert [o.index for o in outs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outs}) == 3
    assert ids(outs) == ids(generator().generate("abc", params))
