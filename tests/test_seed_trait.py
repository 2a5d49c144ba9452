"""Every row of the handle interface this project set out to provide, over a paged and a contiguous storage."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch

from kvcache_core import (
    AllocationRequest,
    BlockTable,
    CacheConfig,
    CacheFullError,
    CacheGcStats,
    CacheHandleStats,
    CacheManagerStats,
    HandleError,
    KvCacheHandle,
    KvCacheManager,
    MemoryPressure,
    MultiDeviceManager,
    MutableBlockTable,
    ShapeError,
    UnsupportedError,
)
from kvcache_core.plugin import Storage
from tests.caches import STORAGES, NewCache, assert_holds, filled, grow, raising, rows


@pytest.fixture
def handle(cache: KvCacheManager) -> KvCacheHandle:
    """Six tokens in two blocks of four."""
    return filled(cache, 6, request_id="chat")


# -- the handle ----------------------------------------------------------------------------------------------


def test_block_table(handle: KvCacheHandle) -> None:
    table = handle.block_table
    assert type(table) is BlockTable
    assert (table.num_blocks, table.sequence_length, table.block_size) == (2, 6, 4)


def test_block_table_mut(handle: KvCacheHandle) -> None:
    with handle.block_table_mut() as table:
        assert isinstance(table, MutableBlockTable)
        table.extend_sequence(7)
    assert handle.block_table.num_blocks == 4
    grow(handle, 7)
    assert_holds(handle, a=13)


def test_as_any(handle: KvCacheHandle) -> None:
    assert handle.as_any() is handle
    assert handle.unwrap(handle.manager.storage.handle_type) is handle


def test_device(handle: KvCacheHandle) -> None:
    assert handle.device == torch.device("cpu") == handle.key_cache(0).device  # type: ignore[union-attr]


def test_num_layers(handle: KvCacheHandle) -> None:
    assert handle.num_layers == 3


def test_num_heads(handle: KvCacheHandle) -> None:
    assert handle.num_heads == handle.num_kv_heads == 2 == handle.key_cache(0).shape[1]  # type: ignore[union-attr]


def test_head_dim(handle: KvCacheHandle) -> None:
    assert handle.head_dim == 8 == handle.key_cache(0).shape[2]  # type: ignore[union-attr]


def test_key_cache(handle: KvCacheHandle) -> None:
    for layer in range(3):
        wanted, _ = rows(handle.manager, layer, 0, 6)
        torch.testing.assert_close(handle.key_cache(layer), wanted, rtol=0, atol=1e-5)


def test_value_cache(handle: KvCacheHandle) -> None:
    for layer in range(3):
        _, wanted = rows(handle.manager, layer, 0, 6)
        torch.testing.assert_close(handle.value_cache(layer), wanted, rtol=0, atol=1e-5)


def test_kv_cache(handle: KvCacheHandle) -> None:
    key, value = handle.kv_cache(1)  # type: ignore[misc]
    assert torch.equal(key, handle.key_cache(1))  # type: ignore[arg-type]
    assert torch.equal(value, handle.value_cache(1))  # type: ignore[arg-type]


def test_clone_handle(handle: KvCacheHandle) -> None:
    clone = handle.clone_handle()
    assert clone is not handle
    assert clone.cache_id == handle.cache_id
    grow(clone, 1)
    assert_holds(handle, a=7)
    handle.free()
    assert_holds(clone, a=7)


def test_stats(handle: KvCacheHandle) -> None:
    before = time.time()
    handle.key_cache(0)
    stats = handle.stats()
    assert isinstance(stats, CacheHandleStats)
    assert stats.memory_bytes == 2 * handle.manager.bytes_per_block
    assert (stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (2, 6, 0.75)
    assert before <= stats.last_access <= time.time()


def test_is_valid(handle: KvCacheHandle) -> None:
    assert handle.is_valid
    handle.free()
    assert not handle.is_valid


def test_cache_id(handle: KvCacheHandle) -> None:
    assert isinstance(handle.cache_id, str)
    assert handle.cache_id
    assert handle.cache_id != handle.fork().cache_id


def test_num_tokens(handle: KvCacheHandle) -> None:
    assert handle.num_tokens == 6
    handle.truncate(2)
    assert handle.num_tokens == 2


def test_a_handle_may_be_used_from_any_thread_and_shown_in_a_debugger(handle: KvCacheHandle) -> None:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend([handle.num_tokens, repr(handle)]))
    thread.start()
    thread.join()
    assert seen == [6, f"<{type(handle).__name__} 'chat' ({handle.cache_id}): 6 tokens in 2 blocks>"]


# -- the block table -----------------------------------------------------------------------------------------


def test_block_table_members(handle: KvCacheHandle) -> None:
    grow(filled(handle.manager, 3, "b"), 3, "b")
    grow(handle, 5)
    table = handle.block_table
    assert table.physical_blocks == (1, 2, 5)
    assert table.logical_to_physical == {0: 1, 1: 2, 2: 5}
    assert (table.sequence_length, table.block_size, table.num_blocks) == (11, 4, 3)
    assert table.blocks_needed_for_length(13) == 4
    assert (table.free_tokens, table.has_free_space(1), table.has_free_space(2)) == (1, True, False)


def test_add_blocks_and_extend_sequence(handle: KvCacheHandle) -> None:
    with handle.block_table_mut() as table:
        table.add_blocks(1)
        table.add_blocks(handle.manager.block_allocator.allocate_blocks(1))
        table.extend_sequence(11)
    assert (handle.block_table.num_blocks, handle.num_tokens) == (5, 6)


def test_extend_sequence_is_an_error_when_blocks_are_short(handle: KvCacheHandle) -> None:
    filled(handle.manager, 44, "b")
    with raising(CacheFullError, "4 blocks were asked for and 3 of 16 are free"), handle.block_table_mut() as table:
        table.extend_sequence(18)
    assert handle.block_table.num_blocks == 2


# -- requests ------------------------------------------------------------------------------------------------


def test_allocation_request(cache: KvCacheManager) -> None:
    request = AllocationRequest(
        request_id="chat",
        token_ids=range(6),
        max_sequence_length=20,
        priority=2,
        num_layers=3,
        num_heads=2,
        head_dim=8,
        device="cpu",
        dtype="float32",
    )
    assert request.initial_tokens == 6
    assert request.estimated_memory_bytes() == 6 * 3 * 2 * 16 * 4
    handle = cache.allocate(request)
    assert (handle.request_id, handle.max_tokens, handle.block_table.num_blocks) == ("chat", 20, 2)
    for field, wrong in {"num_layers": 4, "num_heads": 3, "head_dim": 4, "device": "cuda:0", "dtype": "int8"}.items():
        with raising(ShapeError, field):
            cache.allocate(dataclasses.replace(request, request_id=None, **{field: wrong}))


# -- the manager ---------------------------------------------------------------------------------------------


def test_allocate_and_deallocate(cache: KvCacheManager) -> None:
    handle = cache.allocate(request_id="chat", num_tokens=5)
    cache.deallocate("chat")
    assert not handle.is_valid
    assert cache.stats().free_blocks == 16


def test_extend(handle: KvCacheHandle) -> None:
    handle.manager.extend("chat", 10)
    assert (handle.block_table.num_blocks, handle.num_tokens) == (4, 6)


def test_can_allocate(handle: KvCacheHandle) -> None:
    cache = handle.manager
    assert cache.can_allocate(num_tokens=48)
    filled(cache, 40, "b")
    assert cache.can_allocate(num_tokens=16)
    assert not cache.can_allocate(num_tokens=17)


def test_get_handle_and_list_handles(handle: KvCacheHandle) -> None:
    other = handle.manager.allocate(request_id="other")
    assert handle.manager.get_handle("chat") is handle
    assert handle.manager.get_handle("nobody") is None
    assert handle.manager.list_handles() == [handle, other]


def test_manager_stats(handle: KvCacheHandle) -> None:
    stats = handle.manager.stats()
    assert isinstance(stats, CacheManagerStats)
    assert (stats.total_blocks, stats.used_blocks, stats.free_blocks) == (16, 2, 14)
    assert stats.used_bytes * 8 == stats.total_bytes == 16 * handle.manager.bytes_per_block
    assert (stats.active_caches, stats.allocations, stats.failures) == (1, 1, 0)
    assert (stats.hit_rate, stats.evictions, stats.pressure) == (0.0, 0, MemoryPressure.LOW)


@pytest.mark.parametrize("storage", STORAGES)
def test_gc(new_cache: NewCache, storage: type[Storage]) -> None:
    cache = new_cache(storage, manager=KvCacheManager)
    assert cache.gc() == CacheGcStats(freed_bytes=0, freed_caches=0)
    handles = [filled(cache, 6)]
    with pytest.warns(ResourceWarning, match="was dropped without free"):
        handles.clear()
    assert cache.gc() == CacheGcStats(freed_bytes=2 * cache.bytes_per_block, freed_caches=1)


def test_set_pressure_callback(handle: KvCacheHandle) -> None:
    levels: list[MemoryPressure] = []
    handle.manager.set_pressure_callback(levels.append)
    hog = filled(handle.manager, 48, "b")
    hog.free()
    assert levels == [MemoryPressure.HIGH, MemoryPressure.LOW]
    assert [level.name for level in MemoryPressure] == ["LOW", "MEDIUM", "HIGH", "CRITICAL"]


# -- several devices -----------------------------------------------------------------------------------------


@pytest.fixture
def devices(new_cache: NewCache) -> MultiDeviceManager:
    """16 blocks of 4 tokens on each of two pools of the CPU, which stand for two devices."""
    return MultiDeviceManager({f"cpu:{number}": new_cache(STORAGES[0]) for number in range(2)})


def test_supported_devices_and_set_device_preference(devices: MultiDeviceManager) -> None:
    assert devices.supported_devices == ("cpu:0", "cpu:1")
    devices.set_device_preference(["cpu:1"])
    assert devices.get_cache_device(devices.allocate()) == "cpu:1"


def test_move_cache_and_get_cache_device(devices: MultiDeviceManager) -> None:
    handle = filled(devices.manager("cpu:0"), 6)
    assert devices.get_cache_device(handle) == "cpu:0"
    moved = devices.move_cache(handle, "cpu:1")
    assert devices.get_cache_device(moved) == "cpu:1"
    assert_holds(moved, a=6)
    assert not handle.is_valid


def test_rebalance_devices_and_device_stats(devices: MultiDeviceManager) -> None:
    for _ in range(4):
        filled(devices.manager("cpu:0"), 6)
    assert [stats.used_blocks for stats in devices.device_stats().values()] == [8, 0]
    assert len(devices.rebalance_devices()) == 2
    assert [stats.used_blocks for stats in devices.device_stats().values()] == [4, 4]


def test_defragment_refuses_since_there_is_nothing_to_compact(cache: KvCacheManager) -> None:
    with raising(UnsupportedError, "block memory cannot fragment"):
        cache.block_allocator.defragment()


# -- the configuration ---------------------------------------------------------------------------------------


def test_cache_config() -> None:
    config = CacheConfig()
    assert (str(config.budget), config.initial_blocks) == ("1000 blocks", 100)
    assert (config.block_size, config.device) == ("auto", "auto")
    assert (config.pressure.medium, config.pressure.high, config.pressure.critical) == (0.6, 0.8, 0.95)
    chosen = CacheConfig(block_size=32, budget="500 blocks", initial_blocks=10, device="cpu")
    assert (str(chosen.budget), chosen.initial_blocks) == ("500 blocks", 10)
    assert (chosen.block_size, chosen.device) == (32, "cpu")


# -- faults of the original that are not inherited -----------------------------------------------------------


def test_one_length_is_owned_by_the_sequence_and_is_the_same_everywhere(handle: KvCacheHandle) -> None:
    clone = handle.clone_handle()
    grow(clone, 3)
    lengths = {handle.num_tokens, clone.num_tokens, handle.block_table.sequence_length, handle.stats().tokens_stored}
    assert lengths | {tensor.shape[0] for layer in range(3) for tensor in handle.kv_cache(layer)} == {9}  # type: ignore[union-attr]


def test_logical_to_physical_is_not_its_own_index(handle: KvCacheHandle) -> None:
    filled(handle.manager, 4, "b")
    grow(handle, 5)
    assert handle.block_table.logical_to_physical[2] != 2


def test_a_table_is_a_snapshot_not_a_view_from_under_the_lock(handle: KvCacheHandle) -> None:
    table = handle.block_table
    grow(handle, 9)
    assert (table.num_blocks, table.sequence_length) == (2, 6)


def test_freeing_a_fork_or_clone_does_not_free_the_others_blocks(handle: KvCacheHandle) -> None:
    handle.clone_handle().free()
    handle.fork().free()
    filled(handle.manager, 40, "b")
    assert_holds(handle, a=6)
    assert handle.manager.audit() == ()


def test_copy_on_write_moves_the_data(handle: KvCacheHandle) -> None:
    fork = handle.fork()
    grow(fork, 1, "b")
    grow(handle, 1, "c")
    assert_holds(fork, a=6, b=7)
    assert_holds(handle, a=6, c=7)


def test_an_ended_handle_says_why_instead_of_answering(handle: KvCacheHandle) -> None:
    handle.free()
    with raising(HandleError, "'chat' was freed", reason="freed"):
        handle.key_cache(0)
