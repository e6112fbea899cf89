"""The sampler for rows on a GPU: the drafts of many sequences are verified by the same few launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from array_api_compat import is_numpy_array
from numpy.typing import NDArray

from foredraft.algo.noise import Stream
from foredraft.algo.sampler import NO_DRAFT_LAW, NO_TOKEN, NOT_FINITE, ArraySampler, Check, Mask, Masks, RejectionMethod
from foredraft.algo.tree import is_chain, path_to
from foredraft.algo.triton.laws import Filters, Laws, find_best, make_laws, race
from foredraft.algo.triton.noise import Keys, draw_uniforms
from foredraft.algo.triton.verdicts import Drafts, Fault, judge_chains, sum_blocks, walk
from foredraft.errors import NoTokenError, NumericalError
from foredraft.types import Array, Draft, SamplingParams, Verdict


class _Row(NamedTuple):
    """A row, the draft token that was drawn for it, and the number that tests this or, behind the draft, draws one."""

    temperature: float
    min_p: float
    top_p: float
    top_k: int
    seed: int
    stream: int  # of the target's noise: choice << 8 | stream
    position: int
    number_stream: int
    number_position: int
    number_pass: int
    number_index: int = 0
    token: int = 0
    parent: int = -2  # no node's child


@dataclass(frozen=True, slots=True)
class _Fields:
    """The same of many rows, on the device."""

    filters: Filters
    keys: Keys
    number_keys: Keys
    number_index: torch.Tensor
    token: torch.Tensor
    parent: torch.Tensor
    cuts_k: bool
    cuts_p: bool
    is_greedy: bool  # all of them

    def laws(self, rows: torch.Tensor) -> Laws:
        return make_laws(rows, find_best(rows), self.filters, cuts_k=self.cuts_k, cuts_p=self.cuts_p)

    def uniforms(self) -> torch.Tensor:
        return draw_uniforms(self.number_keys, self.number_index)


@dataclass(frozen=True, slots=True)
class _Job:
    """A draft to verify."""

    sampler: TritonSampler
    rows: torch.Tensor  # [1 + n, vocab] float32, adjusted
    tokens: Sequence[int]
    parents: Sequence[int]
    probs: torch.Tensor | None  # [n, width]


class TritonSampler(ArraySampler):
    """`ArraySampler` for float32 tensors on `device`, where rows of numpy are brought too.

    Bias, penalties, grammars, second choices, logprobs and trees whose tokens were drawn go the reference's way there.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        seed: int,
        choice: int = 0,
        eos_ids: Sequence[int] = (),
        method: RejectionMethod = "block",
        vocab_limit: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(
            params,
            vocab_size=vocab_size,
            prompt=prompt,
            seed=seed,
            choice=choice,
            eos_ids=eos_ids,
            method=method,
            vocab_limit=vocab_limit,
        )
        self._device = torch.device("cpu" if device is None else device)

    def draw(
        self, logits: Array, path: Sequence[int], probs: Array | None, mask: Mask | None = None
    ) -> tuple[int, float]:
        self._check_draw(logits, path, mask, probs)
        rows = self._adjusted(self._fit(self._moved(logits))[None], [path], None if mask is None else mask[None])
        with _launching_on(rows):
            fault, token, probability = self._draw(rows, len(path), probs)
        error = _error_of(int(fault))
        if error is not None:
            raise error
        return int(token), probability

    def _draw(self, rows: torch.Tensor, depth: int, probs: Array | None) -> list[float]:
        """Fault, token and its probability. rows [1, vocab]: adjusted."""
        fields = _upload([self._row(depth, Stream.DRAFT, depth)], self._device)
        laws = fields.laws(rows)  # greedy: one-hot
        law = laws.weights[0] / laws.sums[0].sum()
        first_row, num_tokens = torch.zeros((2, 1), dtype=torch.int64, device=self._device)
        drafts = Drafts(first_row, num_tokens, fields.token, fields.parent, most_tokens=0)
        if probs is None:
            verdict = walk(race(laws, fields.filters, fields.keys), drafts)
        else:
            held = _write_law(probs, law)[None]  # drawn from what the buffer holds, after rounding
            drawn = Laws(held, sum_blocks(held), laws.best)
            verdict = judge_chains(drawn, held.new_zeros((1, 1)), drafts, fields.uniforms(), by_block=False)
        if self._params.is_greedy:  # the probability that is told is the one at temperature 1
            one = torch.ones_like(fields.filters.temperature)
            plain = fields.filters._replace(temperature=one, min_p=0 * one)
            laws = make_laws(rows, laws.best, plain, cuts_k=False, cuts_p=False)
            law = laws.weights[0] / laws.sums[0].sum()
        chosen: list[float] = torch.cat([verdict[0, :2].double(), law[verdict[0, 1:2].long()]]).tolist()
        return chosen

    def runners_up(
        self, logits: Array, path: Sequence[int], count: int, least_odds: float, mask: Mask | None = None
    ) -> list[tuple[int, float]]:
        return super().runners_up(self._moved(logits), path, count, least_odds, mask)

    def verify(self, logits: Array, draft: Draft, masks: Masks | None = None) -> Verdict:
        outcome = self.verify_together([Check(self, logits, draft, masks)])[0]
        if isinstance(outcome, NumericalError):
            raise outcome
        return outcome

    @staticmethod
    def verify_together(checks: Sequence[Check]) -> list[Verdict | NumericalError]:
        """`verify` of each check's own sampler, all of this class. Errors stand in the places of verdicts."""
        outcomes: dict[int, Verdict | NumericalError] = {}
        groups: dict[Any, dict[int, _Job]] = {}
        for i, check in enumerate(checks):
            job = check.sampler._job(check)  # type: ignore[attr-defined]
            if job.probs is not None and not is_chain(job.parents):
                outcomes[i] = job.sampler._verify_drawn_tree(check)
                continue
            rule = "walk" if job.probs is None else job.sampler._method
            groups.setdefault((rule, job.rows.shape[1]), {})[i] = job
        for (rule, _), jobs in groups.items():
            with _launching_on(next(iter(jobs.values())).rows):
                outcomes.update(zip(jobs, _decide(rule, list(jobs.values())), strict=True))
        return [outcomes[i] for i in range(len(checks))]

    def _verify_drawn_tree(self, check: Check) -> Verdict | NumericalError:
        draft = replace(check.draft, probs=self._moved(check.draft.probs))
        try:
            return super().verify(self._moved(check.logits), draft, check.masks)
        except NumericalError as error:
            return error

    def _job(self, check: Check) -> _Job:
        logits = self._moved(check.logits)
        tokens, parents = self._check_draft(logits, check.draft, check.masks)
        paths = [[tokens[i] for i in path_to(parents, node)] for node in range(-1, len(tokens))]
        probs = None if check.draft.probs is None or not tokens else self._moved(check.draft.probs)
        return _Job(self, self._adjusted(logits, paths, check.masks), tokens, parents, probs)

    def _moved(self, values: Array) -> torch.Tensor:
        return torch.as_tensor(values, device=self._device)

    def _adjusted(self, logits: torch.Tensor, paths: Sequence[Sequence[int]], masks: Masks | None) -> torch.Tensor:
        """Rows [n, vocab] after what comes before the temperature; a row that was not finite stays so."""
        width = min(self._vocab_limit, self._vocab_size)
        if not self._has_adjustments(masks):
            return logits[:, :width].float()
        adjusted = [
            self._reweigh(row.double(), path, None if masks is None else masks[i])[:width].float()
            for i, (row, path) in enumerate(zip(logits, paths, strict=True))
        ]
        is_broken = ~(logits.amax(dim=1, keepdim=True) < torch.inf)
        return torch.where(is_broken, torch.nan, torch.stack(adjusted))

    def _has_adjustments(self, masks: Masks | None) -> bool:
        params = self._params
        has_penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        holds_ends = len(self._tokens) - self._num_prompt_tokens < params.min_tokens and self._eos_ids
        return bool(params.logit_bias or has_penalties or holds_ends or masks is not None)

    def _row(self, depth: int, number_stream: Stream, number_depth: int) -> _Row:
        params, position = self._params, len(self._tokens)
        return _Row(
            temperature=params.temperature,
            min_p=params.min_p,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=self._seed,
            stream=self._choice << 8 | Stream.TARGET,
            position=position + depth,
            number_stream=self._choice << 8 | number_stream,
            number_position=position + number_depth,
            number_pass=self._num_passes,
        )

    def _fields_of(self, job: _Job) -> list[_Row]:
        """Of a draft's rows: the first n with a token each, then the one behind the draft."""
        depths = [len(path_to(job.parents, node)) for node in range(-1, len(job.tokens))]
        rows = [
            self._row(depths[i], Stream.ACCEPT, depths[1 + i] - 1)._replace(number_index=i, token=token, parent=parent)
            for i, (token, parent) in enumerate(zip(job.tokens, job.parents, strict=True))
        ]
        return [*rows, self._row(depths[-1], Stream.RESIDUAL, 0)]

    def _finish(self, verdict: Sequence[int]) -> Verdict | NumericalError:
        fault, token, num_accepted, *nodes = verdict
        error = _error_of(fault)
        if error is not None:
            return error
        self._num_passes += 1
        return Verdict(tuple(nodes[:num_accepted]), token)


