from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from foredraft.algo.sampler import make_sampler
from foredraft.algo.tree import chain, height
from foredraft.drafters.chains import TRIAL_CONTEXT
from foredraft.drafters.model import ModelDrafter
from foredraft.testing import TinyModel
from foredraft.types import Draft, DraftRequest, PassPrice, SamplingParams, Verdict
from tests.drafters.views import View

VOCAB = 272


def view(tokens: list[int], params: SamplingParams | None = None, id: int = 0) -> View:
    params = params or SamplingParams(temperature=0)
    sampler = make_sampler(params, vocab_size=VOCAB, prompt=tokens, seed=1)
    return View(list(tokens), id=id, params=params, sampler=sampler, num_prompt_tokens=len(tokens))


def test_its_cache_follows_the_text_whatever_was_accepted() -> None:
    model = TinyModel(VOCAB, 512, 64)
    drafter, seq = ModelDrafter("model", model, VOCAB), view([1, 2, 3])
    drafter.begin(seq)
    for num_accepted in (3, 0, 2, 1, 3, 3, 0):
        draft = drafter.propose([DraftRequest(seq, 3)])[0]
        fresh_seq = view(seq.tokens)
        fresh = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB)
        fresh.begin(fresh_seq)
        assert draft.tokens == fresh.propose([DraftRequest(fresh_seq, 3)])[0].tokens
        new = [*draft.tokens[:num_accepted], 5]
        seq.tokens += new
        seq.sampler.extend(new)
        drafter.observe(seq, draft, Verdict(range(num_accepted), 5), None)
    assert max(model.rows_per_pass[1:]) <= 4  # never the whole text again


def test_a_trial_reads_little_and_leaves_no_trace() -> None:
    model = TinyModel(VOCAB, 512, 64)
    drafter, seq = ModelDrafter("model", model, VOCAB), view([1, 2, 3])
    drafter.begin(seq)
    drafter.propose([DraftRequest(seq, 3)])
    new = [(7 * i) % 100 for i in range(90)]
    seq.tokens += new
    seq.sampler.extend(new)
    num_passes = len(model.rows_per_pass)
    for _ in range(2):
        assert len(drafter.propose([DraftRequest(seq, 3, is_trial=True)])[0].tokens) == 3
    assert model.rows_per_pass[num_passes:] == [TRIAL_CONTEXT, 1, 1] * 2
    drafter.check_integrity()
    fresh_seq = view(seq.tokens)
    fresh = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB)
    fresh.begin(fresh_seq)
    assert drafter.propose([DraftRequest(seq, 3)])[0].tokens == fresh.propose([DraftRequest(fresh_seq, 3)])[0].tokens
    assert max(model.rows_per_pass) > 80  # everything that was missed


def test_a_batch_grows_while_the_sum_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(VOCAB, 512, 64)
    drafter, seqs = ModelDrafter("model", model, VOCAB), [view([1, 2, 3 + i], id=i) for i in range(4)]
    for seq in seqs:
        drafter.begin(seq)
    monkeypatch.setattr(drafter._chains.pass_cost, "seconds", lambda num_sequences: 0.001)

    def lengths(pass_s: list[float], row_s: Sequence[float] = (0.0,) * 4) -> list[int]:
        price = PassPrice(pass_s, tokens=4.0)
        drafts = drafter.propose([DraftRequest(seq, 8, price, r) for seq, r in zip(seqs, row_s, strict=True)])
        return [len(d.tokens) for d in drafts]

    flat = lengths([1.0 + 1e-6 * m for m in range(33)])
    assert flat == [8] * 4
    narrow = lengths([1.0] * 8 + [1.0 + m for m in range(1, 26)])
    assert sum(narrow) <= 7
    assert min(narrow) >= 1  # they were asked for one: what was drawn is submitted
    far = lengths([1.0 + 1e-6 * m for m in range(33)], (0.0, 0.0, 0.0, 0.5))
    assert far == [8, 8, 8, 1]
    assert model.rows_per_pass[-8:] == [3] * 7 + [3] or model.rows_per_pass[-1] == 3


def test_second_choices_fill_the_rows_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB), view([1, 2, 3])
    drafter.begin(seq)
    monkeypatch.setattr(drafter._chains.pass_cost, "seconds", lambda num_sequences: 0.3)

    def propose(pass_s: list[float], **fields: object) -> Draft:
        return drafter.propose([DraftRequest(seq, 8, PassPrice(pass_s), **fields)])[0]  # type: ignore[arg-type]

    tree = propose([1.0] * 9)
    assert tree.parents is not None
    assert tree.confidences is not None
    depth = height(tree.parents)
    assert depth < len(tree.tokens) <= 8
    assert tree.parents[:depth] == [*chain(depth)]
    assert all(parent < depth - 1 for parent in tree.parents[depth:])  # beside the chain, not behind it
    siblings = [(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)]
    assert len({*siblings}) == len(siblings)
    assert propose([1.0 + m for m in range(9)]).parents is None  # a row costs as much as a pass
    assert propose([1.0] * 9, num_slots=0).parents is None  # no trees are taken
    assert (
        drafter.propose([DraftRequest(seq, 2, PassPrice([1.0] * 9))])[0].tokens == tree.tokens[:2]
    )  # no room for more
    assert drafter.propose([DraftRequest(seq, 3)])[0].parents is None  # no price: a chain of that length was asked for
    sampled = view([1, 2, 3], SamplingParams(seed=3), id=1)
    drafter.begin(sampled)
    assert drafter.propose([DraftRequest(sampled, 8, PassPrice([1.0] * 9))])[0].parents is None


