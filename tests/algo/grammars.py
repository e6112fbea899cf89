"""Grammars small enough to be a function of the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foredraft.algo.masks import pack_mask

Tokens = tuple[int, ...]


@dataclass
class ToyGrammar:
    """`allowed(text)`: what may follow; nothing: the text is complete."""

    vocab: int
    allowed: Callable[[Tokens], Collection[int]]
    text: list[int] = field(default_factory=list)  # committed

    def mask(self, path: Sequence[int], /) -> NDArray[np.uint32]:
        bits = np.zeros(self.vocab, dtype=np.bool_)
        bits[list(self.allowed((*self.text, *path))) or slice(None)] = True  # behind the end nobody should ask
        return pack_mask(bits)

    def is_complete(self, path: Sequence[int], /) -> bool:
        return not self.allowed((*self.text, *path))

    def advance(self, token: int) -> bool:
        self.text.append(token)
        return self.is_complete(())


def zeros_and_ones(text: Tokens) -> Collection[int]:
    """0, 1 and the end 2: no 1 after a 1, no end after a 0, at most three tokens before the end."""
    if text[-1:] == (2,):
        return ()
    if len(text) == 3:
        return (2,)
    return {(): (0, 1), (0,): (0, 1), (1,): (0, 2)}[text[-1:]]
