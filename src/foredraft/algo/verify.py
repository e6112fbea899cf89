"""Verification rules: which draft tokens to keep, and the token that follows them.

Each rule emits exactly the target's law. Randomness is an input: `uniforms` in [0, 1) and functions that draw, so that
a test can enumerate every outcome.

Rows: p[0] is the target's law after the known text, p[1 + i] the law after draft token i; q[i] is the law that draft
token i was drawn from. Laws are arrays [vocab] that sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from array_api_compat import array_namespace

from foredraft.algo.tree import children_of
from foredraft.types import Array, Verdict


class Laws(Protocol):
    """Laws by row: an array [rows, vocab], or something that computes a row when it is asked for."""

    def __getitem__(self, row: int, /) -> Array: ...


def sample_and_walk(tokens: Sequence[int], parents: Sequence[int], sample: Callable[[int], int]) -> Verdict:
    """Sample the target at the node, step to the child that equals the sample, stop where there is none.

    Every emitted token is a sample of the target, whatever the draft; where `sample` is a function of (seed, position),
    the output is token for token that of sampling without a draft, and a draft that shares the noise is accepted often
    (coupled verification, Daliri et al. 2024). Greedy: `sample` is the argmax. sample(row): a token of that row's law.
    """
    children = children_of(parents)
    accepted: list[int] = []
    while True:
        row = 1 + accepted[-1] if accepted else 0
        token = sample(row)
        node = next((child for child in children[row] if tokens[child] == token), None)
        if node is None:
            return Verdict(tuple(accepted), token)
        accepted.append(node)


def ratio_test(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: Laws,
    q: Laws,
    uniforms: Sequence[float],
    draw: Callable[[Array], int],
) -> Verdict:
    """Keep a token with probability p/q, else go on with what the target has in excess.

    A chain is the test of Leviathan et al. 2023 (arXiv 2211.17192). A tree tests a node's children in the order they
    were drawn in without replacement (recursive rejection, arXiv 2305.09781, 2402.14160): q of a later child is the
    law without the earlier ones. uniforms [num_tokens]; draw(weights): a token in proportion to weights [vocab].
    """
    children = children_of(parents)
    accepted: list[int] = []
    while True:
        row = 1 + accepted[-1] if accepted else 0
        law = p[row]
        node = None
        for child in children[row]:
            token = tokens[child]
            if uniforms[child] * float(q[child][token]) < float(law[token]):
                node = child
                break
            law = excess(law, q[child])
        if node is None:
            return Verdict(tuple(accepted), draw(law))
        accepted.append(node)


def block_test(
    tokens: Sequence[int], p: Laws, q: Laws, uniforms: Sequence[float], draw: Callable[[Array], int]
) -> Verdict:
    """Block verification of a chain (Sun et al., ICLR 2025, arXiv 2403.10444): never accepts less than the ratio test.

    The uniforms, the draft's draws and `draw` must be fresh in every block: the accepted length has looked at all of
    them, also beyond itself.
    """
    num_tokens = len(tokens)
    num_accepted, weights = 0, excess(p[0], q[0]) if num_tokens else p[0]
    rho = 1.0
    for i, token in enumerate(tokens):
        rho = _next_rho(rho, float(p[i][token]), float(q[i][token]))
        if i + 1 < num_tokens:
            surplus = _positive_part(rho * p[i + 1] - q[i + 1])
            mass = _total(surplus)
            left = mass + 1.0 - rho
            threshold = mass / left if left > 0 else 1.0
            rest = surplus if mass > 0 else p[i + 1]
        else:
            threshold, rest = rho, p[num_tokens]
        if uniforms[i] < threshold:  # the longest prefix counts: go on after a failure
            num_accepted, weights = i + 1, rest
    return Verdict(tuple(range(num_accepted)), draw(weights))


def excess(p: Array, q: Array) -> Array:
    """norm([p - q]+): what is left of `p` after `q` was rejected. Without mass, which only rounding produces, `p`."""
    rest = _positive_part(p - q)
    mass = _total(rest)
    return rest / mass if mass > 0 else p


def draw_from(weights: Array, u: float) -> int:
    """The token where the running sum of weights [vocab] passes `u` of the total; u in [0, 1)."""
    xp = array_namespace(weights)
    sums = xp.cumulative_sum(weights)
    passed = xp.astype(sums <= u * sums[-1], xp.int64)
    last = int(xp.max(xp.where(weights > 0, xp.arange(weights.shape[0], device=weights.device), 0)))
    return min(int(xp.sum(passed)), last)


def _next_rho(rho: float, p: float, q: float) -> float:
    if rho == 0 or p == 0:
        return 0.0
    return min(1.0, rho * (p / q)) if q > 0 else 1.0


def _positive_part(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x))


def _total(x: Array) -> float:
    return float(array_namespace(x).sum(x))
