"""How many tokens to draft: the length with the most expected tokens per second.

With `a_i` the chance that token i is accepted once those before it are, a draft of k tokens brings
1 + sum_{i<=k} prod_{j<=i} a_j tokens from one pass (Leviathan et al. 2023, arXiv 2211.17192, with a_i free to differ).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens from one pass whose draft tokens are accepted with these chances, the target's own included."""
    reach, total = 1.0, 1.0
    for a in acceptance:
        reach *= a
        total += reach
    return total


def best_length(acceptance: Sequence[float], pass_s: Sequence[float], draft_s: float = 0.0) -> int:
    """The k in 0 .. len(acceptance) with the most expected tokens per second; the shortest among equals.

    pass_s[k]: seconds of a pass that verifies k draft tokens, at least len(acceptance) + 1 entries; draft_s: seconds to
    draft one token.
    """
    reach, total = 1.0, 1.0
    best, best_rate = 0, 1.0 / pass_s[0]
    for k, a in enumerate(acceptance, 1):
        reach *= a
        total += reach
        rate = total / (pass_s[k] + k * draft_s)
        if rate > best_rate:
            best, best_rate = k, rate
    return best


def is_worth_another(
    acceptance: Sequence[float], next_acceptance: float, pass_s: Sequence[float], draft_s: float
) -> bool:
    """Whether drafting one token more after k = len(acceptance) raises the expected tokens per second.

    The drawn tokens' own chances are known by then, and they are submitted whatever the answer: so a rule that uses
    draft probabilities stays exact.
    """
    k = len(acceptance)
    now = expected_tokens(acceptance)
    more = expected_tokens([*acceptance, next_acceptance])
    return more / (pass_s[k + 1] + (k + 1) * draft_s) > now / (pass_s[k] + k * draft_s)


def best_lengths(acceptance: Sequence[Sequence[float]], pass_s: Sequence[float], draft_s: float = 0.0) -> list[int]:
    """Draft lengths for a batch that maximise the expected tokens per second of all sequences together.

    acceptance [batch][n]: by position, for each sequence; pass_s[m]: seconds of a pass over batch + m rows; draft_s:
    seconds to draft one more token for any number of sequences. The likeliest draft token is added first, since every
    row costs the same and a token's gain is the chance that its path is accepted; the best number of rows is kept.
    """
    lengths = [0] * len(acceptance)
    tokens = float(len(acceptance))
    best, best_rate = list(lengths), tokens / pass_s[0]
    # (-chance that the token is reached and accepted, sequence)
    gains = [(-rates[0], i) for i, rates in enumerate(acceptance) if rates]
    heapq.heapify(gains)
    for num_rows in range(1, len(pass_s)):
        if not gains:
            break
        negative, i = heapq.heappop(gains)
        tokens -= negative
        lengths[i] += 1
        if lengths[i] < len(acceptance[i]):
            heapq.heappush(gains, (negative * acceptance[i][lengths[i]], i))
        rate = tokens / (pass_s[num_rows] + max(lengths) * draft_s)
        if rate > best_rate:
            best, best_rate = list(lengths), rate
    return best
