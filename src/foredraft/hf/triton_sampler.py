"""The law of `generate`'s processors, verified on the GPU: all rows of a batch by the same few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.algo.sampler import Check, Masks
from foredraft.algo.triton.sampler import TritonSampler
from foredraft.errors import NumericalError
from foredraft.hf.sampler import ProcessorSampler
from foredraft.types import Array, Draft, Verdict


class TritonProcessorSampler(ProcessorSampler, TritonSampler):
    """`ProcessorSampler` whose processed rows go to the kernels."""

    def verify(self, logits: Array, draft: Draft, masks: Masks | None = None) -> Verdict:
        return TritonSampler.verify(self, logits, draft, masks)

    @staticmethod
    def verify_together(checks: Sequence[Check]) -> list[Verdict | NumericalError]:
        outcomes = TritonSampler.verify_together(checks)
        for check, outcome in zip(checks, outcomes, strict=True):
            if isinstance(outcome, Verdict) and isinstance(check.sampler, ProcessorSampler):
                check.sampler._keep(check.logits, check.draft, outcome)
        return outcomes

    def _adjusted(self, logits: torch.Tensor, paths: Sequence[Sequence[int]], masks: Masks | None) -> torch.Tensor:
        return torch.stack(
            [
                self._scores(row, path, None if masks is None else masks[i])
                for i, (row, path) in enumerate(zip(logits, paths, strict=True))
            ]
        )
