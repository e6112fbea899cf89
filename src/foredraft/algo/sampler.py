"""One sequence's sampling state, as the engine and model drafters use it.

Two implementations answer to the protocol: `ArraySampler`, written on the functions of this room for any array
library, and the C++ one of the CPU core (`foredraft._native.Sampler`). A test holds them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from foredraft.types import Array, Draft, TokenLogprob, Verdict

RejectionMethod = Literal["standard", "block"]


class Sampler(Protocol):
    """Parameters, counts of the tokens so far, and noise.

    Noise is a function of (seed, stream, choice index, absolute position, token id); block verification adds the pass
    counter. Without a user's seed the engine gives a random one, and rules that are faster but not seed-stable may be
    used: see `verify`.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: they count for penalties and move the position."""
        ...

    def draw(self, logits: Array, path: Sequence[int], probs: Array | None) -> tuple[int, float]:
        """Draft side: a token after the committed text and `path`, and its probability, from the processed law of `logits`.

        logits [vocab]. With `probs` [vocab] the law is written there and the draw uses the draft's own noise stream;
        without, the target's noise is shared (coupled drafting). Greedy takes the argmax; its probability is then the
        one at temperature 1.
        """
        ...

    def verify(self, logits: Array, draft: Draft) -> Verdict:
        """Target side. logits [1 + n, vocab]: row 0 follows the committed text, row 1 + i follows draft token i.

        Without `draft.probs`: sample the target at the node with the position's own noise, step to the child that
        equals the sample (greedy: argmax). With them: the ratio test or block verification. Does not `extend`. Raises
        NumericalError where the row it must sample from holds a NaN or no finite value.
        """
        ...

    def logprobs(self, logits: Array, token: int, num_top: int) -> TokenLogprob:
        """Of the raw logits [vocab], before any processing."""
        ...
