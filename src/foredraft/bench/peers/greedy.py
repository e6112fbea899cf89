"""The loop around an engine that only offers passes: greedy, plain or with drafts made from the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from foredraft.bench.figures import Run
from foredraft.bench.machine import Meter
from foredraft.types import SpeculationStats


class Context(Protocol):
    """A model with its cache of one sequence."""

    def forward(self, tokens: Sequence[int], num_logits: int = 1) -> list[int]:
        """A pass after the cached positions, which grow. The likeliest token after each of the last `num_logits`."""
        ...

    def cut(self, length: int) -> None:
        """Keep so many positions."""
        ...


class GreedyPeer:
    """A context as an engine of the benchmark. `chunk`: largest pass. `propose`: a draft, from all tokens so far."""

    max_num_prompts = None

    def __init__(
        self,
        name: str,
        context: Context,
        eos_ids: frozenset[int],
        meter: Meter,
        *,
        description: str,
        chunk: int,
        propose: Callable[[Sequence[int]], list[int]] | None = None,
    ) -> None:
        self.name = name
        self.description = description
        self._context = context
        self._eos_ids = eos_ids
        self._meter = meter
        self._chunk = chunk
        self._propose = propose

    def run(self, prompt: Sequence[int], max_tokens: int) -> Run:
        begin = self._meter.read()
        self._context.cut(0)
        for start in range(0, len(prompt), self._chunk):
            output = self._context.forward(prompt[start : start + self._chunk])
        first = self._meter.read()
        drafts = []  # tokens proposed and accepted, a pair for each pass
        while len(output) < max_tokens and output[-1] not in self._eos_ids:
            draft = self._draft([*prompt, *output], max_tokens - len(output) - 1)
            chosen = self._context.forward([output[-1], *draft], len(draft) + 1)
            num_accepted = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
            drafts.append((len(draft), num_accepted))
            for token in chosen[: num_accepted + 1]:
                output.append(token)
                if token in self._eos_ids:
                    break
            if num_accepted < len(draft):
                self._context.cut(len(prompt) + len(output) - 1)
        end = self._meter.read()
        return Run(
            token_ids=tuple(output),
            text="",
            num_prompt_tokens=len(prompt),
            prefill=self._meter.between(begin, first),
            decode=self._meter.between(first, end),
            speculation=None if self._propose is None else count_drafts(drafts, len(output) - 1),
        )

    def _draft(self, tokens: Sequence[int], max_length: int) -> list[int]:
        return [] if self._propose is None else self._propose(tokens)[:max_length]


def count_drafts(drafts: Sequence[tuple[int, int]], num_decoded: int) -> SpeculationStats:
    """From (proposed, accepted) of every pass."""
    made = [(proposed, accepted) for proposed, accepted in drafts if proposed]
    num_proposed, num_accepted = sum(proposed for proposed, _ in made), sum(accepted for _, accepted in made)
    longest = max((accepted for _, accepted in made), default=0)
    return SpeculationStats(
        num_passes=len(drafts),
        num_drafts=len(made),
        num_draft_tokens=num_proposed,
        num_accepted_tokens=num_accepted,
        acceptance_rate=num_accepted / num_proposed if num_proposed else 0.0,
        mean_acceptance_length=1 + num_accepted / len(made) if made else 1.0,
        tokens_per_pass=num_decoded / len(drafts) if drafts else 0.0,
        accepted_per_position=tuple(sum(accepted > i for _, accepted in made) for i in range(longest)),
        by_drafter={},
    )
