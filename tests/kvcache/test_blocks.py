from __future__ import annotations

import pytest

from foredraft.errors import ForedraftError
from foredraft.kvcache.blocks import BlockPool, SlotTable, common_prefix
from foredraft.kvcache.prefixes import PrefixStore
from foredraft.models.base import BLOCK_SIZE


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
    with pytest.raises(ForedraftError, match="KV cache is full"):
        table.reserve(4 * BLOCK_SIZE)
    assert len(table.blocks) == 1
    assert pool.num_free == 1


def test_integrity_sees_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(3)
    table = SlotTable(pool)
    table.reserve(1)
    with pytest.raises(ForedraftError):
        pool.check_integrity([])
    with pytest.raises(ForedraftError):
        pool.check_integrity([table, table])


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [1], 1), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([2], [1], 0)]
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == n


def test_a_kept_prefix_serves_all_but_the_last_token() -> None:
    pool = BlockPool(8)
    store = PrefixStore(pool, 2)
    table = SlotTable(pool)
    table.reserve(3)
    store.keep([1, 2, 3], table)
    taken, shared = store.take([1, 2, 3])
    assert taken is table
    assert shared == 2
    assert store.take([1, 2, 3])[1] == 0  # it has one owner


def test_the_store_drops_the_oldest_first() -> None:
    pool = BlockPool(8)
    store = PrefixStore(pool, 2)
    for i in range(3):
        table = SlotTable(pool)
        table.reserve(1)
        store.keep([i, 7], table)
    assert pool.num_free == 6
    store.make_room(7)
    assert [t.blocks.tolist() for t in store.tables] == [[2]]
    assert store.take([2, 7, 8])[1] == 2
