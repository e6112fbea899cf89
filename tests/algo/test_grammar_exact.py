"""Speculation under a grammar, by exact enumeration: the law of the text is that of plain decoding under its masks.

Drafts know the grammar or do not, propose tokens that it forbids, ends in mid-block and tokens behind the end. The
random numbers of the sampler are enumerated as in `test_sampler_exact`; a text ends where the grammar is complete.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from foredraft.algo import masks, verify
from foredraft.algo import sampler as sampling
from foredraft.algo.filters import softmax
from foredraft.algo.sampler import ArraySampler
from foredraft.types import Draft, SamplingParams

from .chance import Chance, draw_by_comparison, outcomes
from .grammars import ToyGrammar, zeros_and_ones
from .worlds import RandomLaw

VOCAB, LENGTH, GAMMA = 3, 3, 2
TARGET, DRAFT = RandomLaw(VOCAB, 5), RandomLaw(VOCAB, 1006)
PARAMS = SamplingParams(frequency_penalty=0.5, temperature=0.8)

Tokens = tuple[int, ...]
Propose = Callable[[Chance, ArraySampler, ToyGrammar, list[int]], Draft]


def logits(law: RandomLaw, context: tuple[int, ...]) -> np.ndarray:
    return np.log(law(context) + 0.2)  # nothing is impossible but for the grammar


def by_walk(self: ArraySampler, scores: np.ndarray, depth: int) -> int:
    """Inverse sampling by one number for each position: a coupling that can be enumerated, as Gumbel's cannot."""
    position = len(self._tokens) + depth
    return draw_by_comparison(softmax(scores), self.chance.uniform(("target", position)))  # type: ignore[attr-defined]


def speculative(
    propose: Propose,
    method: str = "standard",
    *,
    length: int = LENGTH,
    cut: Callable[[Draft, ToyGrammar], Draft] = masks.cut_draft,
) -> dict[Tokens, float]:
    """The law of texts of at most `length` tokens."""

    def experiment(chance: Chance) -> Tokens:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda key, index=0: chance.uniform((key, index)))
            patch.setattr(sampling, "draw_from", draw_by_comparison)
            patch.setattr(ArraySampler, "_sample_target", by_walk)
            sampler = ArraySampler(PARAMS, vocab_size=VOCAB, prompt=[], seed=0, method=method)
            sampler.chance = chance  # type: ignore[attr-defined]
            grammar = ToyGrammar(VOCAB, zeros_and_ones)
            while len(grammar.text) < length:
                text = list(grammar.text)
                draft = cut(propose(chance, sampler, grammar, text), grammar)
                parents = draft.parents if draft.parents is not None else range(-1, len(draft.tokens) - 1)
                paths: list[list[int]] = []
                for token, parent in zip(draft.tokens, parents, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                rows = np.stack([logits(TARGET, (*text, *path)) for path in [[], *paths]])
                verdict = sampler.verify(rows, draft, masks.masks_along(draft, grammar))
                for token in [*(draft.tokens[i] for i in verdict.accepted), verdict.token]:
                    sampler.extend([token])
                    if grammar.advance(token):
                        return tuple(grammar.text[:length])
            return tuple(grammar.text[:length])

    return outcomes(experiment)


def plain(length: int = LENGTH) -> dict[Tokens, float]:
    """The law of decoding token by token."""

    def experiment(chance: Chance) -> Tokens:
        sampler = ArraySampler(PARAMS, vocab_size=VOCAB, prompt=[], seed=0)
        grammar = ToyGrammar(VOCAB, zeros_and_ones)
        while len(grammar.text) < length and not grammar.is_complete(()):
            scores = sampler.scores(logits(TARGET, tuple(grammar.text)), [], grammar.mask(()))
            token = chance.choose(softmax(scores))
            sampler.extend([token])
            grammar.advance(token)
        return tuple(grammar.text)

    return outcomes(experiment)


def drawn(*, knows_the_grammar: bool) -> Propose:
    """A chain drawn from a draft's own law."""

    def propose(chance: Chance, sampler: ArraySampler, grammar: ToyGrammar, text: list[int]) -> Draft:
        tokens: list[int] = []
        probs = np.zeros((GAMMA, VOCAB))
        while len(tokens) < GAMMA:
            mask = grammar.mask(tokens) if knows_the_grammar else None
            tokens.append(sampler.draw(logits(DRAFT, (*text, *tokens)), tokens, probs[len(tokens)], mask)[0])
            if knows_the_grammar and grammar.is_complete(tokens):
                break
        return Draft(tokens, probs=probs[: len(tokens)])

    return propose


def coupled(*, knows_the_grammar: bool) -> Propose:
    """A chain drawn with the target's own noise."""

    def propose(chance: Chance, sampler: ArraySampler, grammar: ToyGrammar, text: list[int]) -> Draft:
        tokens: list[int] = []
        while len(tokens) < GAMMA and not (knows_the_grammar and grammar.is_complete(tokens)):
            mask = grammar.mask(tokens) if knows_the_grammar else None
            tokens.append(sampler.draw(logits(DRAFT, (*text, *tokens)), tokens, None, mask)[0])
        return Draft(tokens)

    return propose


def fixed_chain(*tokens: int) -> Propose:
    return lambda chance, sampler, grammar, text: Draft(list(tokens))


def fixed_tree(chance: Chance, sampler: ArraySampler, grammar: ToyGrammar, text: list[int]) -> Draft:
    return Draft([2, 0, 1, 1, 1, 0, 2, 0], parents=[-1, -1, -1, 0, 1, 1, 2, 6])


def drawn_tree(chance: Chance, sampler: ArraySampler, grammar: ToyGrammar, text: list[int]) -> Draft:
    """Two children of the root and of its first child, drawn without replacement by a draft that knows no grammar."""
    tokens: list[int] = []
    laws: list[np.ndarray] = []
    for path in ([], [0]):
        context = (*text, *(tokens[i] for i in path))
        law = softmax(logits(DRAFT, context))
        for _ in range(2):
            token = chance.choose(law)
            tokens.append(token)
            laws.append(law)
            rest = np.where(np.arange(VOCAB) == token, 0.0, law)
            law = rest / rest.sum()
    return Draft(tokens, parents=[-1, -1, 0, 0], probs=np.stack(laws))


def assert_same_law(law: dict[Tokens, float], length: int = LENGTH) -> None:
    expected = plain(length)
    assert law.keys() == expected.keys()
    assert [law[text] for text in expected] == pytest.approx(list(expected.values()), abs=1e-12)


CHAINS = [fixed_chain(0, 1, 0), fixed_chain(1, 1, 0), fixed_chain(2, 0), fixed_chain(1, 2, 0, 1), fixed_chain()]


def test_texts_of_the_grammar_and_no_others():
    law = plain()
    assert set(law) == {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 2), (1, 0, 0), (1, 0, 1), (1, 2)}
    assert min(law.values()) > 1e-3


