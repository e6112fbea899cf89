from __future__ import annotations

import pytest

from foredraft.bench.pairs import MAX_DRAFT_TOKENS, PairCosts, measure_pair, weigh
from foredraft.testing import ByteTokenizer, TinyModel
from tests.drafters.translated import byte_level

FLAT = [0.02] * (MAX_DRAFT_TOKENS + 1)


def test_a_cheap_draft_breaks_even_early() -> None:
    found = weigh(PairCosts(FLAT, 0.001, 1.0))
    assert found.cost_ratio == pytest.approx(20)
    assert found.break_even_acceptance == pytest.approx(0.05)  # one token has to bring what its pass costs
    assert found.break_even_tokens == 1
    # 1 + .8 + ... + .8^8 tokens, for a pass and eight of a twentieth
    assert found.speedup == pytest.approx(sum(0.8**i for i in range(9)) / 1.4)
    assert found.speedup_tokens == 8


def test_a_draft_of_another_tokenizer_costs_what_its_tokens_cost() -> None:
    assert weigh(PairCosts(FLAT, 0.001, 2.0)).break_even_acceptance == pytest.approx(0.1)


def test_a_draft_as_dear_as_its_target_needs_all_or_more() -> None:
    assert weigh(PairCosts(FLAT, 0.019, 1.0)).break_even_acceptance == pytest.approx(0.95)
    hopeless = weigh(PairCosts(FLAT, 0.03, 1.0))
    assert hopeless.break_even_acceptance is None
    assert (hopeless.speedup, hopeless.speedup_tokens) == (1.0, 0)


def test_both_models_are_timed_and_both_tokenizers_count() -> None:
    target, draft = TinyModel(272, 512, 8), TinyModel(1300, 512, 8)
    costs = measure_pair(target, ByteTokenizer(), draft, byte_level())
    assert len(costs.verify_s) == MAX_DRAFT_TOKENS + 1
    assert min(*costs.verify_s, costs.draft_s) > 0
    assert len(draft.rows_per_pass) > 2
    assert 0.2 < costs.draft_tokens_per_token < 1  # merges make texts shorter
