"""A model's output head over some of its tokens: the rest of the matrix is not read (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.models.hf.vision import can_see


class CutHead:
    """Logits of the chosen tokens, -inf for the others.

    The head's first rows are read where they are, as far as they are chosen without a gap; the others are copied.
    """

    def __init__(self, head: torch.nn.Linear, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        ids = np.asarray(token_ids, np.int64)
        self._num_first = int(np.cumprod(ids == np.arange(len(ids))).sum())
        self._others = torch.from_numpy(ids[self._num_first :]).to(head.weight.device)
        self._vocab_size = head.weight.shape[0]
        first, bias = slice(0, self._num_first), head.bias
        self._first = (head.weight[first], None if bias is None else bias[first])
        self._rest = (head.weight[self._others], None if bias is None else bias[self._others])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits = hidden.new_full((hidden.shape[0], self._vocab_size), float("-inf"))
        logits[:, : self._num_first] = torch.nn.functional.linear(hidden, *self._first)
        logits[:, self._others] = torch.nn.functional.linear(hidden, *self._rest)
        return logits


def find_body(model: Any) -> Any:
    """The part of the model whose last hidden states its head turns into logits; None if there is more to them.

    Runs the model over two tokens, to see.
    """
    if can_see(model):  # its body is not told where pictures stand
        return None
    head, body = model.get_output_embeddings(), model.get_decoder()
    if type(head) is not torch.nn.Linear or body is None or body is model:
        return None
    seen: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    ids = torch.tensor([[0, 1]], device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            states = body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    finally:
        hook.remove()
    is_all = len(seen) == 2 and seen[0].equal(states) and seen[1].to(logits.dtype).equal(logits)
    return body if is_all else None
