"""A smaller model of the same tokenizer as the drafter.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Its output head may be cut to frequent
tokens and those of the context (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from foredraft.algo.lengths import worth_growing
from foredraft.drafters.base import DraftNeeds
from foredraft.drafters.calibration import BatchCost, Calibration
from foredraft.errors import NoTokenError, NumericalError
from foredraft.kvcache.blocks import BlockPool, SlotTable
from foredraft.models.base import LanguageModel, Rows
from foredraft.types import Array, Draft, DraftRequest, SequenceView, Verdict

logger = logging.getLogger("foredraft")

#: Tokens that the draft computes in one pass, all texts together.
CHUNK = 512
#: Rows of one text in a pass that draws a token, if its cache is up to date: the token before was accepted, too.
MAX_BEHIND = 2
#: Tokens before its own that a trial draft looks at, besides those in the cache. To compute everything that was missed
#: would cost a twentieth of the time of plain decoding, however rare trials are.
TRIAL_CONTEXT = 8
#: Borders of buckets of the draft's own probability, and how often tokens of each are accepted before a request has
#: shown its own rates.
EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.97, 0.99)
PRIOR_ACCEPTANCE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
PRIOR_MEAN_ACCEPTANCE = 0.75


class ModelDrafter:
    """Drafts a chain with its own model and cache, many requests in one pass.

    Its cache follows the sequence by itself: what was drafted and accepted is there already, anything else is computed
    before the next draft, at most CHUNK tokens a call. When its blocks run out, those of texts that are not drafting
    now go first; if that is not enough, some texts go without a draft.
    """

    needs = DraftNeeds(least_acceptance=0.25, length=False)

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        target_vocab_size: int,
        *,
        head_size: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.name = name
        self._model = model
        self._vocab_size = min(target_vocab_size, model.vocab_size)  # ids that both know; the rest is padding
        self._pool = BlockPool(model.num_blocks, shares=enable_prefix_caching)
        self._states: dict[int, _State] = {}
        self._pass_cost = BatchCost()
        self._head = _Head(model, head_size) if head_size is not None else None
        self._warm_up()

    def begin(self, seq: SequenceView) -> None:
        self._states[seq.id] = _State(SlotTable(self._pool, seq.cache_salt))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = [_Chain(r, self._states[r.seq.id], self._vocab_size) for r in requests]
        for chain in chains:
            chain.state.follow(chain.request.seq.tokens)
        active = [c for c in chains if self._can_grow(c)]
        if self._head is not None:
            self._head.cover(c.request.seq for c in active if c.request.num_tokens)
        busy = {r.seq.id for r in requests}
        while active:
            drawn = self._compute(active, busy)
            active = self._growing([c for c in drawn if self._can_grow(c)], chains)
        return [chain.draft(self.name) for chain in chains]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        if draft.source == self.name:
            self._states[seq.id].learn(len(draft.tokens), len(verdict.accepted))

    def end(self, seq: SequenceView) -> None:
        if self._head is not None:
            self._head.forget(seq.id)
        state = self._states.pop(seq.id, None)
        if state is not None:
            state.follow(seq.tokens)
            state.release()

    def check_integrity(self) -> None:
        """Raises ForedraftError if its cache miscounts a block's owners, or mistakes what it holds."""
        self._pool.check_integrity([state.table for state in self._states.values()])

    def _warm_up(self) -> None:
        """One pass, so that the first draft is not timed while its weights come from disk."""
        table = SlotTable(self._pool)
        self._model.forward([Rows(table.reserve(1), 0, [0])])
        table.release()

    def _compute(self, chains: Sequence[_Chain], busy: Collection[int]) -> list[_Chain]:
        """One pass over what the caches lack. Returns the chains that drew a token."""
        budget = CHUNK
        batch: list[tuple[_Chain, list[int], Rows]] = []
        for chain in chains:
            missing = chain.missing()
            tokens = missing[:budget]
            end = len(chain.state.cached) + len(tokens)
            if not tokens or not self._has_room(chain.state, end, busy):
                continue
            budget -= len(tokens)
            known = [t if t < self._model.vocab_size else 0 for t in tokens]  # padding of a wider target: any id
            num_logits = int(chain.request.num_tokens > 0 and len(tokens) == len(missing))
            rows = Rows(chain.state.table.reserve(end), len(chain.state.cached), known, num_logits=num_logits)
            batch.append((chain, tokens, rows))
        if not batch:
            return []
        began = perf_counter()
        logits = self._model.forward([rows for _, _, rows in batch])
        drawing = []
        for chain, tokens, rows in batch:
            chain.state.cached += tokens
            if rows.num_logits:
                drawing.append(chain)
        for row, chain in zip(logits, drawing, strict=True):
            self._draw(chain, row[: self._vocab_size])
        if all(len(tokens) <= MAX_BEHIND for _, tokens, _ in batch):
            self._pass_cost.observe(len(batch), perf_counter() - began)
        return drawing

    def _draw(self, chain: _Chain, logits: Array) -> None:
        try:
            chain.draw(logits)
        except NoTokenError:  # what the grammar allows is not in this head
            chain.is_over = True
        except NumericalError as error:
            chain.state.has_failed = True
            logger.warning("%s drafts no more for this request: %s", self._model.name, error)

    def _can_grow(self, chain: _Chain) -> bool:
        num_drawn = len(chain.tokens)
        return (
            not chain.state.has_failed
            and not chain.is_over
            and num_drawn < max(chain.request.num_tokens, 1)
            and len(chain.request.seq.tokens) + num_drawn <= self._model.max_model_len
        )

    def _growing(self, active: list[_Chain], chains: Sequence[_Chain]) -> list[_Chain]:
        """Those that another pass is worth while for, all drafts taken together."""
        priced = [c for c in active if c.request.price is not None]
        price = priced[0].request.price if priced else None
        if price is None:
            return active
        draft_s = self._pass_cost.seconds(len(active))
        num_passes = len(priced[0].tokens)
        chosen = worth_growing(
            [c.reach * c.state.mean.estimate(0) for c in priced],
            price.pass_s,
            price.tokens + sum(c.gain for c in chains),
            sum(len(c.tokens) for c in chains),
            num_passes * draft_s + sum(len(c.tokens) * c.request.row_s for c in chains),
            [c.request.row_s for c in priced],
            draft_s,
        )
        return [c for c in active if c.request.price is None] + [priced[i] for i in chosen]

    def _has_room(self, state: _State, num_slots: int, busy: Collection[int]) -> bool:
        """Whether the cache can hold so many slots of a text, if need be without the texts that are not busy."""
        if not state.table.can_reserve(num_slots):
            for id, other in self._states.items():
                if id not in busy:
                    other.release()
        return state.table.can_reserve(num_slots)


