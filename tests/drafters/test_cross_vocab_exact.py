"""Drafts across toy vocabularies, by exact enumeration of the sampler's random numbers: the law is the target's.

The whole drafter runs, over several passes: its model, its transcript and its cache. Two tokenizers share two of their
tokens; each has others that the other lacks, which join or straddle them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from foredraft.algo import sampler as sampling
from foredraft.algo import verify
from foredraft.algo.filters import softmax
from foredraft.algo.sampler import ArraySampler
from foredraft.drafters.chains import LawChain
from foredraft.drafters.cross_vocab import CrossVocab, CrossVocabDrafter
from foredraft.testing import TinyModel
from foredraft.types import DraftRequest, SamplingParams
from tests.algo.chance import Chance, draw_by_comparison, outcomes
from tests.algo.mutants import Mutant
from tests.algo.worlds import RandomLaw, assert_is_target
from tests.drafters.translated import ToyTokenizer
from tests.drafters.views import View

OURS = ToyTokenizer("a", "b", "ab")
THEIRS = ToyTokenizer("<x>", "ba", "b", "a", "aa", "a")  # "a" twice: its probabilities add
TARGET = RandomLaw(3, 5)
PROMPT = [0]
#: Hot enough that the tiny draft's law is not all on one token.
PARAMS = SamplingParams(temperature=6.0)
METHODS = ["standard", "block"]

Law = dict[tuple[int, ...], float]


def target_logits(context: tuple[int, ...]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return PARAMS.temperature * np.log(TARGET(context))


def by_position(self: ArraySampler, scores: np.ndarray, depth: int) -> int:
    """Inverse sampling by one number for each position, in the place of Gumbel's, which cannot be enumerated."""
    if self._params.is_greedy:  # the draft picks its likeliest token
        return int(np.argmax(scores))
    position = len(self._tokens) + depth
    return draw_by_comparison(softmax(scores), self.chance.uniform(("target", position)))  # type: ignore[attr-defined]


def law_of(
    mode: CrossVocab, method: str, *, gamma: int = 2, length: int = 2
) -> tuple[dict[tuple[int, ...], float], int]:
    """The law of the first `length` tokens that speculation emits, and how many draft tokens were ever accepted."""
    num_accepted = 0

    def experiment(chance: Chance) -> tuple[int, ...]:
        nonlocal num_accepted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda key, index=0: chance.uniform((key, index)))
            patch.setattr(sampling, "draw_from", draw_by_comparison)
            patch.setattr(ArraySampler, "_sample_target", by_position)
            sampler = ArraySampler(PARAMS, vocab_size=3, prompt=PROMPT, seed=0, method=method)
            sampler.chance = chance  # type: ignore[attr-defined]
            seq = View(list(PROMPT), params=PARAMS, sampler=sampler, num_prompt_tokens=1)
            model = TinyModel(THEIRS.vocab_size, 32, 2, seed=3)
            drafter = CrossVocabDrafter("model", model, THEIRS, TinyModel(3, 32, 2), OURS, mode=mode, native=False)
            drafter.begin(seq)
            while len(seq.tokens) < 1 + length:
                text = tuple(seq.tokens[1:])
                draft = drafter.propose([DraftRequest(seq, gamma)])[0]
                assert (draft.probs is not None) == (mode == "tli")
                rows = np.stack([target_logits((*text, *draft.tokens[:i])) for i in range(len(draft.tokens) + 1)])
                verdict = sampler.verify(rows, draft)
                new = [*(draft.tokens[i] for i in verdict.accepted), verdict.token]
                num_accepted += len(verdict.accepted)
                sampler.extend(new)
                seq.tokens += new
                drafter.observe(seq, draft, verdict, None)
            return tuple(seq.tokens[1 : 1 + length])

    return outcomes(experiment), num_accepted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["text", "tli"])
def test_the_law_is_the_target_s(mode: CrossVocab, method: str) -> None:
    law, num_accepted = law_of(mode, method)
    assert num_accepted > 0
    assert_is_target(law, TARGET, 2)


MUTANTS = [
    Mutant(
        "draft across vocabularies tested at another temperature",
        LawChain,
        "draw",
        "self.add(token, probability)",
        "self.add(token, probability), probs.__ipow__(0.5)",
        partial(test_the_law_is_the_target_s, "tli", "standard"),
    ),
    Mutant(
        "drawn token withheld across vocabularies because it is unlikely",
        LawChain,
        "draw",
        "self.add(token, probability)\n    self.is_over = ",
        "probability < 0.5 or self.add(token, probability)\n    self.is_over = probability < 0.5 or ",
        partial(test_the_law_is_the_target_s, "tli", "block"),
    ),
    Mutant(
        "text of the draft taken for the target's",
        verify,
        "sample_and_walk",
        "if tokens[child] == token",
        "if tokens[child] >= 0",
        partial(test_the_law_is_the_target_s, "text", "standard"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_wrong_law_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.caught_by()


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losslessness.md").read_text(encoding="utf-8")
    assert all(mutant.listing in page.splitlines() for mutant in MUTANTS)
