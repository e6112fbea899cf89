"""How many tokens to draft: the lengths with the most expected tokens per second, of all sequences of a pass together.

With `a_i` the chance that token i is accepted once those before it are, a draft of k tokens brings
1 + sum_{i<=k} prod_{j<=i} a_j tokens from one pass (Leviathan et al. 2023, arXiv 2211.17192, with a_i free to differ).

Common arguments. pass_s [m + 1]: seconds of the pass with m draft tokens in all; tokens: what it brings without any;
row_s: seconds that a drafted token's context adds to the pass; draft_s: seconds of a draft pass, which brings every
sequence that wants one a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foredraft.algo.tree import chain

#: Rounds in which the price of time, and with it the order of the tokens, is found.
MAX_ROUNDS = 4


def expected_tokens(acceptance: Sequence[float], parents: Sequence[int] | None = None) -> float:
    """Expected tokens from one pass, the target's own included.

    acceptance [n]: the chance of each draft token once its parents are accepted; parents [n]: None for a chain.
    """
    reach: list[float] = []
    total = 1.0
    for a, parent in zip(acceptance, chain(len(acceptance)) if parents is None else parents, strict=True):
        reach.append(a * reach[parent] if parent >= 0 else a)
        total += reach[-1]
    return total


def best_length(acceptance: Sequence[float], pass_s: Sequence[float], token_s: float = 0.0, tokens: float = 1.0) -> int:
    """One sequence's draft: the k in 0 .. len(acceptance) with the highest rate; the shortest among equals.

    token_s: seconds of a draft token beside the pass: drafting it, and what its context adds.
    """
    reach, total = 1.0, tokens
    best, best_rate = 0, tokens / pass_s[0]
    for k, a in enumerate(acceptance, 1):
        reach *= a
        total += reach
        rate = total / (pass_s[k] + k * token_s)
        if rate > best_rate:
            best, best_rate = k, rate
    return best


def best_lengths(
    acceptance: Sequence[Sequence[float]],
    pass_s: Sequence[float],
    tokens: float,
    row_s: Sequence[float],
    draft_s: float = 0.0,
) -> list[int]:
    """Draft lengths of several sequences. acceptance [batch][n]: by position, for each; row_s [batch].

    A token's gain is the chance that its path is accepted, so gains fall along a sequence, and for a given rate the
    best tokens are those with the highest gain - rate * row_s. Every depth of the deepest draft is tried, since the
    number of draft passes depends on it; the rate found gives the next round's order.
    """
    if len(acceptance) == 1:
        return [best_length(acceptance[0], pass_s, draft_s + row_s[0], tokens)]
    num_sequences, depth = len(acceptance), max(map(len, acceptance), default=0)
    if depth == 0:
        return [0] * num_sequences
    table = np.full((num_sequences, depth), -np.inf)  # a token that may not be drafted
    for gains_of_one, chances in zip(table, acceptance, strict=True):
        gains_of_one[: len(chances)] = np.cumprod(chances)
    gains, row = table.ravel(), np.repeat(np.asarray(row_s, np.float64), depth)  # [tokens]
    no_room = np.full(max(0, len(gains) + 1 - len(pass_s)), np.finfo(np.float64).max)
    seconds = np.append(pass_s, no_room)
    deepest = np.arange(1, depth + 1)[:, None]
    lengths, best_rate = [0] * num_sequences, tokens / seconds[0]
    for _ in range(MAX_ROUNDS):
        order = np.argsort(best_rate * row - gains, kind="stable")
        taken = order % depth < deepest  # [deepest, tokens]: those that drafts no deeper than that have
        spent = np.cumsum(taken * row[order], axis=1) + deepest * draft_s
        brought = tokens + np.cumsum(np.where(taken, gains[order], 0.0), axis=1)
        rate = brought / (seconds[np.cumsum(taken, axis=1)] + spent)
        limit, last = np.unravel_index(np.argmax(rate), rate.shape)
        if rate[limit, last] <= best_rate:
            break
        best_rate = rate[limit, last]
        chosen = order[: last + 1][taken[limit, : last + 1]]
        lengths = np.bincount(chosen // depth, minlength=num_sequences).tolist()
    return lengths


def worth_growing(
    gains: Sequence[float],
    pass_s: Sequence[float],
    tokens: float,
    num_drafted: int,
    spent_s: float,
    row_s: Sequence[float],
    draft_s: float,
) -> list[int]:
    """Which tokens to add to the drafts, so that the rate rises the most: their indices, or none.

    gains [candidates]: the chance that each is accepted with all before it; tokens: what the pass is expected to bring
    with the num_drafted tokens that are there; spent_s: what these cost beside the pass; draft_s: of the one draft pass
    that draws all that are added, if they have to be drawn. Those drawn before are submitted whatever the answer: so a
    rule that uses draft probabilities stays exact.
    """
    best_rate = tokens / (pass_s[num_drafted] + spent_s)
    order = sorted(range(len(gains)), key=lambda i: best_rate * row_s[i] - gains[i])
    spent_s += draft_s
    count = 0
    for i, added in enumerate(order[: len(pass_s) - 1 - num_drafted], 1):
        tokens += gains[added]
        spent_s += row_s[added]
        rate = tokens / (pass_s[num_drafted + i] + spent_s)
        if rate > best_rate:
            count, best_rate = i, rate
    return order[:count]
