"""The protocol of a language model: rows in, logits out, a cache addressed by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foredraft.algo.sampler import SamplerKind
from foredraft.types import Array, Picture

#: Slots in one block of a KV cache.
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's share of a pass: new tokens after `start` cached ones.

        slots      0 .. start-1      start .. start+n-1
                   └─ committed ─┘   └─ these rows, in order (a tree may hold several futures) ─┘

    Row i is written to slot start + i. Its logical position is start + its depth in the tree. Without parents the rows
    are a chain. Row i sees the committed slots and its own ancestors. With parents, parents[0] == -1 and
    parents[i] < i; -1 hangs on the committed text.
    """

    block_table: NDArray[np.int32]  # [>= ceil((start + n) / BLOCK_SIZE)] logical block -> physical block
    start: int
    tokens: Sequence[int]  # [n]
    parents: Sequence[int] | None = None  # [n]
    num_logits: int = 1  # logits are wanted for the last so many rows (0 .. n)
    embeddings: NDArray[np.float32] | None = None  # [n, hidden] used instead of the tokens' own
    pictures: Sequence[Picture] = ()  # of the sequence's whole prompt, for models that see (`models/hf`)


class TextTokenizer(Protocol):
    """Text to ids and back, as the engine and drafters need it (`models/tokenizer.py` reads it from a GGUF file)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_token_length(self) -> int:
        """Characters of text that one token stands for at most: what is longer than so many a token does not fit."""
        ...

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None:
        """The one that the model's own settings name."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a generation."""
        ...

    @property
    def chat_template(self) -> str | None: ...
    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, mark: str = ""
    ) -> list[int]: ...
    def mark_special(self, text: str, mark: str) -> str:
        """The text with `mark` inside every control token that it spells; `encode(..., mark=mark)` keeps those text."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """The bytes that a token adds to the text."""
        ...

    def is_special(self, token: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows that stay where the model computes them, as tensors of torch, and the sampler that reads them there."""

    device: str
    sampler: SamplerKind


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as a model reads it: the tokens that stand for it, and the rest of a `Picture` (see there)."""

    tokens: Sequence[int]
    key: bytes
    inputs: Any


class ImageReader(Protocol):
    """Turns images into what a model reads. Any thread may use it."""

    @property
    def refusal(self) -> str | None:
        """Why the model takes no images after all, as the end of a sentence that begins with them."""
        ...

    @property
    def as_parts(self) -> bool:
        """Whether the chat template wants contents as lists of parts."""
        ...

    @property
    def image_token_id(self) -> int:
        """The token that the chat template writes for an image."""
        ...

    def read(self, image: Any, /) -> ReadImage:
        """Of an RGB image of Pillow. Raises ValueError if the model's processor refuses it."""
        ...


class LanguageModel(Protocol):
    """A model with a paged cache. Not thread-safe: one pass at a time."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """Width of the logits; may be padded beyond the tokenizer's."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and answer."""
        ...

    @property
    def context_length(self) -> int:
        """The most that `max_model_len` may be."""
        ...

    @property
    def num_blocks(self) -> int:
        """Physical blocks in the cache."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees: not if rows are to have the bits of a chain, and a tree's round otherwise."""
        ...

    @property
    def device_rows(self) -> DeviceRows | None:
        """None: `forward` returns numpy arrays."""
        ...

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> Array:
        """One pass. Returns logits [sum of num_logits, vocab] float32, sequence by sequence.

        The array is valid until the next pass. Hidden states of `hidden_layers` are then in `hidden_states()`. Rows
        without logits may see slots that hold nothing, or one block twice: what they write is then as good.
        """
        ...

    def hidden_states(self) -> Array:
        """[layers, rows of all sequences, hidden] of the last pass, for the layers it was asked for."""
        ...

    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        """Copy cache slots, in order: compacts an accepted tree path. Every source[i] >= target[i], both ascending."""
        ...

    def see(self, picture: Picture) -> None:
        """Read it, before the first pass over rows that stand for it. Raises ForedraftError if it cannot be read."""
        ...

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        """Drafts only: compute logits for the given tokens and perhaps for others, -inf elsewhere. None: all."""
        ...
