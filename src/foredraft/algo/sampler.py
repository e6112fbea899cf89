"""One sequence's sampling state, as the engine and model drafters use it.

Three implementations answer to the protocol: `ArraySampler`, written on the functions of this room for any array
library, the C++ one of the CPU core (`foredraft._native.Sampler`), and `TritonSampler` for rows on a GPU
(`algo/triton/`). Tests hold them equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from array_api_compat import array_namespace, is_numpy_array
from numpy.typing import NDArray

from foredraft.algo import filters
from foredraft.algo.masks import unpack_mask
from foredraft.algo.noise import NoiseKey, Stream, gumbel, token_uniforms, uniform
from foredraft.algo.tree import chain, check_parents, is_chain, path_to
from foredraft.algo.verify import block_test, draw_from, ratio_test, sample_and_walk
from foredraft.errors import NoTokenError, NumericalError
from foredraft.types import Array, Draft, SamplingParams, TokenLogprob, Verdict

RejectionMethod = Literal["standard", "block"]
SamplerKind = Literal["array", "native", "triton"]
Mask = NDArray[np.uint32]  # one row of `algo/masks.py`
Masks = NDArray[np.uint32]  # several

NOT_FINITE = "the model produced logits that are not finite; its weights or its input are damaged"
NO_TOKEN = "no token is left to choose: every logit is -inf"
NO_DRAFT_LAW = "the draft's probabilities do not sum to a positive number"


class Sampler(Protocol):
    """Parameters, counts of the tokens so far, and noise.

    Noise is a function of (seed, stream, choice index, absolute position, token id); block verification adds the pass
    counter. Without a user's seed the engine gives a random one, and rules that are faster but not seed-stable may be
    used: see `verify`.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: they count for penalties and move the position."""
        ...

    def draw(
        self, logits: Array, path: Sequence[int], probs: Array | None, mask: Mask | None = None
    ) -> tuple[int, float]:
        """Draft side: a token after the committed text and `path`, and its probability under the processed law.

        logits [vocab]; mask: what a grammar allows there. With `probs` [vocab] the law is written there and the draw
        uses the draft's own noise stream; without, the target's noise is shared (coupled drafting). Greedy takes the
        argmax; its probability is then the one at temperature 1. The draft's vocabulary may be narrower or wider than
        the target's: ids that the target lacks are never drawn. Raises NoTokenError where nothing is left to draw.
        """
        ...

    def runners_up(
        self, logits: Array, path: Sequence[int], count: int, least_odds: float, mask: Mask | None = None
    ) -> list[tuple[int, float]]:
        """Draft side: what else may come there, likeliest first: tokens and their odds, exp(logit - best logit).

        At most `count` after the best one, each with odds of at least `least_odds`; bias, penalties and `mask` count,
        temperature and filters do not. Raises what `draw` raises.
        """
        ...

    def verify(self, logits: Array, draft: Draft, masks: Masks | None = None) -> Verdict:
        """Target side. logits [1 + n, vocab]: row 0 follows the committed text, row 1 + i follows draft token i.

        masks [1 + n, (vocab + 31) // 32]: what a grammar allows after each.

        Without `draft.probs`: sample the target at the node with the position's own noise, step to the child that
        equals the sample (greedy: argmax). With them: the ratio test or block verification. Does not `extend`. Raises
        NumericalError where the row it must sample from holds a NaN or no finite value.
        """
        ...

    def logprobs(self, logits: Array, token: int, num_top: int) -> TokenLogprob:
        """Of the raw logits [vocab], before any processing."""
        ...


def make_sampler(
    params: SamplingParams,
    *,
    vocab_size: int,
    prompt: Sequence[int],
    seed: int,
    choice: int = 0,
    eos_ids: Sequence[int] = (),
    method: RejectionMethod = "block",
    vocab_limit: int | None = None,
    kind: SamplerKind = "array",
    kernel_set: str | None = None,
    device: str | None = None,
) -> Sampler:
    """A sampler for one choice of one request.

    vocab_size: width of the target's rows; ids from `vocab_limit` on (default: none) are never chosen. prompt: the
    tokens already known. eos_ids: what `min_tokens` holds back. kind "native": the C++ one, which takes float32 rows of
    numpy in C order, with the best kernel set or the one named (all give the same bits); "triton": for float32 tensors
    of torch on `device`.
    """
    if kind == "native":
        from foredraft import _native  # the rooms above must work without the compiled core

        return _native.Sampler(
            vocab_size=vocab_size,
            prompt=prompt,
            seed=seed % 2**64,
            choice=choice,
            block=method == "block",
            kernel_set=kernel_set,
            vocab_limit=vocab_size if vocab_limit is None else vocab_limit,
            eos_ids=eos_ids,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(params.top_k, vocab_size),
            min_p=params.min_p,
            min_tokens=min(params.min_tokens, 2**31 - 1),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
        )
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "prompt": prompt,
        "seed": seed,
        "choice": choice,
        "eos_ids": eos_ids,
        "method": method,
        "vocab_limit": vocab_limit,
    }
    if kind == "triton":
        from foredraft.algo.triton.sampler import TritonSampler  # torch is an extra

        return TritonSampler(params, device=device, **options)
    return ArraySampler(params, **options)


@dataclass(frozen=True, slots=True)
class Check:
    """What `sampler.verify` is asked."""

    sampler: Sampler
    logits: Array
    draft: Draft
    masks: Masks | None = None


def verify_all(checks: Sequence[Check]) -> list[Verdict | NumericalError]:
    """Each check's verdict, or why its sequence cannot go on.

    Samplers whose class has a `verify_together` decide in common, which changes no verdict.
    """
    outcomes: dict[int, Verdict | NumericalError] = {}
    together: dict[Any, list[int]] = {}
    for i, check in enumerate(checks):
        decide = getattr(type(check.sampler), "verify_together", None)
        if decide is not None:
            together.setdefault(decide, []).append(i)
            continue
        try:
            outcomes[i] = check.sampler.verify(check.logits, check.draft, check.masks)
        except NumericalError as error:
            outcomes[i] = error
    for decide, members in together.items():
        outcomes.update(zip(members, decide([checks[i] for i in members]), strict=True))
    return [outcomes[i] for i in range(len(checks))]


class ArraySampler:
    """The reference, in float64, on numpy or torch rows.

    Invariant: `_tokens` holds every committed token; counts and the position follow from it, so that nothing but
    `extend` and the pass counter changes.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        seed: int,
        choice: int = 0,
        eos_ids: Sequence[int] = (),
        method: RejectionMethod = "block",
        vocab_limit: int | None = None,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_size if vocab_limit is None else vocab_limit
        self._num_prompt_tokens = len(prompt)
        self._seed = seed % 2**64
        self._choice = choice
        self._eos_ids = [i for i in eos_ids if 0 <= i < vocab_size]
        self._method = method
        self._num_passes = 0
        self._tokens: list[int] = []
        self._bias = np.zeros(vocab_size)
        for token, bias in params.logit_bias.items():
            self._check_token(token, "logit_bias")
            self._bias[token] = bias
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._check_token(token, "a committed token")
        self._tokens.extend(int(token) for token in tokens)

    def draw(
        self, logits: Array, path: Sequence[int], probs: Array | None, mask: Mask | None = None
    ) -> tuple[int, float]:
        self._check_draw(logits, path, mask, probs)
        scores = self._process(self._fit(_to_double(logits)), path, mask)
        if probs is None:
            token = self._sample_target(scores, len(path))
            return token, float(filters.softmax(scores)[token])
        law = _one_hot(scores) if self._params.is_greedy else filters.softmax(scores)
        width = min(probs.shape[0], self._vocab_size)
        probs[:] = 0
        probs[:width] = law[:width]
        rounded = _to_double(probs)  # the law is what the buffer holds
        token = draw_from(rounded, uniform(self._key(Stream.DRAFT, len(path))))
        return token, float(filters.softmax(scores)[token])

    def runners_up(
        self, logits: Array, path: Sequence[int], count: int, least_odds: float, mask: Mask | None = None
    ) -> list[tuple[int, float]]:
        self._check_draw(logits, path, mask)
        scores = self._adjust(self._fit(_to_double(logits)), path, mask)
        xp = array_namespace(scores)
        places = xp.arange(scores.shape[0], device=scores.device)
        token = int(xp.argmax(scores))
        best = float(scores[token])
        found: list[tuple[int, float]] = []
        for _ in range(count):  # far less work than to sort a vocabulary
            scores = xp.where(places == token, -math.inf, scores)
            token = int(xp.argmax(scores))
            odds = math.exp(float(scores[token]) - best)
            if odds == 0 or odds < least_odds:
                break
            found.append((token, odds))
        return found

    def verify(self, logits: Array, draft: Draft, masks: Masks | None = None) -> Verdict:
        tokens, parents = self._check_draft(logits, draft, masks)
        rows = _ProcessedRows(self, logits, tokens, parents, masks)
        if draft.probs is None or not tokens:
            verdict = sample_and_walk(tokens, parents, rows.sample)
        else:
            verdict = self._test(tokens, parents, rows, draft.probs)
        self._num_passes += 1
        return verdict

    def _test(self, tokens: Sequence[int], parents: Sequence[int], p: _ProcessedRows, probs: Array) -> Verdict:
        q = _DraftLaws(probs, self._vocab_size)
        uniforms = [uniform(self._key(Stream.ACCEPT, p.depths[i]), i) for i in range(len(tokens))]

        def draw(weights: Array) -> int:
            return draw_from(weights, uniform(self._key(Stream.RESIDUAL, 0)))

        if self._method == "block" and is_chain(parents):
            return block_test(tokens, p, q, uniforms, draw)
        return ratio_test(tokens, parents, p, q, uniforms, draw)

    def logprobs(self, logits: Array, token: int, num_top: int) -> TokenLogprob:
        self._check_row(logits.shape, exact=True)
        self._check_token(token, "token")
        _check_numbers(logits)
        scores = filters.log_softmax(_to_double(logits))
        top = tuple((i, float(scores[i])) for i in filters.top_tokens(scores, num_top))
        return TokenLogprob(token_id=token, logprob=float(scores[token]), top=top)

    def scores(self, logits: Array, path: Sequence[int], mask: Mask | None = None) -> Array:
        """Processed logits [vocab] after the committed text and `path`: -inf where a token is excluded."""
        return self._process(_to_double(logits), path, mask)

    def _process(self, logits: Array, path: Sequence[int], mask: Mask | None) -> Array:
        params = self._params
        logits = self._adjust(logits, path, mask)
        if params.is_greedy:
            return logits
        logits = filters.apply_temperature(logits, params.temperature)
        if params.min_p > 0:
            logits = filters.apply_min_p(logits, params.min_p)
        logits = filters.apply_top_k(logits, params.top_k)
        if params.top_p < 1:
            logits = filters.apply_top_p(logits, params.top_p)
        return logits

    def _adjust(self, logits: Array, path: Sequence[int], mask: Mask | None) -> Array:
        """After bias, the end-of-text mask, penalties and the grammar's mask; checked before and after."""
        _check_numbers(logits)
        logits = self._reweigh(logits, path, mask)
        xp = array_namespace(logits)
        if not bool(xp.any(xp.isfinite(logits))):
            raise NoTokenError(NO_TOKEN)
        return logits

    def _reweigh(self, logits: Array, path: Sequence[int], mask: Mask | None) -> Array:
        params = self._params
        output = [*self._tokens[self._num_prompt_tokens :], *path]
        if params.logit_bias:
            logits = filters.apply_logit_bias(logits, _like(self._bias, logits))
        excluded = np.zeros(self._vocab_size, dtype=np.bool_)
        excluded[self._vocab_limit :] = True
        if len(output) < params.min_tokens:
            excluded[self._eos_ids] = True
        if excluded.any():
            logits = filters.mask_tokens(logits, _like(excluded, logits))
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size)
            seen = counts > 0
            seen[self._tokens] = True
            logits = filters.apply_penalties(
                logits,
                _like(counts, logits),
                _like(seen, logits),
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                repetition=params.repetition_penalty,
            )
        if mask is not None:
            logits = filters.mask_tokens(logits, _like(~unpack_mask(mask, self._vocab_size), logits))
        return logits

    def _sample_target(self, scores: Array, depth: int) -> int:
        xp = array_namespace(scores)
        if not self._params.is_greedy:
            key = NoiseKey(self._seed, Stream.TARGET, len(self._tokens) + depth, self._choice)
            scores = scores + gumbel(token_uniforms(key, scores))
        return int(xp.argmax(scores))

    def _key(self, stream: Stream, depth: int) -> NoiseKey:
        return NoiseKey(self._seed, stream, len(self._tokens) + depth, self._choice, self._num_passes)

    def _fit(self, logits: Array) -> Array:
        """A draft's row at the target's width."""
        width = logits.shape[0]
        if width >= self._vocab_size:
            return logits[: self._vocab_size]
        xp = array_namespace(logits)
        padding = xp.full((self._vocab_size - width,), float("-inf"), dtype=logits.dtype, device=logits.device)
        return xp.concat([logits, padding])

    def _check_token(self, token: int, what: str) -> None:
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"{what}: token id {token} is outside the vocabulary of {self._vocab_size}")

    def _check_words(self, num_words: int) -> None:
        expected = (self._vocab_size + 31) // 32
        if num_words != expected:
            raise ValueError(f"a mask has {num_words} words; expected {expected}")

    def _check_row(self, shape: Sequence[int], exact: bool) -> None:
        if len(shape) != 1 or shape[0] == 0 or (exact and shape[0] != self._vocab_size):
            raise ValueError(f"logits have shape {tuple(shape)}; expected one row of {self._vocab_size}")

    def _check_draw(self, logits: Array, path: Sequence[int], mask: Mask | None, probs: Array | None = None) -> None:
        self._check_row(logits.shape, exact=False)
        for token in path:
            self._check_token(token, "path")
        if mask is not None:
            self._check_words(mask.shape[0])
        width = min(logits.shape[0], self._vocab_size)
        if probs is not None and probs.shape[0] < width:
            raise ValueError(f"a buffer of {probs.shape[0]} probabilities is too narrow for {width} logits")

    def _check_draft(self, logits: Array, draft: Draft, masks: Masks | None) -> tuple[Sequence[int], Sequence[int]]:
        """Returns tokens and parents."""
        tokens, probs = [int(token) for token in draft.tokens], draft.probs
        parents = chain(len(tokens)) if draft.parents is None else [int(i) for i in draft.parents]
        expected = (1 + len(tokens), self._vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits have shape {tuple(logits.shape)}; this draft needs {expected}")
        if len(parents) != len(tokens):
            raise ValueError(f"{len(tokens)} draft tokens have {len(parents)} parents")
        check_parents(parents)
        for token in tokens:
            self._check_token(token, "draft")
        if probs is not None and (len(probs.shape) != 2 or probs.shape[0] != len(tokens)):
            raise ValueError(f"draft probabilities have shape {tuple(probs.shape)}; expected {len(tokens)} rows")
        if masks is not None:
            self._check_words(masks.shape[1])
            if masks.shape[0] != 1 + len(tokens):
                raise ValueError(f"{masks.shape[0]} masks; this draft needs {1 + len(tokens)}")
        return tokens, parents


class _ProcessedRows:
    """The target's rows, each processed at its own place in the draft when a rule asks for it."""

    def __init__(
        self, sampler: ArraySampler, logits: Array, tokens: Sequence[int], parents: Sequence[int], masks: Masks | None
    ) -> None:
        self._sampler, self._logits, self._tokens, self._parents = sampler, logits, tokens, parents
        self._masks = masks
        self.depths = [len(path_to(parents, i)) - 1 for i in range(len(tokens))]

    def __getitem__(self, row: int) -> Array:
        scores = self._scores(row)
        return _one_hot(scores) if self._sampler._params.is_greedy else filters.softmax(scores)

    def sample(self, row: int) -> int:
        return self._sampler._sample_target(self._scores(row), len(path_to(self._parents, row - 1)))

    def _scores(self, row: int) -> Array:
        path = [self._tokens[i] for i in path_to(self._parents, row - 1)]
        return self._sampler.scores(self._logits[row, :], path, None if self._masks is None else self._masks[row])


class _DraftLaws:
    """A draft's laws in double, at the target's width, with sum 1."""

    def __init__(self, probs: Array, vocab_size: int) -> None:
        self._probs, self._vocab_size = probs, vocab_size

    def __getitem__(self, row: int) -> Array:
        law = _to_double(self._probs[row, :])[: self._vocab_size]
        xp = array_namespace(law)
        if law.shape[0] < self._vocab_size:
            padding = xp.zeros((self._vocab_size - law.shape[0],), dtype=law.dtype, device=law.device)
            law = xp.concat([law, padding])
        total = float(xp.sum(law))
        if not 0 < total < math.inf:
            raise ValueError(NO_DRAFT_LAW)
        return law / total


def _to_double(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.astype(x, xp.float64)


def _one_hot(scores: Array) -> Array:
    xp = array_namespace(scores)
    return xp.astype(xp.arange(scores.shape[0], device=scores.device) == xp.argmax(scores), xp.float64)


def _like(values: np.ndarray[Any, Any], logits: Array) -> Array:
    """numpy values as an array beside `logits`."""
    if is_numpy_array(logits):
        return values
    return array_namespace(logits).asarray(values, device=logits.device)


def _check_numbers(logits: Array) -> None:
    xp = array_namespace(logits)
    best = float(xp.max(logits))  # NaN if one is there
    if not math.isfinite(best):
        raise NumericalError(NOT_FINITE)
