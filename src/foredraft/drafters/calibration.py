"""What drafters learn while drafting: how often tokens of each kind are accepted, and what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence


class Calibration:
    """Running acceptance rates in buckets (match lengths, ranges of a draft's own probability).

    Starts from priors that count as `prior_weight` observations; each new observation makes the old ones fade by
    `decay`, so that a change of the text shows within some tens of tokens.
    """

    def __init__(self, priors: Sequence[float], *, prior_weight: float = 4.0, decay: float = 0.97) -> None:
        self._rates = list(priors)
        self._weights = [prior_weight] * len(priors)
        self._decay = decay

    def estimate(self, bucket: int) -> float:
        return self._rates[bucket]

    def update(self, bucket: int, accepted: bool) -> None:
        weight = self._weights[bucket] * self._decay
        self._rates[bucket] += (accepted - self._rates[bucket]) / (weight + 1)
        self._weights[bucket] = weight + 1


class RunningCost:
    """Seconds of something that repeats. 0 until observed.

    The better of the first two, then a mean that follows better times quickly and worse ones slowly: one page fault or
    busy moment must not make a good drafter look dear.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_sure = False  # seen more than once

    def observe(self, seconds: float) -> None:
        if self.seconds == 0.0:
            self.seconds = seconds
            return
        if not self.is_sure:
            self.is_sure = True
            self.seconds = min(self.seconds, seconds)
        elif seconds < self.seconds:
            self.seconds += 0.5 * (seconds - self.seconds)
        else:
            self.seconds += 0.1 * (min(seconds, 2 * self.seconds) - self.seconds)


class BatchCost:
    """Seconds of a draft pass by how many sequences it serves, in steps of 1, 2, 4, 8, ... 0 until one is observed."""

    def __init__(self) -> None:
        self._costs: dict[int, RunningCost] = {}

    def seconds(self, num_sequences: int) -> float:
        """Of the nearest count observed, the smaller one first: more may turn out to cost more, up to one pass each."""
        step = _step(num_sequences)
        nearest = min(self._costs, key=lambda other: (other > step, abs(other - step)), default=None)
        if nearest is None:
            return 0.0
        seconds = self._costs[nearest].seconds
        return min(seconds, num_sequences * self._costs[0].seconds) if 0 in self._costs else seconds

    @property
    def is_sure(self) -> bool:
        """Whether a pass for one sequence was observed more than once. What was slow once is worth another try."""
        return 0 in self._costs and self._costs[0].is_sure

    def observe(self, num_sequences: int, seconds: float) -> None:
        self._costs.setdefault(_step(num_sequences), RunningCost()).observe(seconds)


def _step(count: int) -> int:
    return (count - 1).bit_length()
