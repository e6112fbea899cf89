"""Chains of draft tokens unrolled by a model, many in one pass, whose cache follows the texts by itself.

Beside its tokens a chain may propose second choices. They cost no draft pass, and the target checks a few rows more in
the same time:

    the ── cat ── sat ── on        drawn, one pass each
     └ dog  └ ran                  second choices: leaves, nothing is drawn after them

What a chain proposes of what the model draws is its own affair: `drafters/model.py` takes the model's tokens as they
are, `drafters/cross_vocab.py` those of another tokenizer.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from array_api_compat import array_namespace, device

from foredraft.algo import tree
from foredraft.algo.lengths import worth_growing
from foredraft.drafters.calibration import BatchCost, Calibration
from foredraft.errors import ForedraftError, NoTokenError, NumericalError
from foredraft.kvcache.blocks import BlockPool, SlotTable
from foredraft.models.base import LanguageModel, Rows
from foredraft.types import Array, Draft, DraftRequest, PassPrice, Picture

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
#: The same of second choices, and how many a token may have, with how much of the first one's probability.
LEAF_EDGES = (0.03, 0.06, 0.12, 0.24)
PRIOR_LEAF_ACCEPTANCE = (0.02, 0.05, 0.1, 0.18, 0.3)
MAX_LEAVES, LEAST_ODDS = 2, 0.02
#: The same for a token that stays right only if what would follow does not belong to it.
PRIOR_OPEN_ACCEPTANCE = tuple(0.7 * chance for chance in PRIOR_ACCEPTANCE)


@dataclass(slots=True)
class ChainState:
    """One sequence's cache: slots 0 .. len(cached)-1 hold `cached`, whose first `num_agreed` are the text's.

    What follows those was drafted and not accepted, or read by a trial that left out a part of the text before it.
    """

    table: SlotTable
    pictures: Sequence[Picture] = ()  # of the text, if the model sees them
    cached: list[int] = field(default_factory=list)
    num_agreed: int = 0
    has_failed: bool = False  # its logits held a NaN
    buckets: list[int] = field(default_factory=list)  # of the last draft's chain
    leaves: list[Leaf] = field(default_factory=list)  # of the last draft, behind its chain
    by_probability: Calibration = field(default_factory=lambda: Calibration(PRIOR_ACCEPTANCE + PRIOR_OPEN_ACCEPTANCE))
    by_leaf: Calibration = field(default_factory=lambda: Calibration(PRIOR_LEAF_ACCEPTANCE))
    mean: Calibration = field(default_factory=lambda: Calibration((PRIOR_MEAN_ACCEPTANCE,)))

    def follow(self, text: Sequence[int], num_final: int) -> None:
        """Begin with what the pool knows of the text, or forget what the text did not take; others may share it.

        num_final: so many of its first tokens will never change.
        """
        final = text if num_final == len(text) else text[:num_final]
        if not len(self.table.blocks):
            self.num_agreed = self.table.share(final)
            self.cached = list(text[: self.num_agreed])
        self.agree_with(text)
        self.table.publish(final, min(self.num_agreed, num_final - 1))

    def agree_with(self, text: Sequence[int]) -> None:
        """Keep the part of the cache that is the text's, short of its last token, whose logits are wanted."""
        end = min(len(self.cached), len(text) - 1)
        while self.num_agreed < end and self.cached[self.num_agreed] == text[self.num_agreed]:
            self.num_agreed += 1
        self.num_agreed = min(self.num_agreed, end)
        del self.cached[self.num_agreed :]

    def release(self) -> None:
        """Give all blocks back; the next `follow` begins anew."""
        self.table.release()
        self.cached, self.num_agreed = [], 0

    def learn(self, num_nodes: int, accepted: Sequence[int]) -> None:
        """From the accepted ones of the draft's nodes: a chain, and the leaves behind it."""
        num_proposed = num_nodes - len(self.leaves)
        num_accepted = sum(node < num_proposed for node in accepted)
        for i in range(min(num_accepted + 1, num_proposed)):
            self.by_probability.update(self.buckets[i], i < num_accepted)
            self.mean.update(0, i < num_accepted)
        for node, leaf in enumerate(self.leaves, num_proposed):
            if leaf.depth <= num_accepted:  # its parent was accepted
                self.by_leaf.update(leaf.bucket, node in accepted)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A second choice beside the token of a chain at this depth."""

    depth: int
    token: int
    bucket: int
    confidence: float  # the chance that it is accepted once all before it are
    gain: float  # the chance that it is accepted


class Chain(ABC):
    """A draft that grows by one token of the model a pass.

    text: what the sequence says, in the model's ids; drawn: what the model adds to it, in the same; tokens: the draft,
    in the target's; confidences [len(tokens)]; second_choices: the leaves that it may have.
    """

    def __init__(self, request: DraftRequest, state: ChainState, text: Sequence[int]) -> None:
        self.request = request
        self.state = state
        self.text = text
        self.drawn: list[int] = []
        self.tokens: list[int] = []
        self.confidences: list[float] = []
        self.second_choices: list[Leaf] = []
        self.reach, self.gain = 1.0, 0.0  # the chance that all is accepted; expected accepted tokens
        self.is_over = False  # nothing can follow
        state.buckets, state.leaves = [], []

    @property
    def probs(self) -> Array | None:
        """The laws that `tokens` were drawn from, if they were: see `Draft`."""
        return None

    @abstractmethod
    def draw(self, logits: Array) -> None:
        """Go on by one token. logits [vocab]: after the text and all that was drawn.

        Raises NoTokenError where there is none to draw, NumericalError for logits that hold a NaN.
        """

    def draft(self, source: str) -> Draft:
        leaves = self.state.leaves
        if not leaves:
            return Draft(self.tokens, probs=self.probs, confidences=self.confidences, source=source)
        return Draft(
            tokens=[*self.tokens, *(leaf.token for leaf in leaves)],
            parents=[*tree.chain(len(self.tokens)), *(leaf.depth - 1 for leaf in leaves)],
            confidences=[*self.confidences, *(leaf.confidence for leaf in leaves)],
            source=source,
        )

    def missing(self) -> Sequence[int]:
        """What the cache lacks for the next token: the one drawn last, or text (of a prompt all but its end)."""
        if self.drawn:
            return self.drawn[-1:]
        end = len(self.text) if self.request.num_tokens else len(self.text) - 1
        missing = self.text[len(self.state.cached) : end]
        return missing[-TRIAL_CONTEXT:] if self.request.is_trial else missing

    def offer(self, token: int, probability: float) -> None:
        """A second choice beside the token that is added next."""
        bucket = bisect_right(LEAF_EDGES, probability)
        confidence = self.state.by_leaf.estimate(bucket)
        self.second_choices.append(Leaf(len(self.tokens), token, bucket, confidence, self.reach * confidence))

    def seen_from(self, start: int) -> Sequence[Picture]:
        """The pictures, for a pass from slot `start` on. A trial that leaves a part of them out sees none."""
        is_rough = self.request.is_trial and any(picture.end > start for picture in self.state.pictures)
        return () if is_rough else self.state.pictures

    def add(self, token: int, probability: float, *, is_open: bool = False) -> None:
        """Propose one more token, which the draft gives this probability. is_open: more may belong to it."""
        bucket = bisect_right(EDGES, probability)
        own_bucket = bucket + len(PRIOR_ACCEPTANCE) if is_open else bucket
        self.tokens.append(token)
        self.state.buckets.append(own_bucket)
        self.confidences.append(self.state.by_probability.estimate(own_bucket))
        self.gain += self.reach * self.confidences[-1]
        self.reach *= self.state.by_probability.estimate(bucket)


class Ids(Protocol):
    """How the ids of a model stand to those of the target."""

    @property
    def width(self) -> int:
        """Of a row of the target's ids, padding aside."""
        ...

    def row(self, logits: Array, /) -> Array:
        """The model's row [vocab] as one of the target's ids [width], valid until the next."""
        ...

    def own(self, token: int, /) -> int:
        """The model's id for a token of the target that it gave a chance."""
        ...


