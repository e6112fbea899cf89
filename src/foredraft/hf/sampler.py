"""The laws of `generate`: its logits processors, applied to every position of a draft as if each came alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from foredraft.algo.masks import unpack_mask
from foredraft.algo.sampler import ArraySampler, Mask, Masks
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
    """The reference sampler whose law is the processors' instead of that of its parameters.

    prompt: the row of `input_ids`, padding included, as processors see it. `device`: where they work. With a `record`,
    what every token was chosen by is kept there.
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
        verdict = super().verify(logits, draft, masks)
        if self._record is not None:
            parents = chain(len(draft.tokens)) if draft.parents is None else draft.parents
            for node in (-1, *verdict.accepted):
                path = [draft.tokens[i] for i in path_to(parents, node)]
                raw = torch.tensor(logits[1 + node], device=self._device)
                self._record.scores.append(TokenScores(raw, self._processed(raw, path)))
        return verdict

    def _adjust(self, logits: Array, path: Sequence[int], mask: Mask | None) -> Array:
        if np.isnan(logits).any():
            raise NumericalError("the model produced logits that are not numbers; its weights or input are damaged")
        if mask is not None:
            logits = np.where(unpack_mask(mask, self._vocab_size), logits, -np.inf)
        raw = torch.from_numpy(logits).to(self._device, torch.float32)  # exact: they came as float32
        scores: Array = self._processed(raw, path).double().cpu().numpy()
        if not np.isfinite(scores).any():
            raise NoTokenError("no token is left to choose: the processors exclude all that there are")
        return scores

    def _processed(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        return self._processors([*self._tokens, *path], logits[None])[0]
