"""One choice of one request: its tokens, its share of the cache, and how it ends."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from foredraft.algo.sampler import Sampler
from foredraft.engine.detokenize import Detokenizer
from foredraft.engine.grammar import Grammar
from foredraft.engine.stats import RequestStats
from foredraft.errors import ForedraftError
from foredraft.kvcache.blocks import SlotTable
from foredraft.models.base import Rows
from foredraft.types import TARGET, Draft, FinishReason, SamplingParams, TokenLogprob, Verdict, pictures_of


class Sequence:
    """Mutable state of one sequence. Invariants between steps:

        tokens   [ prompt ............ | output ..... ]
        cache    [ num_computed ...... ]                    0 <= num_computed < len(tokens)

    Slots 0 .. num_computed-1 hold exactly tokens[:num_computed], for good unless it is preempted. While it decodes,
    only the newest token is not computed. `origins` has one source per output token.
    """

    def __init__(
        self,
        id: int,
        request_id: int,
        index: int,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        max_len: int,
        sampler: Sampler,
        detokenizer: Detokenizer,
        stop_ids: Collection[int],
        prediction: SequenceOf[int],
        table: SlotTable,
        grammar: Grammar | None = None,
    ) -> None:
        self.id = id
        self.request_id = request_id
        self.index = index
        self.params = params
        self.tokens = list(prompt)
        self.pictures = pictures_of(prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.max_len = max_len  # prompt and output together
        self.sampler = sampler
        self.detokenizer = detokenizer
        self.prediction = prediction
        self.grammar = grammar  # stands after the committed output
        self.stop_ids = stop_ids
        self.origins: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.error: ForedraftError | None = None  # why it was aborted, if it could not go on
        self.stats = RequestStats()
        self.table = table
        self.num_computed = 0
        self.num_cached_tokens = 0  # of the prompt, found in the cache when it was first admitted
        self.num_preemptions = 0

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.tokens)

    @property
    def cache_salt(self) -> str:
        return self.table.cache_salt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def rows(self, count: int, draft: Draft) -> Rows:
        """This sequence's share of a pass: `count` uncomputed tokens, then the draft (only behind the last of them)."""
        known = self.tokens[self.num_computed : self.num_computed + count]
        parents = None
        if draft.parents is not None:
            parents = [*range(-1, count - 1), *(p + count for p in draft.parents)]  # the draft's root is the last row
        reaches_end = count == self.num_uncomputed
        return Rows(
            block_table=self.table.reserve(self.num_computed + count + len(draft.tokens)),
            start=self.num_computed,
            tokens=[*known, *draft.tokens],
            parents=parents,
            num_logits=1 + len(draft.tokens) if reaches_end else 0,
            pictures=self.pictures,
        )

    def commit(self, draft: Draft, verdict: Verdict) -> int:
        """Append accepted tokens and the verdict's own, up to the first that ends the text. Returns how many came."""
        new = [draft.tokens[i] for i in verdict.accepted] + [verdict.token]
        self.num_computed = len(self.tokens)
        for count, token in enumerate(new, 1):
            is_draft = count <= len(verdict.accepted)
            self.tokens.append(token)
            self.origins.append(draft.source if is_draft else TARGET)
            self.finish_reason = self._reason_to_stop(token)
            if self.finish_reason is not None:
                break
        self.num_computed += count - 1
        self.sampler.extend(new[:count])
        return count

    def publish(self) -> None:
        """Let others share what is computed."""
        self.table.publish(self.tokens, self.num_computed)

    def preempt(self) -> None:
        """Give all blocks back: the text is computed anew, but for what is still cached then."""
        self.table.release()
        self.num_computed = 0
        self.num_preemptions += 1

    def _reason_to_stop(self, token: int) -> FinishReason | None:
        may_stop = len(self.origins) > self.params.min_tokens
        if token in self.stop_ids and may_stop:
            return "stop"
        if self.detokenizer.feed(token, may_stop=may_stop):
            return "stop"
        if self.grammar is not None and self.grammar.advance(token):
            return "stop"
        return "length" if self.num_remaining <= 0 else None