@dataclass(slots=True)
class _State:
    """One sequence's cache: slots 0 .. len(cached)-1 hold `cached`, whose first `num_agreed` are the text's.

    What follows those was drafted and not accepted, or read by a trial that left out a part of the text before it.
    """

    table: SlotTable
    cached: list[int] = field(default_factory=list)
    num_agreed: int = 0
    has_failed: bool = False  # its logits held a NaN
    buckets: list[int] = field(default_factory=list)  # of the last draft
    by_probability: Calibration = field(default_factory=lambda: Calibration(PRIOR_ACCEPTANCE))
    mean: Calibration = field(default_factory=lambda: Calibration((PRIOR_MEAN_ACCEPTANCE,)))

    def follow(self, tokens: Sequence[int]) -> None:
        """Begin with what the pool knows of the text, or forget what the text did not take; others may share it."""
        if not len(self.table.blocks):
            self.num_agreed = self.table.share(tokens)
            self.cached = list(tokens[: self.num_agreed])
        self.agree_with(tokens)
        self.table.publish(tokens, self.num_agreed)

    def agree_with(self, tokens: Sequence[int]) -> None:
        """Keep the part of the cache that is the text's, short of its last token, whose logits are wanted."""
        end = min(len(self.cached), len(tokens) - 1)
        while self.num_agreed < end and self.cached[self.num_agreed] == tokens[self.num_agreed]:
            self.num_agreed += 1
        self.num_agreed = min(self.num_agreed, end)
        del self.cached[self.num_agreed :]

    def release(self) -> None:
        """Give all blocks back; the next `follow` begins anew."""
        self.table.release()
        self.cached, self.num_agreed = [], 0

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_proposed)):
            self.by_probability.update(self.buckets[i], i < num_accepted)
            self.mean.update(0, i < num_accepted)


