"""Physical blocks of a KV cache: who owns which, and what full ones hold.

One `BlockPool` a model; one `SlotTable` a sequence and model. Slots are the sequence's own addresses 0, 1, 2, …; its
table maps each block of them to a physical block. A full block is known by a hash of its tokens and of all tokens
before it, so that every text which begins alike can use it, at once or later.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ForedraftError
from foredraft.models.base import BLOCK_SIZE
from foredraft.types import Picture

#: Bytes of a block's hash: equal hashes are taken for equal texts.
HASH_SIZE = 16


class BlockPool:
    """Physical blocks 0 .. num_blocks-1. Each is one of:

        owned   by one table or more; published or not
        kept    by nobody, published: it may be acquired again, until the block is needed
        free    by nobody, holds nothing

    A published block has a hash, which no other block has, and is never written. Whoever owns one owns those before it
    in its text; so the least recently used of the kept blocks is one that no other continues. shares: False publishes
    nothing.
    """

    def __init__(self, num_blocks: int, *, shares: bool = True) -> None:
        self.num_blocks = num_blocks
        self.shares = shares
        self._free = list(range(num_blocks - 1, -1, -1))  # lowest on top, so that few pages are ever touched
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free or kept."""
        return len(self._free) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Raises ForedraftError when fewer than `count` blocks can be had; nothing is taken then."""
        if count > self.num_free:
            raise ForedraftError(f"the KV cache is full ({self.num_blocks * BLOCK_SIZE} tokens)")
        while len(self._free) < count:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_owners[block] = 1
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is published."""
        blocks = []
        for hash in hashes:
            block = self._block_of.get(hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_kept(self, blocks: Iterable[int]) -> int:
        """How many of these nobody owns."""
        return sum(not self._num_owners[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these published blocks."""
        for block in blocks:
            if not self._num_owners[block]:
                del self._kept[block]
            self._num_owners[block] += 1

    def publish(self, block: int, hash: bytes) -> int:
        """The block that holds this text from now on: `block`, or another that has it, and `block` is given back."""
        known = self._block_of.setdefault(hash, block)
        if known == block:
            self._hash_of[block] = hash
        else:
            self.acquire([known])
            self.release([block])
        return known

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a text, or of its end."""
        for block in reversed(blocks):  # leaves first
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._hash_of:
                self._kept[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[SlotTable]) -> None:
        """Raises ForedraftError unless `tables` are the owners, and every block is in exactly one state."""
        owners = Counter(int(block) for table in tables for block in table.blocks)
        owned = [block for block in range(self.num_blocks) if self._num_owners[block]]
        if dict(owners) != {block: self._num_owners[block] for block in owned}:
            raise ForedraftError("the KV cache miscounts the owners of a block: please report this")
        if sorted([*owned, *self._kept, *self._free]) != list(range(self.num_blocks)):
            raise ForedraftError("the KV cache lost a block, or has one twice: please report this")
        published = {block: hash for hash, block in self._block_of.items()}
        if self._hash_of != published or not self._kept.keys() <= published.keys() or published.keys() & {*self._free}:
            raise ForedraftError("the KV cache mistakes what a block holds: please report this")
        for table in tables:
            table.check_integrity(self._hash_of)


class SlotTable:
    """One sequence's blocks in one pool.

        blocks   [ published: full and final, perhaps shared | this table's own: being written ]

    The sequence's text only grows, and tokens are final once their slots are computed and are not written again.
    cache_salt: only texts of the same salt share blocks. pictures: what some of the tokens stand for; blocks with
    tokens of a picture, and those behind them, are shared by texts with the same picture there only.
    """

    def __init__(self, pool: BlockPool, cache_salt: str = "", pictures: Sequence[Picture] = ()) -> None:
        self.cache_salt = cache_salt
        self._pictures = pictures
        self.blocks: NDArray[np.int32] = np.empty(0, np.int32)
        self._pool = pool
        self._num_published = 0
        self._hashes: list[bytes] = []  # of the text's full blocks, as far as they were asked for

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the full blocks of a text, short of its last token, which is computed in any case."""
        num_full = (len(tokens) - 1) // BLOCK_SIZE if self._pool.shares else 0
        for i in range(len(self._hashes), num_full):
            parent = self._hashes[-1] if self._hashes else _hash_salt(self.cache_salt)
            begin, end = i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE
            seen = [picture for picture in self._pictures if picture.start < end and picture.end > begin]
            self._hashes.append(_hash_block(parent, tokens[begin:end], seen))
        return self._hashes

    def unpublished(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the text's full blocks that this table has still to publish."""
        return self.hashes(tokens)[self._num_published :]

    def share(self, tokens: Sequence[int]) -> int:
        """For an empty table: take the published blocks that `tokens` begin with. Returns how many tokens they hold."""
        blocks = self._pool.find(self.hashes(tokens))
        self._pool.acquire(blocks)
        self.blocks = np.array(blocks, np.int32)
        self._num_published = len(blocks)
        return len(blocks) * BLOCK_SIZE

    def can_reserve(self, num_slots: int) -> bool:
        owned = len(self.blocks)
        return num_slots <= owned * BLOCK_SIZE or num_blocks_for(num_slots) - owned <= self._pool.num_free

    def reserve(self, num_slots: int) -> NDArray[np.int32]:
        """Have blocks for at least `num_slots` slots; the block table."""
        missing = num_blocks_for(num_slots) - len(self.blocks)
        if missing > 0:
            self.blocks = np.append(self.blocks, np.array(self._pool.allocate(missing), np.int32))
        return self.blocks

    def publish(self, tokens: Sequence[int], num_final: int) -> None:
        """The first `num_final` tokens, short of the last, are final: let others share their full blocks."""
        if self._pool.shares and num_final // BLOCK_SIZE > self._num_published:
            hashes = self.hashes(tokens)
            for i in range(self._num_published, num_final // BLOCK_SIZE):
                self.blocks[i] = self._pool.publish(int(self.blocks[i]), hashes[i])
            self._num_published = num_final // BLOCK_SIZE

    def release(self) -> None:
        """Give all blocks back. What was published may be shared again, as long as its blocks are not needed."""
        self._pool.release(self.blocks.tolist())
        self.blocks = np.empty(0, np.int32)
        self._num_published = 0

    def check_integrity(self, hash_of: Mapping[int, bytes]) -> None:
        """Raises ForedraftError if a block holds another text than the pool says."""
        held = [hash_of.get(block) for block in self.blocks.tolist()]
        if held != self._hashes[: self._num_published] + [None] * (len(held) - self._num_published):
            raise ForedraftError("the KV cache mistakes what a block holds: please report this")


def num_blocks_for(num_slots: int) -> int:
    return -(-num_slots // BLOCK_SIZE)


def _hash_salt(cache_salt: str) -> bytes:
    """The parent of a text's first block. No salt can be made to look like a block."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=HASH_SIZE, person=b"salt").digest()


def _hash_block(parent: bytes, tokens: Sequence[int], pictures: Sequence[Picture]) -> bytes:
    """The block's tokens, 4 bytes each, and behind them where its pictures begin and what they are."""
    seen = b"".join(array("q", (p.start, p.num_tokens, len(p.key))).tobytes() + p.key for p in pictures)
    return blake2b(parent + array("i", tokens).tobytes() + seen, digest_size=HASH_SIZE, person=b"block").digest()