@pytest.mark.parametrize("propose", CHAINS)
def test_fixed_chains(propose: Propose):
    assert_same_law(speculative(propose))


def test_fixed_trees():
    assert_same_law(speculative(fixed_tree))


@pytest.mark.parametrize("knows", [True, False], ids=["masked", "unmasked"])
def test_coupled_drafts(knows: bool):
    assert_same_law(speculative(coupled(knows_the_grammar=knows)))


@pytest.mark.parametrize("knows", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_chains(method: str, knows: bool):
    assert_same_law(speculative(drawn(knows_the_grammar=knows), method))


def test_drawn_trees():
    assert_same_law(speculative(drawn_tree, length=2), length=2)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_dropping_a_drawn_token_because_it_is_not_allowed_bends_the_law(method: str):
    """The negative control: what is right for fixed drafts is wrong for drawn ones."""

    def drop(draft: Draft, grammar: ToyGrammar) -> Draft:
        kept = masks.cut_draft(Draft(draft.tokens), grammar)
        return Draft(kept.tokens, probs=draft.probs[: len(kept.tokens)])

    law, expected = speculative(drawn(knows_the_grammar=False), method, length=2, cut=drop), plain(2)
    assert law.keys() == expected.keys()
    assert max(abs(law[text] - expected[text]) for text in expected) > 0.01


def test_a_draft_under_the_grammar_is_accepted_more_often():
    """At the first position, where 2 is forbidden: E[sum of min(p, q)] with and without the mask on q."""
    p = softmax(ArraySampler(PARAMS, vocab_size=VOCAB, prompt=[], seed=0).scores(
        logits(TARGET, ()), [], ToyGrammar(VOCAB, zeros_and_ones).mask(())
    ))  # fmt: skip
    rates = []
    for knows in (True, False):
        law = outcomes(lambda chance, knows=knows: _is_first_accepted(chance, drawn(knows_the_grammar=knows)))
        rates.append(law[True])
    q = softmax(ArraySampler(PARAMS, vocab_size=VOCAB, prompt=[], seed=0).scores(logits(DRAFT, ()), []))
    assert rates[1] == pytest.approx(float(np.minimum(p, q).sum()), abs=1e-12)
    assert rates[0] > rates[1]


def _is_first_accepted(chance: Chance, propose: Propose) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniform", lambda key, index=0: chance.uniform((key, index)))
        patch.setattr(sampling, "draw_from", draw_by_comparison)
        sampler = ArraySampler(PARAMS, vocab_size=VOCAB, prompt=[], seed=0, method="standard")
        grammar = ToyGrammar(VOCAB, zeros_and_ones)
        draft = masks.cut_draft(propose(chance, sampler, grammar, []), grammar)
        rows = np.stack([logits(TARGET, tuple(draft.tokens[:i])) for i in range(1 + len(draft.tokens))])
        return bool(sampler.verify(rows, draft, masks.masks_along(draft, grammar)).accepted)


def test_impossible_tokens_never_pass_even_at_uniform_zero():
    """A drawn token that the grammar forbids has p = 0: `u < p / q` is strict."""
    rows = np.zeros((2, VOCAB))
    mask = masks.masks_along(Draft([2], probs=np.ones((1, VOCAB))), ToyGrammar(VOCAB, zeros_and_ones))
    for method in ("standard", "block"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda key, index=0: 0.0)
            sampler = ArraySampler(SamplingParams(), vocab_size=VOCAB, prompt=[], seed=0, method=method)
            verdict = sampler.verify(rows, Draft([2], probs=np.full((1, VOCAB), 1 / 3)), mask)
        assert verdict.accepted == ()
        assert verdict.token in (0, 1)
    assert (
        verify.ratio_test([2], [-1], np.array([[0.5, 0.5, 0.0]] * 2), np.eye(3)[[2]], [0.0], np.argmax).accepted == ()
    )