def _launching_on(rows: torch.Tensor) -> AbstractContextManager[None]:
    """Kernels are launched on the current device: makes it that of the rows."""
    context: AbstractContextManager[None] = torch.cuda.device_of(rows)  # type: ignore[no-untyped-call]
    return context


def _decide(rule: str, jobs: Sequence[_Job]) -> list[Verdict | NumericalError]:
    """Rows of one width, by one rule."""
    device = jobs[0].rows.device
    fields = _upload([row for job in jobs for row in job.sampler._fields_of(job)], device)
    rows = jobs[0].rows if len(jobs) == 1 else torch.cat([job.rows for job in jobs])
    lengths = np.asarray([len(job.tokens) for job in jobs], dtype=np.int64)
    first_rows = np.cumsum(1 + lengths) - 1 - lengths
    first_row, num_tokens = torch.from_numpy(np.stack([first_rows, lengths])).to(device)
    drafts = Drafts(first_row, num_tokens, fields.token, fields.parent, most_tokens=int(lengths.max()))
    if rule == "walk":
        winners = find_best(rows) if fields.is_greedy else race(fields.laws(rows), fields.filters, fields.keys)
        verdicts = walk(winners, drafts)
    else:
        probs = _probs_by_row(jobs, first_rows, len(rows))
        verdicts = judge_chains(fields.laws(rows), probs, drafts, fields.uniforms(), by_block=rule == "block")
    return [job.sampler._finish(verdict) for job, verdict in zip(jobs, verdicts.tolist(), strict=True)]


