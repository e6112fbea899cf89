from __future__ import annotations

import pytest

from foredraft.errors import ForedraftError
from foredraft.kvcache.blocks import BlockPool, SlotTable
from foredraft.models.base import BLOCK_SIZE
from foredraft.types import Picture

TEXT = list(range(5 * BLOCK_SIZE))


def filled(pool: BlockPool, tokens: list[int], salt: str = "") -> SlotTable:
    """A table of a text all of which is computed, but for the last token."""
    table = SlotTable(pool, salt)
    table.share(tokens)
    table.reserve(len(tokens))
    table.publish(tokens, len(tokens) - 1)
    return table


def shared(pool: BlockPool, tokens: list[int], salt: str = "") -> int:
    """Tokens that a new text would find; it takes and releases them."""
    table = SlotTable(pool, salt)
    num_shared = table.share(tokens)
    table.release()
    return num_shared


def test_a_table_grows_by_whole_blocks_and_gives_all_back() -> None:
    pool = BlockPool(4)
    table = SlotTable(pool)
    assert table.reserve(1).tolist() == [0]
    assert table.reserve(BLOCK_SIZE).tolist() == [0]
    assert table.reserve(BLOCK_SIZE + 1).tolist() == [0, 1]
    pool.check_integrity([table])
    table.release()
    assert pool.num_free == 4
    pool.check_integrity([])


def test_a_full_pool_takes_nothing() -> None:
    pool = BlockPool(2)
    table = SlotTable(pool)
    table.reserve(BLOCK_SIZE)
    assert table.can_reserve(2 * BLOCK_SIZE)
    assert not table.can_reserve(2 * BLOCK_SIZE + 1)
    with pytest.raises(ForedraftError, match="KV cache is full"):
        table.reserve(4 * BLOCK_SIZE)
    assert len(table.blocks) == 1
    assert pool.num_free == 1


def test_only_full_final_blocks_are_shared_and_never_the_last_token() -> None:
    pool = BlockPool(8)
    table = SlotTable(pool)
    table.reserve(3 * BLOCK_SIZE)
    for num_final, num_shared in [(BLOCK_SIZE - 1, 0), (BLOCK_SIZE, 1), (2 * BLOCK_SIZE - 1, 1), (2 * BLOCK_SIZE, 2)]:
        table.publish(TEXT, num_final)
        assert shared(pool, TEXT) == num_shared * BLOCK_SIZE
    assert shared(pool, TEXT[: 2 * BLOCK_SIZE]) == BLOCK_SIZE
    assert shared(pool, TEXT[: 2 * BLOCK_SIZE + 1]) == 2 * BLOCK_SIZE
    assert shared(pool, TEXT[:BLOCK_SIZE]) == 0


def test_running_texts_share_blocks_and_each_owner_counts() -> None:
    pool = BlockPool(8)
    first = filled(pool, TEXT[: 2 * BLOCK_SIZE + 5])
    second = filled(pool, TEXT[: BLOCK_SIZE + 5])
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    pool.check_integrity([first, second])
    first.release()
    pool.check_integrity([second])
    assert pool.num_free == 8 - 2
    second.release()
    pool.check_integrity([])
    assert pool.num_free == 8


def test_a_block_is_known_by_all_tokens_before_it() -> None:
    pool = BlockPool(8)
    filled(pool, TEXT[: 2 * BLOCK_SIZE + 1])
    assert shared(pool, [7, *TEXT[1 : 2 * BLOCK_SIZE + 1]]) == 0
    assert shared(pool, TEXT[BLOCK_SIZE : 2 * BLOCK_SIZE + 1]) == 0
    assert shared(pool, [*TEXT[: 2 * BLOCK_SIZE - 1], 7, 7]) == BLOCK_SIZE


def test_salts_do_not_share() -> None:
    pool = BlockPool(8)
    filled(pool, TEXT[: BLOCK_SIZE + 1], "alice")
    assert [shared(pool, TEXT, salt) for salt in ("", "bob", "alice")] == [0, 0, BLOCK_SIZE]


