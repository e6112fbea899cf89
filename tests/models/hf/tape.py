"""What a CUDA graph does, on the CPU: operations are recorded once and repeated over the same memory.

No Python of the model runs in a replay, so whatever a pass decides in Python is as old as the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """One pass. Results that are views, or written in place, lie where they did; others are copied there."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        output = func(*args, **kwargs)
        results = [t if isinstance(t, torch.Tensor) and _memory(t) not in given else None for t in tree_leaves(output)]
        self._steps.append((func, args, kwargs, results))
        return output

    def replay(self) -> None:
        for func, args, kwargs, results in self._steps:
            for kept, again in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if kept is not None:
                    kept.copy_(again)


class TapeCapture:
    """A `Capture` that counts."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.num_captures += 1
        tape = Tape()
        with tape:
            output = run()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay, output


def _memory(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()  # packed weights have no address