def _probs_by_row(jobs: Sequence[_Job], first_rows: NDArray[np.int64], num_rows: int) -> torch.Tensor:
    """[rows, width]: the law of each row's draft token, 0 behind the drafts."""
    drawn = [job.probs[:, : job.sampler._vocab_size] for job in jobs if job.probs is not None]
    width, dtype = max(p.shape[1] for p in drawn), reduce(torch.promote_types, (p.dtype for p in drawn))
    probs = torch.zeros((num_rows, width), dtype=dtype, device=drawn[0].device)
    for first, law in zip(first_rows, drawn, strict=True):
        probs[first : first + law.shape[0], : law.shape[1]] = law
    return probs


def _upload(rows: Sequence[_Row], device: torch.device) -> _Fields:
    """All fields by one copy."""
    columns = list(zip(*rows, strict=True))
    real, whole = np.asarray(columns[:3], np.float64), [[i % 2**64 for i in column] for column in columns[3:]]
    packed = np.concatenate([real.view(np.int64), np.asarray(whole, np.uint64).view(np.int64)])
    sent = dict(zip(_Row._fields, torch.from_numpy(packed).to(device), strict=True))
    temperature, min_p, top_p = (sent[name].view(torch.float64) for name in ("temperature", "min_p", "top_p"))
    number_keys = Keys(sent["seed"], sent["number_position"], sent["number_stream"], sent["number_pass"])
    return _Fields(
        filters=Filters(temperature, min_p, sent["top_k"], top_p),
        keys=Keys(sent["seed"], sent["position"], sent["stream"], torch.zeros_like(sent["seed"])),
        number_keys=number_keys,
        number_index=sent["number_index"],
        token=sent["token"],
        parent=sent["parent"],
        cuts_k=any(row.top_k > 0 for row in rows),
        cuts_p=any(row.top_p < 1 for row in rows),
        is_greedy=all(row.temperature == 0 for row in rows),
    )


def _write_law(probs: Array, law: torch.Tensor) -> torch.Tensor:
    """`law` in the buffer `probs`, of numpy or torch, wherever it is. Returns what that holds, as the law was."""
    buffer: torch.Tensor = torch.from_numpy(probs) if is_numpy_array(probs) else probs
    width = min(len(law), len(buffer))
    buffer[width:] = 0
    buffer[:width].copy_(law[:width])
    held = torch.zeros_like(law)
    held[:width].copy_(buffer[:width])
    return held


def _error_of(fault: int) -> NumericalError | None:
    """Raises ValueError for a draft that breaks its contract."""
    if fault == Fault.NO_DRAFT_LAW:
        raise ValueError(NO_DRAFT_LAW)
    if fault == Fault.NO_TOKEN:
        return NoTokenError(NO_TOKEN)
    return NumericalError(NOT_FINITE) if fault == Fault.NOT_FINITE else None
