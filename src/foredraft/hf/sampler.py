"""The laws of `generate`: its logits processors, applied to every position of a draft as if each came alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from array_api_compat import is_numpy_array
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from foredraft.algo.masks import unpack_mask
from foredraft.algo.sampler import NO_TOKEN, NOT_FINITE, ArraySampler, Mask, Masks, SamplerKind
from foredraft.algo.tree import chain, path_to
from foredraft.errors import NoTokenError, NumericalError, UnsupportedModelError
from foredraft.types import Array, Draft, SamplingParams, Verdict

#: [1, vocab] scores after the tokens of one sequence, padding included, to processed ones.
Process = Callable[[Sequence[int], torch.Tensor], torch.Tensor]

#: They keep state from one call to the next, so a draft that is rejected would leave a trace.
_STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
#: They treat every row by itself, whichever its number; others are shown the whole batch.
_ROW_BY_ROW = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)


def make_process(processors: LogitsProcessorList, index: int, num_sequences: int, device: torch.device) -> Process:
    """The processors for sequence `index` of a batch.

    Sequences are not equally far, so each is processed by itself; a processor that may look at the row's number gets a
    batch of equal rows, of which that one counts. Raises UnsupportedModelError for processors that keep state.
    """
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise UnsupportedModelError(
                f"{type(processor).__name__} keeps state from token to token, which a rejected draft would spoil; "
                "use the model's own generate"
            )
    is_row_by_row = all(type(processor) in _ROW_BY_ROW for processor in processors)
    count, own = (1, 0) if is_row_by_row else (num_sequences, index)

    def process(tokens: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        ids: Any = torch.tensor([list(tokens)], device=device).expand(count, -1)
        processed: torch.Tensor = processors(ids, scores.expand(count, -1).clone())
        return processed[own : own + 1]

    return process


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What one token was chosen by, [vocab] float32 each."""

    logits: torch.Tensor
    processed: torch.Tensor


@dataclass(slots=True)
class Record:
    """Scores of a sequence's tokens, in order, for callers that want them."""

    scores: list[TokenScores] = field(default_factory=list)


class ProcessorSampler(ArraySampler):
    """The reference sampler whose law is the processors' instead of that of its parameters; for rows of numpy or torch.

    prompt: the row of `input_ids`, padding included, as processors see it. `device`: where they work, and where rows of
    torch are decided on. With a `record`, what every token was chosen by is kept there.
    """

    def __init__(
        self,
        params: SamplingParams,
        process: Process,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        seed: int,
        choice: int,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        super().__init__(params, vocab_size=vocab_size, prompt=prompt, seed=seed, choice=choice, method="standard")
        self._processors = process
        self._device = device
        self._record = record

    def verify(self, logits: Array, draft: Draft, masks: Masks | None = None) -> Verdict:
        if draft.probs is not None and not is_numpy_array(logits):  # the assistant may be elsewhere
            draft = replace(draft, probs=torch.as_tensor(draft.probs, device=self._device))
        verdict = super().verify(logits, draft, masks)
        self._keep(logits, draft, verdict)
        return verdict

    def _keep(self, logits: Array, draft: Draft, verdict: Verdict) -> None:
        if self._record is None:
            return
        parents = chain(len(draft.tokens)) if draft.parents is None else draft.parents
        for node in (-1, *verdict.accepted):
            path = [draft.tokens[i] for i in path_to(parents, node)]
            raw = torch.as_tensor(logits[1 + node], device=self._device).clone()
            self._record.scores.append(TokenScores(raw, self._processed(raw, path)))

    def _adjust(self, logits: Array, path: Sequence[int], mask: Mask | None) -> Array:
        scores = self._scores(torch.as_tensor(logits, device=self._device), path, mask).double()
        best = float(scores.max())
        if best == -math.inf:
            raise NoTokenError(NO_TOKEN)
        if not math.isfinite(best):
            raise NumericalError(NOT_FINITE)
        return scores.cpu().numpy() if is_numpy_array(logits) else scores

    def _scores(self, logits: torch.Tensor, path: Sequence[int], mask: Mask | None) -> torch.Tensor:
        """[vocab] float32; all NaN where the model's row holds one."""
        raw = logits.float()  # exact: they came as float32
        if mask is not None:
            allowed = torch.as_tensor(unpack_mask(mask, self._vocab_size), device=raw.device)
            raw = torch.where(allowed, raw, -torch.inf)
        return torch.where(raw.isnan().any(), torch.nan, self._processed(raw, path))

    def _processed(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        return self._processors([*self._tokens, *path], logits[None])[0]


def sampler_class(kind: SamplerKind | None) -> type[ProcessorSampler]:
    """For rows that stay on their device for a sampler of this kind, or that come as numpy's (None)."""
    if kind != "triton":
        return ProcessorSampler
    from foredraft.hf.triton_sampler import TritonProcessorSampler  # Triton is not everywhere

    return TritonProcessorSampler
