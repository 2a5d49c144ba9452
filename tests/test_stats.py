"""Numbers about handles and caches: right, consistent with each other, and never changing once handed out."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from typing import Any

import pytest

from kvcache_core import CacheFullError, KvCacheManager
from tests.caches import NewCache, filled, grow
from tests.storages.int8 import Int8Storage
from tests.storages.paged import PagedStorage


def test_a_handle_counts_what_it_holds(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    stats = handle.stats()
    assert (stats.tokens_stored, stats.blocks_allocated, stats.shared_blocks) == (6, 2, 0)
    assert stats.memory_bytes == stats.total_memory_bytes == 2 * cache.bytes_per_block
    assert stats.utilization == 6 / 8


def test_an_empty_handle_holds_nothing(cache: KvCacheManager) -> None:
    stats = cache.allocate().stats()
    assert (stats.memory_bytes, stats.total_memory_bytes, stats.blocks_allocated) == (0, 0, 0)
    assert (stats.tokens_stored, stats.utilization) == (0, 0.0)


def test_reserved_room_is_held_and_unused(cache: KvCacheManager) -> None:
    handle = cache.allocate(num_tokens=16)
    stats = handle.stats()
    assert (stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (4, 0, 0.0)
    grow(handle, 4)
    assert handle.stats().utilization == 0.25


def test_shared_blocks_are_apportioned(cache: KvCacheManager) -> None:
    handle = filled(cache, 8)
    forks = [handle.fork() for _ in range(3)]
    stats = [each.stats() for each in (handle, *forks)]
    assert sum(each.memory_bytes for each in stats) == cache.stats().used_bytes
    if cache.storage.placement == "paged":
        assert {each.memory_bytes for each in stats} == {2 * cache.bytes_per_block // 4}
        assert {each.shared_blocks for each in stats} == {2}
        assert {each.total_memory_bytes for each in stats} == {2 * cache.bytes_per_block}


def test_a_clone_is_the_same_cache_and_shares_nothing_with_itself(cache: KvCacheManager) -> None:
    handle = filled(cache, 8)
    clone = handle.clone_handle()
    assert clone.stats() == handle.stats()
    assert handle.stats().shared_blocks == 0
    assert cache.stats().active_caches == 1


def test_last_access_moves_with_steps_reads_and_truncates(cache: KvCacheManager, monkeypatch: Any) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    handle = filled(cache, 6)
    actions = [lambda: grow(handle, 1), lambda: handle.key_cache(0), lambda: handle.truncate(3), handle.fork]
    for action in actions:
        now += 10
        action()
        assert handle.stats().last_access == now
    now += 10
    assert handle.stats().last_access == now - 10
    assert handle.num_tokens == 3
    assert handle.stats().last_access == now - 10


def test_a_cache_counts_what_is_in_it(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 5, "b")
    loose = cache.block_allocator.allocate_blocks(3)
    stats = cache.stats()
    assert (stats.active_caches, stats.tokens_stored, stats.allocations, stats.failures) == (2, 11, 2, 0)
    assert (stats.total_blocks, stats.used_blocks, stats.loose_blocks, stats.free_blocks) == (16, 4, 3, 9)
    assert stats.used_blocks + stats.cached_blocks + stats.loose_blocks + stats.free_blocks == stats.total_blocks
    assert stats.total_bytes == 16 * cache.bytes_per_block
    assert stats.used_bytes == 4 * cache.bytes_per_block
    assert stats.storage_bytes == cache.storage.nbytes > 0
    assert (stats.hit_rate, stats.evictions, stats.cached_prefixes) == (0.0, 0, 0)
    cache.block_allocator.free_blocks(loose)
    one.free()
    two.free()
    assert (cache.stats().used_bytes, cache.stats().active_caches, cache.stats().tokens_stored) == (0, 0, 0)
    assert cache.stats().allocations == 2


def test_bytes_follow_from_the_geometry_unless_the_storage_packs_them(new_cache: NewCache) -> None:
    plain, packed = new_cache(PagedStorage), new_cache(Int8Storage)
    assert plain.bytes_per_block == 4 * 3 * 2 * (8 + 8) * 4  # tokens, layers, heads, dims of K and V, float32
    assert packed.bytes_per_block == 4 * 3 * 2 * (8 + 8 + 2 * 4)  # one scale for each of K and V
    assert plain.stats().total_bytes == 16 * plain.bytes_per_block


def test_counters_of_allocations_and_refusals(cache: KvCacheManager) -> None:
    filled(cache, 40)
    cache.allocate()
    for refused in (lambda: cache.allocate(num_tokens=32), lambda: filled(cache, 36)):
        with pytest.raises(CacheFullError):
            refused()
    stats = cache.stats()
    assert stats.failures == 2
    assert stats.allocations == 3  # two, and the empty handle that then found no room for 36 tokens


def test_numbers_that_were_handed_out_never_change(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    taken = [handle.stats(), cache.stats(), cache.gc()]
    copies = copy.deepcopy(taken)
    grow(handle, 6)
    handle.fork()
    handle.truncate(1)
    assert taken == copies
    for stats in taken:
        for field in dataclasses.fields(stats):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(stats, field.name, 0)


def test_numbers_cross_a_process_boundary(cache: KvCacheManager) -> None:
    for stats in (filled(cache, 6).stats(), cache.stats(), cache.gc()):
        assert pickle.loads(pickle.dumps(stats)) == stats


def test_utilization_counts_each_token_slot_once(cache: KvCacheManager) -> None:
    assert cache.stats().utilization == 0.0
    one = filled(cache, 6)
    assert cache.stats().utilization == 6 / 8
    two = one.fork()
    if cache.storage.placement == "paged":
        assert cache.stats().utilization == 6 / 8
        two.truncate(5)
        assert cache.stats().utilization == 6 / 8  # the last block holds six tokens of the first
        grow(one, 2)
        assert cache.stats().utilization == (8 + 1) / 12  # a copy of its own, and one row left in the other's
    one.free()
    two.free()
    cache.allocate(num_tokens=16)
    assert cache.stats().utilization == 0.0


def test_a_block_that_another_sequence_fills_is_no_waste(new_cache: NewCache) -> None:
    cache = new_cache(PagedStorage)
    one = filled(cache, 8)
    two = one.fork()
    two.truncate(5)
    assert cache.stats().utilization == 1.0
    assert two.stats().utilization == 5 / 8