class _Chain:
    """A draft that grows by one token a pass."""

    def __init__(self, request: DraftRequest, state: _State, vocab_size: int) -> None:
        self.request = request
        self.state = state
        self.tokens: list[int] = []
        self.confidences: list[float] = []
        self.reach, self.gain = 1.0, 0.0  # the chance that all is accepted; expected accepted tokens
        self.is_over = False  # nothing can follow
        self._probs: NDArray[np.float32] | None = None
        if not request.seq.params.is_coupled:
            self._probs = np.empty((request.num_tokens, vocab_size), np.float32)
        state.buckets = []

    def missing(self) -> list[int]:
        """What the cache lacks for the next token: the one drawn last, or text (of a prompt all but its end)."""
        if self.tokens:
            return self.tokens[-1:]
        text = self.request.seq.tokens
        missing = list(text[len(self.state.cached) : len(text) if self.request.num_tokens else len(text) - 1])
        return missing[-TRIAL_CONTEXT:] if self.request.is_trial else missing

    def draw(self, logits: Array) -> None:
        probs = None if self._probs is None else self._probs[len(self.tokens)]
        seq = self.request.seq
        mask = seq.grammar.mask(self.tokens) if seq.grammar is not None else None
        token, probability = seq.sampler.draw(logits, self.tokens, probs, mask)
        bucket = bisect_right(EDGES, probability)
        self.tokens.append(token)
        self.state.buckets.append(bucket)
        self.confidences.append(self.state.by_probability.estimate(bucket))
        self.reach *= self.confidences[-1]
        self.gain += self.reach
        self.is_over = seq.grammar is not None and seq.grammar.is_complete(self.tokens)

    def draft(self, source: str) -> Draft:
        probs = None if self._probs is None else self._probs[: len(self.tokens)]
        return Draft(self.tokens, probs=probs, confidences=self.confidences, source=source)


class _Head:
    """The output head cut to the `size` lowest ids (of a byte-level BPE the most frequent) and the running texts' own.

    What a text brought leaves the head when a text begins after its end: answers must not help, or slow, later ones.
    """

    def __init__(self, model: LanguageModel, size: int) -> None:
        self._model = model
        self._size = size
        self._common = np.arange(size)
        self._texts: dict[int, tuple[int, set[int]]] = {}  # sequence -> tokens looked at, rare ones among them
        self._extra: set[int] = set()
        model.limit_head(self._common)

    def cover(self, seqs: Iterable[SequenceView]) -> None:
        """Have the tokens of these texts in the head."""
        has_new_text = False
        for seq in seqs:
            has_new_text |= seq.id not in self._texts
            begin, rare = self._texts.get(seq.id, (0, set()))
            rare.update(t for t in seq.tokens[begin:] if self._size <= t < self._model.vocab_size)
            self._texts[seq.id] = len(seq.tokens), rare
        wanted = set().union(*(rare for _, rare in self._texts.values()))
        if not wanted <= self._extra or (has_new_text and wanted != self._extra):
            self._extra = wanted
            self._model.limit_head(np.append(self._common, np.array(sorted(wanted), np.int64)))

    def forget(self, sequence_id: int) -> None:
        """The text has ended."""
        self._texts.pop(sequence_id, None)
