"""What speculation is worth on paper: speed-up, break-even, the least time of a pass, acceptance of two known laws."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.algo.lengths import expected_tokens


def speedup(acceptance: Sequence[float], pass_cost: float, draft_cost: float) -> float:
    """Against plain decoding. acceptance [num_draft_tokens]: by position, each given those before it.

    Costs in units of a plain pass: of the pass that verifies, and of the whole draft.
    """
    return expected_tokens(acceptance) / (pass_cost + draft_cost)


def breakeven_acceptance(num_draft_tokens: int, pass_cost: float, draft_cost: float) -> float | None:
    """The least acceptance, equal at all positions, at which speculation does not lose; None if even 1 does.

    Costs as in `speedup`.
    """
    if pass_cost + draft_cost > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if speedup([middle] * num_draft_tokens, pass_cost, draft_cost) < 1:
            low = middle
        else:
            high = middle
    return high


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
