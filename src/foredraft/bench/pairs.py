"""Will a pair pay? What its passes cost here, and how often drafts have to be right for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.algo.speedup import breakeven_acceptance, speedup
from foredraft.bench.workloads import GROUPS, load_group
from foredraft.engine.costs import MAX_ROWS, measure_pass_costs
from foredraft.kvcache.blocks import num_blocks_for
from foredraft.models.base import LanguageModel, TextTokenizer

#: Draft lengths that are looked at.
MAX_DRAFT_TOKENS = 8
#: Of timing each model.
NUM_ROUNDS = 3
#: An acceptance that pairs of one family reach on most texts.
USUAL_ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What was measured.

    verify_s [MAX_DRAFT_TOKENS + 1]: seconds of a pass of the target over a token and so many drafted ones; draft_s: of
    a draft pass; draft_tokens_per_token: of the draft for one of the target's.
    """

    verify_s: Sequence[float]
    draft_s: float
    draft_tokens_per_token: float


@dataclass(frozen=True, slots=True)
class Prospects:
    """What the costs come to.

    cost_ratio: target pass over draft pass. break_even_acceptance: the least that does not lose, None if none does,
    with a draft of break_even_tokens; speedup: at USUAL_ACCEPTANCE, with a draft of speedup_tokens (0: plain decoding).
    """

    target_ms: float
    draft_ms: float
    cost_ratio: float
    draft_tokens_per_token: float
    break_even_acceptance: float | None
    break_even_tokens: int
    speedup: float
    speedup_tokens: int


def measure_pair(
    target: LanguageModel, target_tokenizer: TextTokenizer, draft: LanguageModel, draft_tokenizer: TextTokenizer
) -> PairCosts:
    """On idle models, in turns: the best passes of a few rounds, and the tokens of the workloads' texts in both."""
    verify: list[list[float]] = []
    drafting: list[list[float]] = []
    for _ in range(NUM_ROUNDS):
        for model, seconds in ((target, verify), (draft, drafting)):
            blocks = range(min(num_blocks_for(MAX_ROWS), model.num_blocks))
            seconds.append(measure_pass_costs(model, blocks).with_draft(1, MAX_DRAFT_TOKENS))
    texts = [prompt.turns[0] for group in GROUPS for prompt in load_group(group)]
    ours, theirs = (sum(len(t.encode(text)) for text in texts) for t in (target_tokenizer, draft_tokenizer))
    return PairCosts(
        [min(times) for times in zip(*verify, strict=True)], min(times[0] for times in drafting), theirs / ours
    )


def weigh(costs: PairCosts) -> Prospects:
    plain_s = costs.verify_s[0]
    token_cost = costs.draft_s * costs.draft_tokens_per_token / plain_s
    lengths = range(1, len(costs.verify_s))
    pass_costs = {k: costs.verify_s[k] / plain_s for k in lengths}
    needed = [(a, k) for k in lengths if (a := breakeven_acceptance(k, pass_costs[k], k * token_cost)) is not None]
    least, shortest = min(needed, default=(None, 0))
    gains = [(speedup([USUAL_ACCEPTANCE] * k, pass_costs[k], k * token_cost), -k) for k in lengths]
    gain, longest = max([(1.0, 0), *gains])
    return Prospects(
        target_ms=1e3 * plain_s,
        draft_ms=1e3 * costs.draft_s,
        cost_ratio=plain_s / costs.draft_s,
        draft_tokens_per_token=costs.draft_tokens_per_token,
        break_even_acceptance=least,
        break_even_tokens=shortest,
        speedup=gain,
        speedup_tokens=-longest,
    )