class LawChain(Chain):
    """Tokens drawn from the model's law over the target's ids, processed as the request says.

    Without a user's seed the draft carries exactly the laws that its tokens were drawn from.
    """

    def __init__(self, request: DraftRequest, state: ChainState, text: Sequence[int], ids: Ids) -> None:
        super().__init__(request, state, text)
        self._ids = ids
        self._probs: Array | None = None  # [num_tokens, width] float32, beside the model's rows

    def draw(self, logits: Array) -> None:
        seq, row = self.request.seq, self._ids.row(logits)
        if self._probs is None and not seq.params.is_coupled:
            xp, shape = array_namespace(row), (self.request.num_tokens, self._ids.width)
            self._probs = xp.empty(shape, dtype=xp.float32, device=device(row))
        probs = None if self._probs is None else self._probs[len(self.tokens)]
        mask = seq.grammar.mask(self.tokens) if seq.grammar is not None else None
        token, probability = seq.sampler.draw(row, self.tokens, probs, mask)
        if seq.params.is_greedy and self.request.price is not None:
            for other, odds in seq.sampler.runners_up(row, self.tokens, MAX_LEAVES, LEAST_ODDS, mask):
                self.offer(other, odds * probability)
        self.drawn.append(self._ids.own(token))
        self.add(token, probability)
        self.is_over = seq.grammar is not None and seq.grammar.is_complete(self.tokens)

    @property
    def probs(self) -> Array | None:
        return None if self._probs is None else self._probs[: len(self.tokens)]


