"""The step loop: plan, propose, forward, verify, commit. Plain decoding is this loop without drafters."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from foredraft.algo import tree
from foredraft.algo.masks import cut_draft, masks_along
from foredraft.algo.sampler import Check, verify_all
from foredraft.drafters.base import Drafter
from foredraft.engine.controller import Controller
from foredraft.engine.scheduler import Planned, Scheduler
from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import Round
from foredraft.errors import ForedraftError, GrammarError, NumericalError
from foredraft.kvcache.blocks import BlockPool
from foredraft.models.base import LanguageModel, Rows
from foredraft.types import NO_DRAFT, TARGET, Array, Draft, DraftRequest, SequenceView, TokenGrammar, Verdict


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did to one sequence."""

    seq: Sequence
    num_new: int  # output tokens
    round: Round


class Engine:
    """Runs sequences over one target model and any drafters, cheapest first. Knows token ids, never text or chats."""

    def __init__(
        self,
        model: LanguageModel,
        drafters: SequenceOf[Drafter],
        controller: Controller,
        scheduler: Scheduler,
        pool: BlockPool,
    ) -> None:
        self.model = model
        self.drafters = drafters
        self.controller = controller
        self.scheduler = scheduler
        self.pool = pool
        self._readers: dict[int, list[Drafter]] = {}  # sequence -> the drafters that know it
        self._hidden_layers = sorted({layer for d in drafters for layer in d.needs.hidden_layers})
        self._is_stepping = False
        self._aborted: list[Sequence] = []  # while a step runs

    def step(self) -> list[Step]:
        """One pass. Sequences that finish leave the scheduler, and their blocks are free for others.

        A sequence that cannot go on (its logits hold a NaN) ends with its `error` set; the others are not touched.
        Raises ForedraftError if a step runs already.
        """
        if self._is_stepping:
            raise ForedraftError("an engine runs one step at a time: use it from one thread, or many by AsyncEngine")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            while self._aborted:
                self.abort(self._aborted.pop())

    def abort(self, seq: Sequence) -> None:
        """End a sequence, if it still runs: at once, or with the step that runs.

        A stream that nobody holds any more is closed whenever its garbage is collected, in the midst of a step too.
        """
        if self._is_stepping:
            self._aborted.append(seq)
            return
        seq.finish_reason = seq.finish_reason or "abort"
        self._remove(seq)

    def _step(self) -> list[Step]:
        planned, new = self.scheduler.plan()
        planned, failed = self._look(planned)
        self._begin([seq for seq in new if seq.error is None])
        if not planned:
            return failed
        began = perf_counter()
        self._follow(planned)
        drafts = self._propose(planned)
        drafted = perf_counter()
        rows = [p.seq.rows(p.num_rows, drafts.get(p.seq.id, NO_DRAFT)) for p in planned]
        logits = self.model.forward(rows, self._hidden_layers)
        passed = perf_counter()
        num_rows = sum(len(r.tokens) for r in rows)
        self.controller.observe_pass(rows, passed - drafted)

        split = list(zip(planned, rows, *self._split(rows, logits), strict=True))
        verdicts = self._verify({p.seq: own_logits for p, _, own_logits, _ in split if p.completes}, drafts)
        steps = failed
        for p, r, own_logits, own_hidden in split:
            draft, num_new = drafts.get(p.seq.id, NO_DRAFT), 0
            if p.completes:
                verdict = verdicts[p.seq.id]
                if isinstance(verdict, NumericalError):
                    p.seq.error, p.seq.finish_reason = verdict, "abort"
                else:
                    num_new = self._commit(p.seq, r, draft, verdict, own_logits, own_hidden)
            else:
                p.seq.num_computed += p.num_rows
            p.seq.publish()
            times = (drafted - began, passed - drafted, perf_counter() - passed)
            steps.append(Step(p.seq, num_new, _make_round(p, r, draft, num_new, num_rows, times)))
            if p.seq.finish_reason is not None:
                self._remove(p.seq)
        return steps

    def _look(self, planned: SequenceOf[Planned]) -> tuple[list[Planned], list[Step]]:
        """Have the model see what the pass needs. Sequences whose pictures it cannot read end with the error."""
        going, failed = [], []
        for p in planned:
            end = p.seq.num_computed + p.num_rows
            try:
                for picture in p.seq.pictures:
                    if picture.start < end:
                        self.model.see(picture)
            except ForedraftError as error:
                p.seq.error, p.seq.finish_reason = error, "abort"
                failed.append(Step(p.seq, 0, _empty_round(p.seq)))
                self._remove(p.seq)
            else:
                going.append(p)
        return going, failed

    def _remove(self, seq: Sequence) -> None:
        """Take an ended sequence out, if it is in; all it held is given back."""
        self.scheduler.remove(seq)
        self.controller.end(seq)
        for drafter in self._readers.pop(seq.id, ()):
            drafter.end(seq)

    def check_integrity(self) -> None:
        """Raises ForedraftError if the cache miscounts a block's owners, or mistakes what it holds."""
        self.pool.check_integrity(self.scheduler.tables())

    def _begin(self, new: SequenceOf[Sequence]) -> None:
        for seq in new:
            self.controller.begin(seq)
        for seq in new:
            for drafter in self.drafters:
                if self.controller.is_promising(seq, drafter):
                    self._read(drafter, seq)

    def _read(self, drafter: Drafter, seq: SequenceView) -> None:
        """Have `drafter` know the sequence."""
        readers = self._readers.setdefault(seq.id, [])
        if drafter not in readers:
            drafter.begin(seq)
            readers.append(drafter)

    def _follow(self, planned: SequenceOf[Planned]) -> None:
        """Let the drafters keep up with prompts, so that the first draft does not wait for a whole one."""
        prompts = [p for p in planned if not p.seq.origins]
        for drafter in self.drafters:
            reading = [p for p in prompts if drafter in self._readers.get(p.seq.id, ())]
            if reading:
                began = perf_counter()
                drafter.propose([DraftRequest(p.seq, 0) for p in reading])
                self.controller.observe_reading(drafter, sum(p.num_rows for p in reading), perf_counter() - began)

    def _propose(self, planned: SequenceOf[Planned]) -> dict[int, Draft]:
        """Ask the drafters in order, each for the sequences that have no good enough draft yet."""
        self.controller.begin_pass(planned)
        drafts: dict[int, Draft] = {}
        unsettled = {p.seq.id: p for p in planned if p.completes}
        for i, drafter in enumerate(self.drafters):
            requests = self.controller.requests(drafter, list(unsettled.values()))
            if not requests:
                continue
            for request in requests:
                self._read(drafter, request.seq)
            began = perf_counter()
            answers = drafter.propose(requests)
            self.controller.observe_draft(drafter, answers, perf_counter() - began)
            later, num_unsettled = self.drafters[i + 1 :], len(unsettled)
            for request, answer in zip(requests, answers, strict=True):
                draft = _legal_part(answer, request.seq.grammar)
                if draft.tokens:
                    drafts[request.seq.id] = draft
                if self.controller.settle(drafter, draft, request, later, num_unsettled):
                    del unsettled[request.seq.id]
        return drafts

    def _split(self, rows: SequenceOf[Rows], logits: Array) -> tuple[list[Array], list[Array | None]]:
        """Each sequence's own logits [num_logits, vocab] and hidden states [layers, rows, hidden]."""
        first_logits = list(accumulate((r.num_logits for r in rows), initial=0))
        own_logits = [logits[first : first + r.num_logits] for first, r in zip(first_logits, rows, strict=False)]
        if not self._hidden_layers:
            return own_logits, [None] * len(rows)
        hidden = self.model.hidden_states()
        first_rows = list(accumulate((len(r.tokens) for r in rows), initial=0))
        return own_logits, [
            hidden[:, first : first + len(r.tokens)] for first, r in zip(first_rows, rows, strict=False)
        ]

    def _verify(
        self, logits: Mapping[Sequence, Array], drafts: Mapping[int, Draft]
    ) -> dict[int, Verdict | NumericalError]:
        """By sequence, its verdict or why it cannot go on."""
        outcomes: dict[int, Verdict | NumericalError] = {}
        checks: dict[int, Check] = {}
        for seq, own_logits in logits.items():
            draft = drafts.get(seq.id, NO_DRAFT)
            try:
                masks = masks_along(draft, seq.grammar) if seq.grammar is not None else None
            except GrammarError as error:
                outcomes[seq.id] = error
                continue
            checks[seq.id] = Check(seq.sampler, own_logits, draft, masks)
        outcomes.update(zip(checks, verify_all(list(checks.values())), strict=True))
        return outcomes

    def _commit(
        self, seq: Sequence, rows: Rows, draft: Draft, verdict: Verdict, logits: Array, hidden: Array | None
    ) -> int:
        root = len(seq.tokens)  # slot of draft node 0
        num_new = seq.commit(draft, verdict)
        if draft.parents is not None:
            accepted = verdict.accepted
            self.model.move_slots(rows.block_table, [root + i for i in accepted], range(root, root + len(accepted)))
        if seq.params.logprobs is not None:
            nodes = [0, *(1 + i for i in verdict.accepted)]  # row of `logits` that each new token was drawn from
            for node, token in zip(nodes, seq.tokens[root : root + num_new], strict=False):
                seq.logprobs.append(seq.sampler.logprobs(logits[node], token, seq.params.logprobs))
        num_accepted = min(len(verdict.accepted), num_new)
        seq.stats.count_tokens(perf_counter())
        seq.stats.count_draft(draft, num_accepted)
        self.controller.observe_verdict(seq, draft, num_accepted)
        for drafter in self._readers.get(seq.id, ()):
            drafter.observe(seq, draft, verdict, hidden)
        return num_new


