"""Block tables: immutable snapshots, and the one that is extended inside a context."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvcache_core import (
    BlockTable,
    CacheFullError,
    HandleError,
    KvCacheManager,
    MutableBlockTable,
    ShapeError,
    StepError,
)
from kvcache_core.block_table import blocks_for
from tests.caches import NewCache, filled, raising, refused, unchanged


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (2**62, 2**60)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


# -- the snapshot --------------------------------------------------------------------------------------------


def test_a_table_counts_what_it_holds_and_what_still_fits() -> None:
    table = BlockTable([7, 3, 9], 6, 4)
    assert table.physical_blocks == (7, 3, 9)
    assert table.logical_to_physical == {0: 7, 1: 3, 2: 9}
    assert (len(table), table.num_blocks, table.block_size, table.sequence_length) == (3, 3, 4, 6)
    assert (table.capacity, table.free_tokens) == (12, 6)
    assert table.has_free_space()
    assert table.has_free_space(6)
    assert not table.has_free_space(7)


def test_an_empty_table_has_room_for_nothing() -> None:
    table = BlockTable([], 0, 4)
    assert (table.num_blocks, table.free_tokens, table.logical_to_physical) == (0, 0, {})
    assert table.has_free_space(0)
    assert not table.has_free_space()


def test_a_slot_is_found_through_the_physical_block() -> None:
    table = BlockTable([7, 3], 5, 4)
    assert [table.slot(position) for position in (0, 3, 4, 7)] == [28, 31, 12, 15]
    with pytest.raises(ShapeError, match="position 8 lies beyond the table's capacity of 8 tokens"):
        table.slot(8)


@pytest.mark.parametrize("bad", [-1, True, 1.5, None, "2"])
def test_questions_about_no_count_are_refused(bad: object) -> None:
    table = BlockTable([1], 1, 4)
    for ask in (table.blocks_needed_for_length, table.has_free_space, table.slot):
        with pytest.raises(ShapeError, match=r"must be an int of at least 0"):
            ask(bad)  # type: ignore[operator]


@pytest.mark.parametrize(("blocks", "length", "size"), [([1], 5, 4), ([], 1, 4), ([1], -1, 4), ([1], 1, 0)])
def test_a_table_that_cannot_hold_its_tokens_cannot_be_made(blocks: list[int], length: int, size: int) -> None:
    with pytest.raises(ShapeError):
        BlockTable(blocks, length, size)


@pytest.mark.parametrize("name", ["physical_blocks", "sequence_length", "block_size", "num_blocks", "other"])
def test_a_table_cannot_be_assigned_to(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(BlockTable([1], 1, 4), name, 2)


def test_changing_what_a_table_was_made_from_or_returned_does_not_change_it() -> None:
    blocks = [1, 2]
    table = BlockTable(blocks, 3, 4)
    blocks.append(3)
    table.logical_to_physical[5] = 5
    assert table.physical_blocks == (1, 2)
    assert table.logical_to_physical == {0: 1, 1: 2}


def test_tables_are_values() -> None:
    table = BlockTable([1, 2], 3, 4)
    assert table == BlockTable((1, 2), 3, 4)
    assert hash(table) == hash(BlockTable((1, 2), 3, 4))
    assert len({table, BlockTable([2, 1], 3, 4), BlockTable([1, 2], 4, 4), BlockTable([1, 2], 3, 2)}) == 4
    assert table != (1, 2)
    assert pickle.loads(pickle.dumps(table)) == copy.deepcopy(table) == table
    assert repr(table) == "BlockTable(physical_blocks=[1, 2], sequence_length=3, block_size=4)"


# -- extending -----------------------------------------------------------------------------------------------


def test_a_mutable_table_takes_blocks_by_number_or_by_id() -> None:
    table = MutableBlockTable([5], 2, 4, lambda count: list(range(10, 10 + count)))
    table.add_blocks(2)
    table.add_blocks([7])
    table.add_blocks(block for block in (8, 9))
    table.add_blocks(0)
    assert table.physical_blocks == (5, 10, 11, 7, 8, 9)
    assert table.sequence_length == 2


def test_extending_takes_only_the_blocks_that_are_short() -> None:
    asked: list[int] = []
    table = MutableBlockTable([5], 2, 4, lambda count: asked.append(count) or [20 + len(asked)] * count)
    table.extend_sequence(2)
    assert asked == []
    table.extend_sequence(3)
    assert asked == [1]
    table.extend_sequence(6)
    assert asked == [1]
    assert table.free_tokens == 6


@pytest.mark.parametrize("bad", [-1, True, [0], [1.0], ["1"], [True], [-1]])
def test_a_mutable_table_refuses_what_is_no_count_and_no_block(bad: object) -> None:
    table = MutableBlockTable([5], 2, 4, lambda count: [])
    with pytest.raises(ShapeError):
        table.add_blocks(bad)  # type: ignore[arg-type]
    assert table.physical_blocks == (5,)


def test_a_mutable_table_is_unchanged_when_blocks_are_short() -> None:
    def none_left(count: int) -> list[int]:
        raise CacheFullError("none left", needed=count, free=0)

    table = MutableBlockTable([5], 2, 4, none_left)
    with pytest.raises(CacheFullError):
        table.extend_sequence(100)
    assert table.physical_blocks == (5,)


def test_a_mutable_table_equals_its_snapshot_but_cannot_be_a_key() -> None:
    table = MutableBlockTable([5], 2, 4, lambda count: [])
    assert table == BlockTable([5], 2, 4)
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)


# -- through a handle ----------------------------------------------------------------------------------------


def test_blocks_of_an_edited_table_belong_to_the_handle_after_the_context(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    with handle.block_table_mut() as table:
        table.extend_sequence(10)
        assert handle.block_table.num_blocks == 1
        table.add_blocks(cache.block_allocator.allocate_blocks(1))
    assert handle.block_table == table
    assert handle.block_table.num_blocks == 5
    assert handle.num_tokens == 3
    assert cache.stats().loose_blocks == 0
    assert cache.audit() == ()


def test_an_error_inside_the_context_gives_the_blocks_back(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    with unchanged(cache), raising(KeyError), handle.block_table_mut() as table:
        table.extend_sequence(10)
        raise KeyError("mine")


def test_blocks_that_the_caller_gave_back_himself_are_not_given_back_twice(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    with unchanged(cache), raising(KeyError), handle.block_table_mut() as table:
        table.extend_sequence(10)
        cache.block_allocator.free_blocks(table.physical_blocks[1:2])
        raise KeyError("mine")


def test_a_table_is_dead_after_its_context(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    with handle.block_table_mut() as table:
        pass
    for change in (lambda: table.add_blocks(1), lambda: table.add_blocks([9]), lambda: table.extend_sequence(50)):
        with refused(cache, HandleError, "no longer being edited", reason="stale"):
            change()


def test_a_table_may_only_grow(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    for blocks in ([], handle.block_table.physical_blocks[::-1], handle.block_table.physical_blocks[:1]):
        with refused(cache, ShapeError, "may only grow"), handle.block_table_mut() as table:
            table._blocks = list(blocks)


@pytest.mark.parametrize("which", ["its own", "another's", "free", "beyond"])
def test_a_table_takes_no_block_that_is_not_the_callers(cache: KvCacheManager, which: str) -> None:
    handle, other = filled(cache, 6), filled(cache, 6, "b")
    block = {"its own": handle.block_table.slot(0) // 4, "another's": other.block_table.slot(0) // 4, "free": 16}
    with refused(cache, HandleError, "allocate_blocks", reason="foreign"), handle.block_table_mut() as table:
        table.add_blocks([block.get(which, 99)])


def test_a_table_takes_no_block_twice(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    [block] = cache.block_allocator.allocate_blocks(1)
    with refused(cache, ShapeError, "twice"), handle.block_table_mut() as table:
        table.add_blocks([block, block])
    cache.block_allocator.free_blocks([block])


def test_the_length_does_not_move_by_editing(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with refused(cache, ShapeError, "moves only when a step commits"), handle.block_table_mut() as table:
        table._length = 7


def test_a_table_takes_no_more_blocks_than_the_sequence_can_fill(cache: KvCacheManager) -> None:
    handle = cache.allocate(max_sequence_length=6)
    with refused(cache, ShapeError, "3 blocks", "6 tokens"), handle.block_table_mut() as table:
        table.extend_sequence(9)
    with handle.block_table_mut() as table:
        table.extend_sequence(6)
    assert handle.block_table.num_blocks == 2


def test_a_table_is_refused_when_the_handle_changed_meanwhile(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    changes = {
        "truncate": lambda: handle.truncate(5),
        "append": lambda: handle.append([(k[:1], v[:1]) for k, v in map(handle.kv_cache, range(3))]),  # type: ignore[misc]
        "extend": lambda: cache.extend(handle, 20),
    }
    for change in changes.values():
        free = cache.stats().free_blocks
        with raising(HandleError, "changed while", reason="stale"), handle.block_table_mut() as table:
            table.add_blocks(1)
            change()
            free = cache.stats().free_blocks
        assert cache.stats().free_blocks == free + 1
        assert cache.audit() == ()


def test_a_table_is_refused_when_the_handle_was_freed_meanwhile(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with raising(HandleError, reason="freed"), handle.block_table_mut() as table:
        table.add_blocks(1)
        handle.free()
    assert cache.stats().free_blocks == 16


def test_editing_while_the_cache_closes_raises_and_harms_nothing(new_cache: NewCache) -> None:
    cache = new_cache()
    handle = filled(cache, 6)
    with raising(HandleError, reason="closed"), handle.block_table_mut() as table:
        table.add_blocks(1)
        cache.close()


def test_editing_is_for_handles_outside_open_steps(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    with raising(StepError, "open step"), handle.block_table_mut():
        raise AssertionError("not reached")
    step.abort()
    with raising(StepError, "open step"), handle.block_table_mut() as table:
        table.add_blocks(1)
        step = cache.begin({handle: 1})
    step.abort()
    assert cache.audit() == ()
    assert cache.stats().free_blocks == 14