class ChainModel:
    """A draft model and its cache, which every chain's state has a share of.

    What was drafted and accepted is there already, anything else is computed before the next draft, at most CHUNK
    tokens a call. When its blocks run out, those of texts that are not drafting now go first; if that is not enough,
    some texts go without a draft.
    """

    def __init__(self, model: LanguageModel, *, enable_prefix_caching: bool = True) -> None:
        self.model = model
        self.pass_cost = BatchCost()
        self._pool = BlockPool(model.num_blocks, shares=enable_prefix_caching)
        self._states: dict[int, ChainState] = {}
        self._warm_up()

    def begin(self, sequence_id: int, cache_salt: str, pictures: Sequence[Picture] = ()) -> None:
        self._states[sequence_id] = ChainState(SlotTable(self._pool, cache_salt, pictures), pictures)

    def state(self, sequence_id: int) -> ChainState:
        return self._states[sequence_id]

    def end(self, sequence_id: int, text: Sequence[int], num_final: int) -> None:
        """What the cache holds of the text may be shared from now on."""
        state = self._states.pop(sequence_id, None)
        if state is not None:
            state.follow(text, num_final)
            state.release()

    def unroll(self, chains: Sequence[Chain]) -> None:
        """Let the chains, whose states have followed their texts, grow as long as it pays."""
        busy = {chain.request.seq.id for chain in chains}
        active = [c for c in chains if self._can_grow(c)]
        while active:
            drawn = self._compute(active, busy)
            active = self._growing([c for c in drawn if self._can_grow(c)], chains)
        self._branch(chains)

    def check_integrity(self) -> None:
        """Raises ForedraftError if its cache miscounts a block's owners, or mistakes what it holds."""
        self._pool.check_integrity([state.table for state in self._states.values()])

    def _warm_up(self) -> None:
        """One pass, so that the first draft is not timed while its weights come from disk."""
        table = SlotTable(self._pool)
        self.model.forward([Rows(table.reserve(1), 0, [0])])
        table.release()

    def _compute(self, chains: Sequence[Chain], busy: Collection[int]) -> list[Chain]:
        """One pass over what the caches lack. Returns the chains that drew a token."""
        budget = CHUNK
        batch: list[tuple[Chain, Sequence[int], Rows]] = []
        for chain in chains:
            missing = chain.missing()
            tokens = missing[:budget]
            end = len(chain.state.cached) + len(tokens)
            if not tokens or not self._has_room(chain.state, end, busy) or not self._sees(chain, end):
                continue
            budget -= len(tokens)
            known = [t if t < self.model.vocab_size else 0 for t in tokens]  # padding of a wider target: any id
            num_logits = int(chain.request.num_tokens > 0 and len(tokens) == len(missing))
            table, start = chain.state.table.reserve(end), len(chain.state.cached)
            rows = Rows(table, start, known, num_logits=num_logits, pictures=chain.seen_from(start))
            batch.append((chain, tokens, rows))
        if not batch:
            return []
        began = perf_counter()
        logits = self.model.forward([rows for _, _, rows in batch])
        drawing = []
        for chain, tokens, rows in batch:
            chain.state.cached += tokens
            if rows.num_logits:
                drawing.append(chain)
        for row, chain in zip(logits, drawing, strict=True):
            self._draw(chain, row)
        if all(len(tokens) <= MAX_BEHIND for _, tokens, _ in batch):
            self.pass_cost.observe(len(batch), perf_counter() - began)
        return drawing

    def _draw(self, chain: Chain, logits: Array) -> None:
        try:
            chain.draw(logits)
        except NoTokenError:  # what the grammar allows is not in this head
            chain.is_over = True
        except NumericalError as error:
            chain.state.has_failed = True
            logger.warning("%s drafts no more for this request: %s", self.model.name, error)

    def _sees(self, chain: Chain, end: int) -> bool:
        """Whether the model has read the pictures of a text up to slot `end`."""
        try:
            for picture in chain.state.pictures:
                if picture.start < end:
                    self.model.see(picture)
        except ForedraftError as error:
            chain.state.has_failed = True
            logger.warning("%s drafts no more for this request: %s", self.model.name, error)
        return not chain.state.has_failed

    def _can_grow(self, chain: Chain) -> bool:
        return (
            not chain.state.has_failed
            and not chain.is_over
            and len(chain.tokens) < max(chain.request.num_tokens, 1)
            and len(chain.text) + len(chain.drawn) <= self.model.max_model_len
        )

    def _growing(self, active: list[Chain], chains: Sequence[Chain]) -> list[Chain]:
        """Those that another pass is worth while for, all drafts taken together."""
        priced = [c for c in active if c.request.price is not None]
        price = priced[0].request.price if priced else None
        if price is None:
            return active
        gains = [c.reach * c.state.mean.estimate(0) for c in priced]
        chosen = self._worth(gains, priced, chains, price, self.pass_cost.seconds(len(active)))
        return [c for c in active if c.request.price is None] + [priced[i] for i in chosen]

    def _branch(self, chains: Sequence[Chain]) -> None:
        """Give the chains those of their second choices that pay, as far as they were asked for so many tokens."""
        offers: list[tuple[Chain, Leaf]] = []
        for c in chains:
            best = sorted(c.second_choices, key=lambda leaf: -leaf.gain)
            num_nodes = min(c.request.num_tokens, c.request.num_slots)
            offers += [(c, leaf) for leaf in best[: max(0, num_nodes - len(c.tokens))]]
        price = offers[0][0].request.price if offers else None
        if price is None:
            return
        gains, owners = [leaf.gain for _, leaf in offers], [c for c, _ in offers]
        for i in self._worth(gains, owners, chains, price, 0.0):
            owners[i].state.leaves.append(offers[i][1])

    def _worth(
        self,
        gains: Sequence[float],
        owners: Sequence[Chain],
        chains: Sequence[Chain],
        price: PassPrice,
        draft_s: float,
    ) -> list[int]:
        """Which tokens of these gains are worth their rows, and one draft pass of so many seconds that draws them."""
        spent_s = max(len(c.drawn) for c in chains) * self.pass_cost.seconds(len(chains))
        return worth_growing(
            gains,
            price.pass_s,
            price.tokens + sum(c.gain for c in chains),
            sum(len(c.tokens) for c in chains),
            spent_s + sum(len(c.tokens) * c.request.row_s for c in chains),
            [c.request.row_s for c in owners],
            draft_s,
        )

    def _has_room(self, state: ChainState, num_slots: int, busy: Collection[int]) -> bool:
        """Whether the cache can hold so many slots of a text, if need be without the texts that are not busy."""
        if not state.table.can_reserve(num_slots):
            for id, other in self._states.items():
                if id not in busy:
                    other.release()
        return state.table.can_reserve(num_slots)
