"""What speculation is worth: expected tokens a pass, speed-up, and the draft lengths that pay.

Costs are in any one unit of time. `pass_cost[k]` is the cost of a pass that verifies k draft tokens (k + 1 rows);
`pass_cost[0]` is plain decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens a pass when each draft token passes with one probability (Leviathan et al. 2023, eq. 1), in [1, n + 1]."""
    if acceptance >= 1:
        return num_draft_tokens + 1.0
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def expected_tokens_by_position(acceptance: Sequence[float]) -> float:
    """Tokens a pass, where acceptance[i] is the chance that token i passes once those before it have."""
    total = reached = 1.0
    for rate in acceptance:
        reached *= rate
        total += reached
    return total


def speedup(acceptance: Sequence[float], pass_cost: float, draft_cost: float) -> float:
    """Against plain decoding; costs in units of a plain pass, `draft_cost` that of the whole draft."""
    return expected_tokens_by_position(acceptance) / (pass_cost + draft_cost)


def breakeven_acceptance(num_draft_tokens: int, pass_cost: float, draft_cost: float) -> float | None:
    """The least acceptance at which speculation does not lose, or None if even 1 does; costs as in `speedup`."""
    needed = pass_cost + draft_cost
    if needed > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < needed:
            low = middle
        else:
            high = middle
    return high


def best_length(acceptance: Sequence[float], pass_cost: Sequence[float], draft_cost: Sequence[float]) -> int:
    """The draft length, zero included, with the most expected tokens per time; the shortest among equals.

    acceptance [n]: by position, as in `expected_tokens_by_position`; pass_cost, draft_cost [n + 1]: by length.
    """
    best, best_rate = 0, 1.0 / (pass_cost[0] + draft_cost[0])
    tokens = reached = 1.0
    for length, rate in enumerate(acceptance, start=1):
        reached *= rate
        tokens += reached
        per_time = tokens / (pass_cost[length] + draft_cost[length])
        if per_time > best_rate:
            best, best_rate = length, per_time
    return best


def best_lengths(
    acceptance: Sequence[Sequence[float]], pass_cost: Sequence[float], draft_step_cost: float
) -> list[int]:
    """Draft lengths for a batch that maximise the tokens per time of all sequences together.

    acceptance [batch][n]: by position, for each sequence; pass_cost[m]: of a pass over batch + m rows; draft_step_cost:
    of drafting one more token for any number of sequences. The likeliest draft token is added first, since every row
    costs the same and a token's gain is the chance that its path is accepted; the best number of rows is kept.
    """
    lengths = [0] * len(acceptance)
    tokens = float(len(acceptance))
    best, best_rate = list(lengths), tokens / pass_cost[0]
    # (-chance that the token is reached and accepted, sequence)
    gains = [(-rates[0], i) for i, rates in enumerate(acceptance) if rates]
    heapq.heapify(gains)
    for num_rows in range(1, len(pass_cost)):
        if not gains:
            break
        negative, i = heapq.heappop(gains)
        tokens -= negative
        lengths[i] += 1
        if lengths[i] < len(acceptance[i]):
            heapq.heappush(gains, (negative * acceptance[i][lengths[i]], i))
        rate = tokens / (pass_cost[num_rows] + max(lengths) * draft_step_cost)
        if rate > best_rate:
            best, best_rate = list(lengths), rate
    return best


def memory_bound_pass(bytes_read: float, bandwidth: float) -> float:
    """Seconds that a pass takes at least: bytes of weights and KV cache over bytes per second."""
    return bytes_read / bandwidth


def ratio_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """P(accept) of the ratio test: 1 - TV(p, q)."""
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def coupled_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """P(accept) of coupled (Gumbel) sampling: draft and target choose the same token (Daliri et al. 2024)."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0 and b > 0:
            total += 1 / sum(max(x / a, y / b) for x, y in zip(p, q, strict=True))
    return total