def test_two_who_computed_the_same_end_with_one_block() -> None:
    pool = BlockPool(8)
    tokens = TEXT[: 2 * BLOCK_SIZE + 1]
    tables = [SlotTable(pool), SlotTable(pool)]
    for table in tables:
        assert table.share(tokens) == 0
        table.reserve(len(tokens))
    for num_final in (BLOCK_SIZE, 2 * BLOCK_SIZE):
        for table in tables:
            table.publish(tokens, num_final)
        pool.check_integrity(tables)
    assert tables[0].blocks[:2].tolist() == tables[1].blocks[:2].tolist()
    assert tables[0].blocks[2] != tables[1].blocks[2]
    assert pool.num_free == 8 - 4


def known(pool: BlockPool, tokens: list[int]) -> set[int]:
    """Blocks that a text would find. Leaves the pool as it is."""
    return set(pool.find(SlotTable(pool).hashes(tokens)))


def test_free_blocks_go_before_kept_ones_and_the_least_recently_used_of_these_first() -> None:
    pool = BlockPool(6)
    old, new = TEXT[: BLOCK_SIZE + 1], [9, *TEXT[: BLOCK_SIZE + 1]]
    filled(pool, old).release()
    filled(pool, new).release()
    assert shared(pool, old) == BLOCK_SIZE  # used again: now the newer one
    table = SlotTable(pool)
    for num_blocks, num_known in [(4, (1, 1)), (5, (1, 0)), (6, (0, 0))]:
        table.reserve(num_blocks * BLOCK_SIZE)
        assert (len(known(pool, old)), len(known(pool, new))) == num_known
        pool.check_integrity([table])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_leaves_go_first(order: list[int]) -> None:
    """Two texts that begin alike: no block goes before one that continues it, whichever was used last."""
    texts = [TEXT, [*TEXT[: 2 * BLOCK_SIZE], *[7] * BLOCK_SIZE, 0]]
    pool = BlockPool(7)
    tables = [filled(pool, text) for text in texts]
    for i in order:
        tables[i].release()
    taker = SlotTable(pool)
    for num_left in (5, 5, 4, 3, 2, 1, 0):
        taker.reserve(BLOCK_SIZE * (len(taker.blocks) + 1))
        assert len(known(pool, texts[0]) | known(pool, texts[1])) == num_left  # all that is kept can be reached
        pool.check_integrity([taker])


def test_a_pool_that_shares_nothing() -> None:
    pool = BlockPool(8, shares=False)
    table = filled(pool, TEXT)
    assert shared(pool, TEXT) == 0
    assert table.unpublished(TEXT) == []
    pool.check_integrity([table])
    table.release()
    pool.check_integrity([])


def test_integrity_sees_lost_surplus_and_mistaken_blocks() -> None:
    pool = BlockPool(6)
    table = filled(pool, TEXT[: BLOCK_SIZE + 1])
    for tables in ([], [table, table]):
        with pytest.raises(ForedraftError, match="miscounts"):
            pool.check_integrity(tables)
    pool._free.pop()
    with pytest.raises(ForedraftError, match="lost a block"):
        pool.check_integrity([table])
    pool = BlockPool(6)
    table = filled(pool, TEXT[: BLOCK_SIZE + 1])
    table.blocks = table.blocks[::-1]
    with pytest.raises(ForedraftError, match="mistakes"):
        pool.check_integrity([table])


def test_blocks_with_pictures_are_shared_by_texts_with_the_same_pictures() -> None:
    def table_of(pool: BlockPool, *pictures: Picture) -> SlotTable:
        return SlotTable(pool, "", pictures)

    def picture(key: bytes, start: int = BLOCK_SIZE + 3, num_tokens: int = BLOCK_SIZE) -> Picture:
        return Picture(start, num_tokens, key, None)

    pool = BlockPool(16)
    first = table_of(pool, picture(b"a"))
    first.reserve(len(TEXT))
    first.publish(TEXT, len(TEXT) - 1)
    for pictures, num_blocks in [
        ([picture(b"a")], 4),
        ([picture(b"b")], 1),
        ([], 1),
        ([picture(b"a", num_tokens=BLOCK_SIZE - 1)], 1),
        ([picture(b"a", start=BLOCK_SIZE + 4)], 1),
        ([picture(b"a"), picture(b"b", start=3 * BLOCK_SIZE)], 3),
        ([picture(b"a", start=0)], 0),
    ]:
        other = table_of(pool, *pictures)
        assert other.share(TEXT) == num_blocks * BLOCK_SIZE
        other.release()
