"""Sampling filters: what turns raw logits into the law that a token is drawn from.

Pure functions over the array API standard, one row at a time: logits [vocab] in, logits [vocab] out, -inf where a
token is excluded. The order of a request's processing is bias, penalties, grammar, temperature, min-p, top-k, top-p.
Among equal values the lowest id comes first.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from foredraft.types import Array


def apply_logit_bias(logits: Array, bias: Array) -> Array:
    """Add bias [vocab]."""
    return logits + bias


def mask_tokens(logits: Array, excluded: Array) -> Array:
    """-inf where excluded [vocab] (bool) is set."""
    xp = array_namespace(logits)
    return xp.where(excluded, _minus_infinity(logits), logits)


def apply_penalties(
    logits: Array, counts: Array, seen: Array, *, presence: float, frequency: float, repetition: float
) -> Array:
    """Make repeated tokens less likely.

    counts [vocab]: how often each token occurs in the output so far, for OpenAI's presence and frequency penalties.
    seen [vocab] (bool): in the prompt or the output; the repetition penalty (CTRL, arXiv 1909.05858) divides positive
    logits of these tokens and multiplies negative ones. It goes first.
    """
    xp = array_namespace(logits)
    repeated = xp.where(logits > 0, logits / repetition, logits * repetition)
    logits = xp.where(seen, repeated, logits)
    counts = xp.astype(counts, logits.dtype)
    return logits - frequency * counts - presence * xp.astype(counts > 0, logits.dtype)


def apply_temperature(logits: Array, temperature: float) -> Array:
    """Divide by a temperature above 0. The greatest logit becomes 0, so that no temperature is too small."""
    xp = array_namespace(logits)
    return (logits - xp.max(logits)) / temperature


def apply_min_p(logits: Array, min_p: float) -> Array:
    """Keep tokens whose probability is at least `min_p` times the greatest one (arXiv 2407.01082)."""
    xp = array_namespace(logits)
    weights = xp.exp(logits - xp.max(logits))
    return xp.where(weights >= min_p, logits, _minus_infinity(logits))


def apply_top_k(logits: Array, k: int) -> Array:
    """Keep the `k` likeliest tokens; 0, -1 or more than there are: all."""
    if not 0 < k < logits.shape[0]:
        return logits
    xp = array_namespace(logits)
    return xp.where(_ranks(logits) < k, logits, _minus_infinity(logits))


def apply_top_p(logits: Array, top_p: float) -> Array:
    """Keep the fewest likeliest tokens that together reach the probability `top_p` (arXiv 1904.09751), one at least."""
    xp = array_namespace(logits)
    order = xp.argsort(logits, descending=True, stable=True)
    weights = xp.take(xp.exp(logits - xp.max(logits)), order)
    before = xp.cumulative_sum(weights) - weights
    num_kept = int(xp.sum(xp.astype(before < top_p * xp.sum(weights), xp.int64)))
    return xp.where(_ranks(logits) < max(num_kept, 1), logits, _minus_infinity(logits))


def softmax(logits: Array) -> Array:
    """Probabilities [vocab] of logits [vocab] of which at least one is finite."""
    xp = array_namespace(logits)
    weights = xp.exp(logits - xp.max(logits))
    return weights / xp.sum(weights)


def log_softmax(logits: Array) -> Array:
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits)
    return shifted - xp.log(xp.sum(xp.exp(shifted)))


def top_tokens(logits: Array, k: int) -> list[int]:
    """Ids of the `k` greatest logits, greatest first."""
    xp = array_namespace(logits)
    order = xp.argsort(logits, descending=True, stable=True)
    return [int(i) for i in order[:k]]


def _ranks(logits: Array) -> Array:
    """Each token's place in the descending order."""
    xp = array_namespace(logits)
    return xp.argsort(xp.argsort(logits, descending=True, stable=True), stable=True)


def _minus_infinity(logits: Array) -> Array:
    xp = array_namespace(logits)
    return xp.full_like(logits, float("-inf"))
