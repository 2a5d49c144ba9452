"""Block ids: taken, shared, given back, and never handed out twice."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core import CacheFullError, HandleError, KvCacheManager, ShapeError, UnsupportedError
from kvcache_core.allocator import BlockAllocator
from tests.caches import NewCache, filled, refused


def test_ids_run_from_one_so_that_zero_can_be_the_null_block() -> None:
    allocator = BlockAllocator(3, 4)
    assert (allocator.total_block_count, allocator.block_size, allocator.free_block_count) == (3, 4, 3)
    assert allocator.allocate_blocks(3) == [1, 2, 3]
    assert allocator.free_block_count == 0


def test_blocks_given_back_are_taken_again_before_unused_ones_last_one_first() -> None:
    allocator = BlockAllocator(8, 4)
    blocks = allocator.allocate_blocks(4)
    allocator.free_blocks([blocks[0], blocks[2]])
    assert allocator.allocate_blocks(1) == [blocks[2]]
    assert allocator.allocate_blocks(2) == [blocks[0], 5]


def test_taking_more_than_is_free_takes_nothing() -> None:
    allocator = BlockAllocator(3, 4)
    allocator.allocate_blocks(2)
    with pytest.raises(CacheFullError, match=r"^2 blocks were asked for and 1 of 3 are free") as caught:
        allocator.allocate_blocks(2)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (2, 1, 0)
    assert allocator.free_block_count == 1
    assert allocator.allocate_blocks(1) == [3]


@pytest.mark.parametrize("count", [-1, True, 1.0, "1", None, 10**5000], ids=type)
def test_a_number_of_blocks_has_to_be_one(count: object) -> None:
    allocator = BlockAllocator(3, 4)
    with pytest.raises(ShapeError, match="count must be an int of at least 0"):
        allocator.allocate_blocks(count)  # type: ignore[arg-type]
    assert allocator.free_block_count == 3


def test_taking_no_blocks_is_fine() -> None:
    assert BlockAllocator(3, 4).allocate_blocks(0) == []
    BlockAllocator(3, 4).free_blocks([])


@pytest.mark.parametrize("blocks", [[1, 1], [1, 3], [3], [2, 99], [1, 2, 1]])
def test_vllm_42571_a_release_that_names_a_block_twice_or_a_foreign_one_frees_nothing(blocks: list[int]) -> None:
    allocator = BlockAllocator(3, 4)
    allocator.allocate_blocks(2)
    with pytest.raises(HandleError, match="cannot be freed here") as caught:
        allocator.free_blocks(blocks)
    assert caught.value.reason == "foreign"
    assert allocator.free_block_count == 1
    allocator.free_blocks([1, 2])
    assert sorted(allocator.allocate_blocks(3)) == [1, 2, 3]


@pytest.mark.parametrize("blocks", [[1.0], [True], ["1"], [None], [0], [-1], [[1]]])
def test_what_is_no_block_id_is_refused_even_where_it_equals_one(blocks: list[object]) -> None:
    allocator = BlockAllocator(3, 4)
    allocator.allocate_blocks(2)
    with pytest.raises(ShapeError, match="a block id must be an int of at least 1"):
        allocator.free_blocks(blocks)  # type: ignore[arg-type]
    assert allocator.loose == {1, 2}


def test_freeing_twice_is_refused() -> None:
    allocator = BlockAllocator(3, 4)
    blocks = allocator.allocate_blocks(2)
    allocator.free_blocks(blocks)
    with pytest.raises(HandleError):
        allocator.free_blocks(blocks)
    assert allocator.free_block_count == 3


def test_blocks_of_a_sequence_cannot_be_freed_by_hand(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with refused(cache, HandleError, "belong to a sequence", reason="foreign"):
        cache.block_allocator.free_blocks(handle.block_table.physical_blocks)


def test_loose_blocks_are_counted_as_neither_free_nor_used(cache: KvCacheManager) -> None:
    blocks = cache.block_allocator.allocate_blocks(5)
    stats = cache.stats()
    assert (stats.loose_blocks, stats.used_blocks, stats.free_blocks, stats.used_bytes) == (5, 0, 11, 0)
    assert cache.audit() == ()
    cache.reset()
    assert cache.block_allocator.loose == set(blocks)
    cache.block_allocator.free_blocks(blocks)
    assert cache.stats().free_blocks == 16


def test_a_closed_cache_hands_out_no_blocks_and_takes_none_back(new_cache: NewCache) -> None:
    cache = new_cache()
    blocks = cache.block_allocator.allocate_blocks(1)
    cache.close()
    for act in (lambda: cache.block_allocator.allocate_blocks(1), lambda: cache.block_allocator.free_blocks(blocks)):
        with pytest.raises(HandleError, match="closed") as caught:
            act()
        assert caught.value.reason == "closed"


def test_defragment_says_why_there_is_nothing_to_do() -> None:
    with pytest.raises(UnsupportedError, match="cannot fragment") as caught:
        BlockAllocator(3, 4).defragment()
    assert caught.value.capability == "defragment"


def test_a_block_is_free_only_when_its_last_name_is_gone() -> None:
    allocator = BlockAllocator(4, 4)
    blocks = allocator.take(2)
    allocator.share(blocks)
    assert allocator.drop(blocks) == []
    assert [allocator.references(block) for block in (1, 2, 3)] == [1, 1, 0]
    assert allocator.drop([2, 1]) == [2, 1]
    assert allocator.free_block_count == 4


def test_a_retained_block_is_cached_while_no_live_sequence_names_it() -> None:
    allocator = BlockAllocator(4, 4)
    [block] = allocator.take(1)
    allocator.share([block])
    allocator.retain([block])
    assert (allocator.cached_block_count, allocator.references(block), allocator.retentions(block)) == (0, 1, 1)
    assert allocator.drop([block]) == []
    assert (allocator.cached_block_count, allocator.free_block_count) == (1, 3)
    allocator.share([block])
    assert allocator.cached_block_count == 0
    assert allocator.unretain([block]) == []
    assert allocator.drop([block]) == [block]
    assert (allocator.cached_block_count, allocator.free_block_count) == (0, 4)


def test_a_cut_frees_as_many_blocks_as_asked_for_or_all_it_can_and_no_more_than_it_must() -> None:
    allocator = BlockAllocator(8, 4)
    blocks = allocator.take(5)
    allocator.retain(blocks)
    assert [allocator.cut_point(blocks, count) for count in (1, 2, 5, 9)] == [4, 3, 0, 0]
    allocator.share(blocks[:1] + blocks[3:])  # a live sequence names the first and the last two
    assert [allocator.cut_point(blocks, count) for count in (1, 2, 5)] == [2, 1, 1]
    allocator.share(blocks[1:3])
    assert allocator.cut_point(blocks, 1) == 5
    assert allocator.cut_point([], 1) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_no_block_is_ever_held_twice_or_lost(operations: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(9, 4)
    held: list[int] = []
    for take, number in operations:
        if take and number <= allocator.free_block_count:
            held += allocator.allocate_blocks(number)
        elif not take:
            allocator.free_blocks(held[:number])
            del held[:number]
        assert len(set(held)) == len(held)
        assert sorted([*held, *allocator.free_ids()]) == list(range(1, 10))
        assert allocator.free_block_count == 9 - len(held)


def test_kvcached_262_threads_never_get_the_same_block() -> None:
    allocator = BlockAllocator(64, 4)
    seen: list[list[int]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(200):
            try:
                blocks = allocator.allocate_blocks(20)
            except CacheFullError:
                continue
            seen.append(blocks)
            held.append(set(blocks))
            allocator.free_blocks(blocks)

    held: list[set[int]] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen
    assert allocator.free_block_count == 64
    assert sorted(allocator.free_ids()) == list(range(1, 65))