def test_second_choices_learn_how_often_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB), view([1, 2, 3])
    drafter.begin(seq)
    monkeypatch.setattr(drafter._chains.pass_cost, "seconds", lambda num_sequences: 0.3)
    state = drafter._chains.state(seq.id)

    def learn(choose: Callable[[Draft], list[int]]) -> tuple[list[float], list[float]]:
        draft = drafter.propose([DraftRequest(seq, 8, PassPrice([1.0] * 9))])[0]
        leaves, buckets = list(state.leaves), list(state.buckets)
        assert leaves
        before = [state.by_leaf.estimate(leaf.bucket) for leaf in leaves]
        drafter.observe(seq, draft, Verdict(choose(draft), 5), None)
        return before, [state.by_leaf.estimate(leaf.bucket) for leaf in leaves] if buckets else []

    first = learn(lambda draft: [height(draft.parents or [])])  # the first leaf, if it stands beside the first token
    last = learn(lambda draft: [])
    assert first != last
    assert all(after <= before for before, after in zip(*last, strict=True))


def test_unseeded_sampling_carries_the_law_it_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.9, top_k=5)
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB), view([1, 2, 3], params)
    drafter.begin(seq)
    draft = drafter.propose([DraftRequest(seq, 4)])[0]
    assert draft.probs is not None
    assert draft.probs.shape == (4, VOCAB)
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        assert law[token] > 0
        assert (law > 0).sum() <= 5
        assert abs(law.sum() - 1) < 1e-5


def test_seeded_and_greedy_drafts_carry_none() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(seed=4)):
        drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 512, 64), VOCAB), view([1, 2], params)
        drafter.begin(seq)
        assert drafter.propose([DraftRequest(seq, 2)])[0].probs is None


def test_a_wider_draft_never_proposes_what_the_target_lacks() -> None:
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB + 500, 512, 64), VOCAB), view([1, 2])
    drafter.begin(seq)
    assert max(drafter.propose([DraftRequest(seq, 30)])[0].tokens) < VOCAB


def test_the_end_of_its_context_ends_the_draft() -> None:
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 32, 8), VOCAB), view([1] * 30)
    drafter.begin(seq)
    assert len(drafter.propose([DraftRequest(seq, 8)])[0].tokens) == 3
    seq.tokens += [1] * 20
    assert not drafter.propose([DraftRequest(seq, 8)])[0].tokens


def test_a_cut_head_keeps_the_tokens_of_the_text() -> None:
    model = TinyModel(VOCAB, 512, 64)
    drafter = ModelDrafter("model", model, VOCAB, head_size=16)
    seq = view([1, 2, 250, 3])
    drafter.begin(seq)
    drafted = {t for _ in range(1) for t in drafter.propose([DraftRequest(seq, 12)])[0].tokens}
    assert drafted <= {*range(16), 250}


def test_a_cut_head_forgets_texts_that_have_ended() -> None:
    heads: list[set[int]] = []

    class Model(TinyModel):
        def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
            heads.append(set() if token_ids is None else {int(t) for t in token_ids} - {*range(16)})
            super().limit_head(token_ids)

    drafter = ModelDrafter("model", Model(VOCAB, 512, 64), VOCAB, head_size=16)
    first, second, third = view([1, 250, 3], id=0), view([1, 2, 251], id=1), view([1, 2, 252], id=2)
    for seq in (first, second):
        drafter.begin(seq)
        drafter.propose([DraftRequest(seq, 2)])
    drafter.end(first)
    drafter.propose([DraftRequest(second, 2)])
    drafter.begin(third)
    drafter.propose([DraftRequest(third, 2)])
    assert heads == [set(), {250}, {250, 251}, {251, 252}]


def test_ids_that_the_draft_lacks_are_no_obstacle() -> None:
    drafter = ModelDrafter("model", TinyModel(VOCAB - 16, 512, 64), VOCAB, head_size=16)
    seq = view([1, VOCAB - 1, 2])
    drafter.begin(seq)
    assert len(drafter.propose([DraftRequest(seq, 3)])[0].tokens) == 3


def test_a_prompt_beyond_its_context_runs_without_a_draft() -> None:
    drafter, seq = ModelDrafter("model", TinyModel(VOCAB, 64, 4), VOCAB), view([1] * 300)
    drafter.begin(seq)
    assert not drafter.propose([DraftRequest(seq, 3)])[0].tokens
    drafter.end(seq)


def test_a_draft_that_computes_nan_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = TinyModel(VOCAB, 512, 64)
    drafter, seq = ModelDrafter("model", model, VOCAB), view([1, 2, 3])
    drafter.begin(seq)
    compute = model.forward
    model.forward = lambda *rows: compute(*rows) * np.float32(np.nan)  # type: ignore[method-assign]
    assert [len(drafter.propose([DraftRequest(seq, 3)])[0].tokens) for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("drafts no more for this request") == 1
