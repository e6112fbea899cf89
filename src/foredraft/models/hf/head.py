"""A model's output head over some of its tokens: the rest of the matrix is not read (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.models.hf.packing import can_pack, pack_weight, packed_linear
from foredraft.models.hf.vision import can_see

#: Attribute of a model: whether its head alone turns the last hidden states into logits.
_HEAD_IS_ALL = "_foredraft_head_is_all"


class CutHead:
    """Logits of the chosen tokens, -inf for the others.

    The head's first rows, as far as they are chosen without a gap, are read where they are, or packed; the others are
    copied. `previous`: of the same head, whose packed rows may serve here too.
    """

    def __init__(
        self,
        head: torch.nn.Linear,
        token_ids: Sequence[int] | NDArray[np.int64],
        *,
        packed: bool = False,
        previous: CutHead | None = None,
    ) -> None:
        ids = np.asarray(token_ids, np.int64)
        self._num_first = int(np.cumprod(ids == np.arange(len(ids))).sum())
        self._others = torch.from_numpy(ids[self._num_first :]).to(head.weight.device)
        self._vocab_size = head.weight.shape[0]
        self._first: Callable[[torch.Tensor], torch.Tensor]
        if previous is not None and previous._num_first == self._num_first:
            self._first = previous._first
        else:
            self._first = _product(head, slice(0, self._num_first), packed)
        self._rest = _product(head, self._others, packed=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits = hidden.new_full((hidden.shape[0], self._vocab_size), float("-inf"))
        logits[:, : self._num_first] = self._first(hidden)
        logits[:, self._others] = self._rest(hidden)
        return logits


def _product(head: torch.nn.Linear, rows: slice | torch.Tensor, packed: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer that those rows of the head are."""
    weight, bias = head.weight[rows], None if head.bias is None else head.bias[rows]
    if packed and can_pack(weight):
        return partial(packed_linear, weight=pack_weight(weight), bias=bias)
    return partial(torch.nn.functional.linear, weight=weight, bias=bias)


def find_body(model: Any) -> Any:
    """The part of the model whose last hidden states its head turns into logits; None if there is more to them.

    Runs the model over two tokens the first time, to see.
    """
    if can_see(model):  # its body is not told where pictures stand
        return None
    head, body = model.get_output_embeddings(), model.get_decoder()
    if type(head) is not torch.nn.Linear or body is None or body is model:
        return None
    if not hasattr(model, _HEAD_IS_ALL):
        setattr(model, _HEAD_IS_ALL, _is_head_all(model, head, body))
    return body if getattr(model, _HEAD_IS_ALL) else None


def _is_head_all(model: Any, head: torch.nn.Linear, body: Any) -> bool:
    seen: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    ids = torch.tensor([[0, 1]], device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            states = body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    finally:
        hook.remove()
    return len(seen) == 2 and seen[0].equal(states) and seen[1].to(logits.dtype).equal(logits)
