"""The CPU core as a LanguageModel: flattens the rows of a batch and hands them to the C++ decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import UnsupportedModelError
from foredraft.models.architecture import Architecture
from foredraft.models.base import Rows
from foredraft.types import Picture

if TYPE_CHECKING:
    from foredraft._native import Decoder, KVCache

#: Tokens whose logits one block of packed weights gives.
HEAD_BLOCK = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where a loaded model's memory goes, in bytes. `str()` is the table that --debug prints."""

    file: int  # mapped; after packing only the used rows of the embedding are read
    packed_weights: int
    packed_in: str  # path of the cache on disk (its pages are shared and can be given back), or "memory"
    kv_per_token: int
    kv_reserved: int  # taken as slots are written
    scratch: int  # of a pass over SCRATCH_ROWS rows, an estimate

    def __str__(self) -> str:
        rows = (
            ("model file, mapped", self.file, "only embedding rows are read after packing"),
            ("packed weights", self.packed_weights, f"in {self.packed_in}"),
            ("KV cache", self.kv_reserved, f"{self.kv_per_token / 1024:.1f} KiB a token, taken as it fills"),
            ("scratch", self.scratch, "for a pass over a prompt chunk"),
        )
        return "\n".join(f"{name:<20}{size / 1e6:>9.1f} MB   {note}" for name, size, note in rows)


class NativeModel:
    """A decoder of the C++ core and its cache. Implements LanguageModel; see there for the methods."""

    def __init__(
        self,
        name: str,
        architecture: Architecture,
        decoder: Decoder,
        cache: KVCache,
        max_model_len: int,
        head_bytes: int,
        plan: MemoryPlan,
    ) -> None:
        self.name = name
        self.architecture = architecture
        self.max_model_len = max_model_len
        self.memory_plan = plan
        self._decoder = decoder
        self._cache = cache
        self._head_bytes = head_bytes  # of weight_bytes
        self.device_rows = None
        self.takes_trees = True
        self._head_share = 1.0  # of the head's blocks that a pass reads

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def context_length(self) -> int:
        return self.architecture.context_length

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def kernel_set(self) -> str:
        """The instruction set in use: avx512, avxvnni, avx2, neon or portable."""
        return self._decoder.kernel_set

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes - round((1 - self._head_share) * self._head_bytes)

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> NDArray[np.float32]:
        sequences = np.array(
            [(rows.start, len(rows.tokens), rows.num_logits, len(rows.block_table)) for rows in batch], dtype=np.int32
        )
        if len(batch) == 1:
            tables = batch[0].block_table
            tokens = np.array(batch[0].tokens, dtype=np.int32)
        else:
            tables = np.concatenate([rows.block_table for rows in batch])
            tokens = np.array(list(chain.from_iterable(rows.tokens for rows in batch)), dtype=np.int32)
        embedding_rows, embeddings = _flatten_embeddings(batch)
        return self._decoder.forward(
            self._cache, sequences, tables, tokens, _flatten_parents(batch), hidden_layers, embedding_rows, embeddings
        )

    def hidden_states(self) -> NDArray[np.float32]:
        return self._decoder.hidden_states()

    def profile(self) -> dict[str, float]:
        """Seconds that each stage of the last pass took, summed over layers. `_native.pyi` names the stages."""
        return self._decoder.profile()

    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        self._decoder.move_slots(
            self._cache, block_table, np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        )

    def see(self, picture: Picture) -> None:
        raise UnsupportedModelError(f"{self.name} reads text only")

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        """Computes whole blocks of HEAD_BLOCK neighbouring tokens."""
        if token_ids is None:
            self._head_share = 1.0
            self._decoder.limit_head(None)
            return
        blocks = np.flatnonzero(np.bincount(np.asarray(token_ids, np.int64) // HEAD_BLOCK)).astype(np.int32)
        self._head_share = len(blocks) / -(-self.vocab_size // HEAD_BLOCK)
        self._decoder.limit_head(blocks)


def _flatten_parents(batch: Sequence[Rows]) -> NDArray[np.int32] | None:
    """[rows] parents within each sequence; None if all are chains."""
    if all(rows.parents is None for rows in batch):
        return None
    parents = (range(-1, len(rows.tokens) - 1) if rows.parents is None else rows.parents for rows in batch)
    return np.array(list(chain.from_iterable(parents)), dtype=np.int32)


def _flatten_embeddings(batch: Sequence[Rows]) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Numbers of the rows that bring their own embeddings, [e], and these, [e, hidden]."""
    if all(rows.embeddings is None for rows in batch):
        return None, None
    numbers: list[int] = []
    given: list[NDArray[np.float32]] = []
    begin = 0
    for rows in batch:
        if rows.embeddings is not None:
            numbers += range(begin, begin + len(rows.tokens))
            given.append(rows.embeddings)
        begin += len(rows.tokens)
    return np.array(numbers, dtype=np.int32), np.ascontiguousarray(np.concatenate(given), dtype=np.float32)
