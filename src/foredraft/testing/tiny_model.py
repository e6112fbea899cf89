"""A language model that is a hash of what it sees: it tests schedulers, drafters and caches in milliseconds.

A row's state depends on its token, its logical position and the state of every slot it sees, all read back through the
block table, as keys and values would be. So whatever a real model would notice (a stale slot, a wrong block, a wrong
parent, a forgotten move) changes the logits, and whatever it would not notice (chunks, batches, block numbers,
chain or tree) leaves them bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ForedraftError
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.types import Picture

_Words = Any  # uint64, one or an array of them; arithmetic is modulo 2**64


class TinyModel:
    """LanguageModel of pure numpy. Misuse that a real model would not survive, or would not notice, raises ValueError.

    Rows that want no logits may see slots that were never written, or one twice, as a pass that is only timed does;
    their own slots then count as never written.

    Logits are `kinship` parts a function of the last token and of `language`, and 1 part a function of the whole
    visible path and of `seed`, in 0 .. SHARPNESS. Models that share a language agree often (a target and its draft); a
    small language makes text that repeats itself, which n-gram drafters find.
    The logits of a pass turn to NaN with the next one, so that a caller who keeps them sees it.
    """

    SHARPNESS = 16.0

    def __init__(
        self,
        vocab_size: int = 272,
        max_model_len: int = 512,
        num_blocks: int = 64,
        *,
        seed: int = 0,
        language: int = 0,
        kinship: float = 1.0,
        hidden_size: int = 16,
        name: str = "tiny",
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_model_len = self.context_length = max_model_len
        self.num_blocks = num_blocks
        self.hidden_size = hidden_size
        self.weight_bytes = 4 * vocab_size
        self.device_rows = None
        self.takes_trees = True
        self.rows_per_pass: list[int] = []
        self._seed = seed
        self._language = language
        self._kinship = kinship
        self._slots = np.zeros(
            num_blocks * BLOCK_SIZE, dtype=np.uint64
        )  # state of each physical slot; 0: never written
        self._head: NDArray[np.bool_] | None = None
        self._seen: WeakSet[Picture] = WeakSet()
        self._logits = np.empty((0, vocab_size), dtype=np.float32)
        self._hidden = np.empty((0, 0, hidden_size), dtype=np.float32)

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> NDArray[np.float32]:
        self._check(batch)
        self._logits[...] = np.nan
        states = [self._compute(rows) for rows in batch]
        wanted = [s[len(s) - rows.num_logits :] for s, rows in zip(states, batch, strict=True)]
        tokens = [np.array(rows.tokens, dtype=np.uint64)[len(rows.tokens) - rows.num_logits :] for rows in batch]
        self._logits = self._head_of(np.concatenate(wanted), np.concatenate(tokens))
        every = np.concatenate(states)
        self._hidden = np.empty((len(hidden_layers), len(every), self.hidden_size), dtype=np.float32)
        for i, layer in enumerate(hidden_layers):
            self._hidden[i] = _uniform(every + np.uint64(layer), self.hidden_size)
        self.rows_per_pass.append(len(every))
        return self._logits

    def hidden_states(self) -> NDArray[np.float32]:
        return self._hidden

    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        for name, slots in (("source", source), ("target", target)):
            if any(b <= a for a, b in pairwise(slots)):
                raise ValueError(f"move_slots: {name} must ascend")
        for s, t in zip(source, target, strict=True):
            if s < t:
                raise ValueError("move_slots: a slot may only move towards the front")
            self._slots[_physical(block_table, t)] = self._slots[_physical(block_table, s)]

    def see(self, picture: Picture) -> None:
        """In place of its tokens the rows of a picture hold its key. Inputs that are an error are raised."""
        if isinstance(picture.inputs, ForedraftError):
            raise picture.inputs
        self._seen.add(picture)

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        self._head = None
        if token_ids is not None:
            self._head = np.zeros(self.vocab_size, dtype=bool)
            self._head[list(token_ids)] = True

    def _compute(self, rows: Rows) -> _Words:
        """States of one sequence's rows, also written to their slots."""
        slots = _physical(rows.block_table, np.arange(rows.start + len(rows.tokens)))
        committed = self._slots[slots[: rows.start]]
        if rows.num_logits and not committed.all():
            raise ValueError(f"{self.name}: slot {int(np.argmin(committed))} is read and was never written")
        if not committed.all() or _names_twice(rows.block_table, len(slots)):
            self._slots[slots[rows.start :]] = 0  # what was computed from nothing is nothing
            return np.zeros(len(rows.tokens), dtype=np.uint64)
        with np.errstate(over="ignore"):
            seen = np.sum(_mix(committed + np.arange(rows.start, dtype=np.uint64)), dtype=np.uint64)
            states = np.zeros(len(rows.tokens), dtype=np.uint64)
            sums, depths = np.zeros_like(states), np.zeros_like(states)  # of each row's visible path, itself included
            for i, token in enumerate(rows.tokens):
                parent = i - 1 if rows.parents is None else rows.parents[i]
                path, depth = (seen, np.uint64(0)) if parent < 0 else (sums[parent], depths[parent] + np.uint64(1))
                position = np.uint64(rows.start) + depth
                word = np.uint64(token) if rows.embeddings is None else _digest(rows.embeddings[i])
                for picture in rows.pictures:
                    if picture.start <= rows.start + i < picture.end:
                        offset = rows.start + i - picture.start
                        word = _digest(np.frombuffer(picture.key + offset.to_bytes(4, "little"), np.uint8))
                states[i] = _mix(_mix(word + np.uint64(self._seed) * _GOLDEN) + _mix(position) + path) | np.uint64(1)
                sums[i], depths[i] = path + _mix(states[i] + position), depth
        self._slots[slots[rows.start :]] = states
        return states

    def _head_of(self, states: _Words, tokens: NDArray[np.uint64]) -> NDArray[np.float32]:
        own = _uniform(states, self.vocab_size)  # [rows, vocab]
        with np.errstate(over="ignore"):
            shared = _uniform(_mix(tokens + np.uint64(self._language + 1) * _GOLDEN), self.vocab_size)
        logits = np.float32(self.SHARPNESS) * (own + np.float32(self._kinship) * shared) / np.float32(1 + self._kinship)
        if self._head is not None:
            logits[:, ~self._head] = -np.inf
        return cast(NDArray[np.float32], logits)

    def _check(self, batch: Sequence[Rows]) -> None:
        """Refuse what no engine should ask for."""
        if not batch:
            raise ValueError("forward: an empty batch")
        owner: dict[int, int] = {}  # physical slot written in this pass -> sequence
        reads: list[NDArray[np.int64]] = []
        for number, rows in enumerate(batch):
            n, end = len(rows.tokens), rows.start + len(rows.tokens)
            if n == 0 or not 0 <= rows.num_logits <= n:
                raise ValueError(f"forward: {rows.num_logits} logits of {n} rows")
            if rows.start < 0 or len(rows.block_table) * BLOCK_SIZE < end:
                raise ValueError(f"forward: {len(rows.block_table)} blocks cannot hold {end} slots")
            if end > self.num_blocks * BLOCK_SIZE:
                raise ValueError(f"forward: slot {end - 1} of a cache of {self.num_blocks} blocks")
            if not all(p in self._seen for p in rows.pictures if p.start < end):
                raise ValueError("forward: rows that reach a picture which was not seen")
            used = rows.block_table[: -(-end // BLOCK_SIZE)]
            if used.min() < 0 or used.max() >= self.num_blocks:
                raise ValueError("forward: the block table names a block that is not there")
            if rows.num_logits and _names_twice(rows.block_table, end):
                raise ValueError("forward: the block table names a block twice")
            if any(not 0 <= token < self.vocab_size for token in rows.tokens):
                raise ValueError(f"forward: a token outside the vocabulary of {self.vocab_size}")
            depths = _depths(n, rows.parents)
            if rows.start + max(depths) >= self.max_model_len:
                raise ValueError(f"forward: position {rows.start + max(depths)} of {self.max_model_len}")
            if rows.embeddings is not None and rows.embeddings.shape != (n, self.hidden_size):
                raise ValueError(f"forward: embeddings {rows.embeddings.shape}, not {(n, self.hidden_size)}")
            slots = _physical(rows.block_table, np.arange(end))
            reads.append(slots[: rows.start])
            for slot in slots[rows.start :].tolist():
                if owner.setdefault(slot, number) != number:
                    raise ValueError("forward: two sequences write the same slot")
        for number, slots in enumerate(reads):
            if any(owner.get(slot, number) != number for slot in slots.tolist()):
                raise ValueError("forward: a sequence writes a slot that another reads")


def _depths(n: int, parents: Sequence[int] | None) -> list[int]:
    if parents is None:
        return list(range(n))
    depths: list[int] = []
    if len(parents) != n or any(not -1 <= parent < i for i, parent in enumerate(parents)) or parents[0] != -1:
        raise ValueError("forward: parents[i] must be -1 or an earlier row, and parents[0] -1")
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _names_twice(block_table: NDArray[np.int32], num_slots: int) -> bool:
    used = block_table[: -(-num_slots // BLOCK_SIZE)].tolist()
    return len(set(used)) < len(used)


def _physical(block_table: NDArray[np.int32], slots: int | NDArray[np.int64]) -> NDArray[np.int64]:
    slots = np.asarray(slots)
    return block_table[slots // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + slots % BLOCK_SIZE


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _digest(vector: NDArray[np.float32]) -> _Words:
    words = np.frombuffer(np.ascontiguousarray(vector, dtype=np.float32).tobytes(), dtype=np.uint32)
    with np.errstate(over="ignore"):
        return np.sum(_mix(words + np.arange(len(words), dtype=np.uint64) * _GOLDEN), dtype=np.uint64)


def _uniform(states: _Words, width: int) -> NDArray[np.float32]:
    """[rows, width] numbers in 0 .. 1, few of them near 1. Products only, so the same bits everywhere."""
    with np.errstate(over="ignore"):
        bits = _mix(states[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN)
    u = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    for _ in range(4):
        u = u * u
    return cast(NDArray[np.float32], u)