def _legal_part(draft: Draft, grammar: TokenGrammar | None) -> Draft:
    if grammar is None or not draft.tokens:
        return draft
    try:
        return cut_draft(draft, grammar)
    except GrammarError:
        return NO_DRAFT  # verification meets the same end, and tells


def _empty_round(seq: Sequence) -> Round:
    """Of a sequence that took no part in the pass."""
    return Round(
        sequence_id=seq.id,
        num_prompt_rows=0,
        num_batch_rows=0,
        proposed=(),
        source="",
        accepted=(),
        rejected=(),
        token=None,
        draft_s=0.0,
        pass_s=0.0,
        verify_s=0.0,
    )


def _make_round(
    planned: Planned,
    rows: Rows,
    draft: Draft,
    num_new: int,
    num_rows: int,
    times: tuple[float, float, float],
) -> Round:
    seq = planned.seq
    emitted = seq.tokens[len(seq.tokens) - num_new :]
    num_accepted = sum(origin != TARGET for origin in seq.origins[len(seq.origins) - num_new :])
    parents = tree.chain(len(draft.tokens)) if draft.parents is None else draft.parents
    accepted = tree.nodes_along(draft.tokens, parents, emitted[:num_accepted])
    ends = num_accepted == len(emitted)
    return Round(
        sequence_id=seq.id,
        num_prompt_rows=min(planned.num_rows, max(0, seq.num_prompt_tokens - rows.start)),
        num_batch_rows=num_rows,
        proposed=tuple(draft.tokens),
        source=draft.source,
        accepted=tuple(emitted[:num_accepted]),
        rejected=() if ends else tuple(t for i, t in enumerate(draft.tokens) if i not in accepted),
        token=None if ends else emitted[-1],
        draft_s=times[0],
        pass_s=times[1],
        verify_s=times[2],
    )
