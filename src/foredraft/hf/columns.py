"""`generate`'s own bookkeeping, column by column: rows run ahead of each other, but count only when all have come.

row 0   p p p | a a a a |   a a        | what criteria, streamers and the result have seen
row 1   - p p | a a a a |
row 2   p p p | a a E - |              E ends its row: padding follows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from foredraft.hf.batch import Batch
from foredraft.hf.sampler import TokenScores


class Columns:
    """Invariant: `ids` is what `generate` would hold after as many steps; what rows have beyond it waits."""

    def __init__(self, batch: Batch, streamer: Any) -> None:
        self.ids = batch.input_ids  # [B, length]
        config = batch.generation_config
        wanted = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wanted and config.output_logits else None
        self._batch = batch
        self._streamer = streamer
        self._ahead: list[deque[int]] = [deque() for _ in batch.prompts]
        self._is_unfinished = torch.ones(len(self._ahead), dtype=torch.bool, device=self.ids.device)
        self._pads_ends = any(hasattr(criterion, "eos_token_id") for criterion in batch.stopping_criteria)
        pad = config._pad_token_tensor
        self._pad_id = 0 if pad is None else int(pad)  # only rows that ended are padded, and then there is one

    def extend(self, index: int, tokens: Sequence[int]) -> None:
        """More tokens of a row."""
        self._ahead[index].extend(tokens)

    def commit(self) -> bool:
        """Take all columns that are complete. Returns whether the text is."""
        while all(self._ahead[i] or self.is_padded(i) for i in range(len(self._ahead))):
            if self._take():
                if self._streamer is not None:
                    self._streamer.end()
                return True
        return False

    def is_padded(self, index: int) -> bool:
        """Whether a row has ended, and needs no more tokens."""
        return self._pads_ends and not bool(self._is_unfinished[index])

    def _take(self) -> bool:
        """One column. Returns whether it is the last."""
        entries = [self._scores_of(index) for index in range(len(self._ahead))]
        column = [self._pad_id if self.is_padded(i) else row.popleft() for i, row in enumerate(self._ahead)]
        tokens = torch.tensor(column, device=self.ids.device)  # int64, as `generate` makes them
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        if self.scores is not None:
            self.scores += (torch.stack([entry.processed for entry in entries]),)
        if self.logits is not None:
            self.logits += (torch.stack([entry.logits for entry in entries]),)
        self._is_unfinished &= ~self._batch.stopping_criteria(self.ids, self.scores)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return not bool(self._is_unfinished.any())

    def _scores_of(self, index: int) -> TokenScores:
        """What the row's token of the next column was chosen by; zeros where it is padding."""
        position = self.ids.shape[1] - self._batch.input_ids.shape[1]
        known = self._batch.records[index].scores if self._batch.records is not None else []
        if self.is_padded(index):
            nothing = torch.zeros_like(known[0].logits) if known else torch.empty(0)
            return TokenScores(nothing, nothing)
        return known[position] if known else TokenScores(torch.empty(0), torch.empty(0))
