"""Several caches on several devices; two pools on the CPU stand for two devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache_core import (
    CacheFullError,
    CacheGeometry,
    ConfigError,
    HandleError,
    HandleState,
    KvCacheHandle,
    KvCacheManager,
    MultiDeviceManager,
    StepError,
    open_caches,
)
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.plugin import Storage
from tests.caches import STORAGES, StorageFailed, assert_holds, failing, filled, grow, make_spec, raising
from tests.storages.paged import PagedStorage


def manager(storage: type[Storage] = PagedStorage, **spec: Any) -> KvCacheManager:
    return KvCacheManager(storage(make_spec(**spec)), prefix=PrefixCacheConfig(namespace="m"))


@pytest.fixture(params=[(one, other) for one in STORAGES for other in STORAGES], ids=lambda pair: pair[1].__name__)
def caches(request: pytest.FixtureRequest) -> Iterator[MultiDeviceManager]:
    """16 blocks of 4 tokens on each of two devices, whose books are sound in the end."""
    one, other = request.param
    with MultiDeviceManager({"cpu:0": manager(one), "cpu:1": manager(other)}) as several:
        yield several
        assert several.audit() == ()


def stored(caches: MultiDeviceManager, tokens: int, device: str, name: str = "a", **request: Any) -> KvCacheHandle:
    return filled(caches.manager(device), tokens, name, **{"salt": name, **request})


def free_all(caches: MultiDeviceManager) -> None:
    for handle in caches.list_handles():
        caches.manager(caches.get_cache_device(handle)).deallocate(handle.request_id)


def test_new_sequences_go_where_they_are_preferred_and_else_where_there_is_room(caches: MultiDeviceManager) -> None:
    assert caches.supported_devices == ("cpu:0", "cpu:1")
    first = caches.allocate(num_tokens=40)
    assert caches.get_cache_device(first) == "cpu:0"
    second = caches.allocate(num_tokens=40)
    assert caches.get_cache_device(second) == "cpu:1"
    caches.set_device_preference(["cpu:1"])
    assert caches.supported_devices == ("cpu:1", "cpu:0")
    third = caches.allocate(num_tokens=4)
    assert caches.get_cache_device(third) == "cpu:1"
    with raising(CacheFullError, "no device has room for 44 tokens"):
        caches.allocate(num_tokens=44)
    assert caches.list_handles() == [second, third, first]
    free_all(caches)


def test_a_request_may_name_its_device(caches: MultiDeviceManager) -> None:
    handle = caches.allocate(num_tokens=4, device="cpu:1")
    assert caches.get_cache_device(handle) == "cpu:1"
    other = caches.allocate(num_tokens=4, device="cpu")
    assert caches.get_cache_device(other) == "cpu:0"
    with raising(ConfigError, "there is no cache on cuda:3"):
        caches.allocate(num_tokens=4, device="cuda:3")
    hog = filled(caches.manager("cpu:0"), 40, "b")
    with pytest.raises(CacheFullError):
        caches.allocate(num_tokens=40, device="cpu:0")
    hog.free()
    handle.free()
    other.free()
    free_all(caches)


def test_a_request_id_names_one_sequence_on_all_devices(caches: MultiDeviceManager) -> None:
    handle = caches.allocate(request_id="chat")
    caches.set_device_preference(["cpu:1"])
    with raising(HandleError, "'chat' belongs to a live sequence", reason="in-use"):
        caches.allocate(request_id="chat")
    assert caches.get_handle("chat") is handle
    assert caches.get_handle("nobody") is None
    handle.free()


@pytest.mark.parametrize("tokens", [0, 1, 4, 7, 16])
def test_a_moved_sequence_is_what_it_was_and_its_old_handles_are_invalid(
    caches: MultiDeviceManager, tokens: int
) -> None:
    handle = stored(caches, tokens, "cpu:0", request_id="chat", priority=3, max_sequence_length=20)
    clone = handle.clone_handle()
    moved = caches.move_cache(handle, "cpu:1")
    assert caches.get_cache_device(moved) == "cpu:1"
    assert_holds(moved, a=tokens)
    assert (moved.request_id, moved.max_tokens, moved.sequence.priority) == ("chat", 20, 3)
    assert moved.cache_id != handle.cache_id
    assert not handle.is_valid
    assert not clone.is_valid
    assert caches.device_stats()["cpu:0"].active_caches == 0
    grow(moved, 2, "b")
    assert_holds(moved, a=tokens, b=tokens + 2)
    back = caches.move_cache(moved, "cpu:0")
    assert_holds(back, a=tokens, b=tokens + 2)
    back.free()


def test_a_sequence_that_is_there_already_stays(caches: MultiDeviceManager) -> None:
    handle = stored(caches, 6, "cpu:0")
    assert caches.move_cache(handle, "cpu:0") is handle
    handle.free()
    with pytest.raises(HandleError):
        caches.move_cache(handle, "cpu:0")


def test_token_ids_and_their_key_move_along(caches: MultiDeviceManager) -> None:
    ids = list(range(50, 60))
    handle = caches.allocate(token_ids=ids, salt="tenant")
    grow(handle, 10, "a", ids)
    grow(handle, 3)
    moved = caches.move_cache(handle, "cpu:1")
    assert moved.token_ids == tuple(ids)
    assert moved.num_tokens == 13
    there = caches.manager("cpu:1")
    assert there.explain(token_ids=ids, salt="tenant").num_tokens == 8
    assert there.explain(token_ids=ids).num_tokens == 0
    moved.free()


def test_what_is_cached_on_the_new_device_is_not_copied() -> None:
    with MultiDeviceManager({"cpu:0": manager(), "cpu:1": manager()}) as caches:
        ids = list(range(50, 60))
        there = caches.allocate(token_ids=ids, device="cpu:1")
        grow(there, 10, "a", ids)
        handle = caches.allocate(token_ids=ids)
        grow(handle, 10, "a", ids)
        moved = caches.move_cache(handle, "cpu:1")
        assert moved.block_table.physical_blocks[:2] == there.block_table.physical_blocks[:2]
        assert_holds(moved, a=10)
        moved.free()
        there.free()


def test_without_room_nothing_moves(caches: MultiDeviceManager) -> None:
    handle = stored(caches, 16, "cpu:0")
    hog, rest = filled(caches.manager("cpu:1"), 44, "b"), caches.manager("cpu:1").allocate(num_tokens=8)
    with pytest.raises(CacheFullError):
        caches.move_cache(handle, "cpu:1")
    assert_holds(handle, a=16)
    hog.free()
    rest.free()
    handle.free()
    free_all(caches)


@pytest.mark.parametrize("method", ["write", "reserve"])
def test_a_copy_that_fails_leaves_the_sequence_where_it_is(caches: MultiDeviceManager, method: str) -> None:
    handle = stored(caches, 10, "cpu:0")
    with failing(caches.manager("cpu:1").storage, method), pytest.raises(StorageFailed):
        caches.move_cache(handle, "cpu:1")
    assert_holds(handle, a=10)
    assert caches.device_stats()["cpu:1"].active_caches == 0
    moved = caches.move_cache(handle, "cpu:1")
    assert_holds(moved, a=10)
    moved.free()


def test_a_name_that_is_taken_on_the_new_device_is_an_error_that_changes_nothing(caches: MultiDeviceManager) -> None:
    handle = stored(caches, 6, "cpu:0", request_id="chat")
    other = caches.manager("cpu:1").allocate(request_id="chat")
    with pytest.raises(HandleError):
        caches.move_cache(handle, "cpu:1")
    assert_holds(handle, a=6)
    other.free()
    handle.free()


def test_a_sequence_in_an_open_step_cannot_move_nor_one_of_another_cache(caches: MultiDeviceManager) -> None:
    handle = stored(caches, 6, "cpu:0")
    step = handle.manager.begin({handle: 1})
    with pytest.raises(StepError):
        caches.move_cache(handle, "cpu:1")
    step.abort()
    with manager() as other, other.allocate() as foreign, pytest.raises(HandleError) as caught:
        caches.move_cache(foreign, "cpu:1")
    assert caught.value.reason == "foreign"
    handle.free()


def test_nobody_changes_a_sequence_while_it_moves() -> None:
    """A thread that appends, forks and truncates is refused or comes before or after; no token is lost."""
    with MultiDeviceManager({"cpu:0": manager(num_blocks=64), "cpu:1": manager(num_blocks=64)}) as caches:
        for _ in range(30):
            handle = stored(caches, 10, "cpu:0")
            grown: list[int] = []

            def append(handle: KvCacheHandle = handle, grown: list[int] = grown) -> None:
                try:
                    grow(handle, 1)
                    grown.append(1)
                except (StepError, HandleError):
                    pass

            thread = threading.Thread(target=append)
            thread.start()
            try:
                moved = caches.move_cache(handle, "cpu:1")
            except (StepError, HandleError):
                moved = handle
            thread.join()
            assert_holds(moved, a=10 + len(grown))
            moved.free()
            assert caches.audit() == ()


def test_rebalancing_evens_the_devices_out_and_says_what_moved(caches: MultiDeviceManager) -> None:
    handles = [stored(caches, 12, "cpu:0", f"s{number}") for number in range(4)]
    busy = stored(caches, 12, "cpu:0", "busy")
    step = busy.manager.begin({busy: 0})
    moves = caches.rebalance_devices()
    step.abort()
    assert len(moves) == 2
    for old, new in moves.items():
        assert old in handles
        assert not old.is_valid
        assert caches.get_cache_device(new) == "cpu:1"
        assert new.num_tokens == 12
    stats = caches.device_stats()
    assert (stats["cpu:0"].used_blocks, stats["cpu:1"].used_blocks) == (9, 6)
    assert caches.rebalance_devices() == {}
    free_all(caches)


def test_rebalancing_leaves_a_single_large_sequence_and_forks_that_free_nothing_alone() -> None:
    with MultiDeviceManager({"cpu:0": manager(), "cpu:1": manager()}) as caches:
        large = stored(caches, 40, "cpu:0")
        fork = large.fork()
        assert caches.rebalance_devices() == {}
        fork.free()
        assert len(caches.rebalance_devices()) == 0
        large.free()


def test_a_swapped_sequence_stays_until_it_is_back() -> None:
    cuda = pytest.importorskip("kvcache_cuda.storage")
    options = pytest.importorskip("kvcache_cuda.options").CudaOptions(device="cpu", swap_blocks=4)
    one = KvCacheManager(cuda.CudaStorage(make_spec(options=options)))
    with MultiDeviceManager({"cpu:0": one, "cpu:1": KvCacheManager(PagedStorage(make_spec()))}) as caches:
        handle = stored(caches, 10, "cpu:0")
        one.swap_out(handle)
        with pytest.raises(HandleError) as caught:
            caches.move_cache(handle, "cpu:1")
        assert caught.value.reason == "swapped"
        assert caches.rebalance_devices() == {}
        one.swap_in(handle)
        moved = caches.move_cache(handle, "cpu:1")
        assert_holds(moved, a=10)
        assert handle.state is HandleState.FREED
        moved.free()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"geometry": CacheGeometry.uniform(2, 2, 8)}, "geometry"), ({"block_size": 8}, "block_size")],
)
def test_caches_that_hold_different_things_are_refused(changes: dict[str, Any], what: str) -> None:
    with manager() as one, manager(**changes) as other, raising(ConfigError, f"must have the same {what}"):
        MultiDeviceManager({"cpu:0": one, "cpu:1": other})
    with raising(ConfigError, "one cache at least"):
        MultiDeviceManager({})


def test_preferences_that_make_no_sense_are_refused(caches: MultiDeviceManager) -> None:
    with raising(ConfigError, "there is no cache on cuda:0"):
        caches.set_device_preference(["cuda:0"])
    with raising(ConfigError, "can be preferred once"):
        caches.set_device_preference(["cpu:1", "cpu:1"])
    assert caches.supported_devices == ("cpu:0", "cpu:1")


def test_open_caches_opens_one_for_each_device_and_closes_them_all() -> None:
    pytest.importorskip("kvcache_cpu")
    geometry = CacheGeometry.uniform(2, 2, 8)
    with open_caches(devices=["cpu"], backend="cpu", geometry=geometry, budget="8 blocks") as caches:
        assert caches.supported_devices == ("cpu",)
        handle = caches.allocate(token_ids=range(10))
        handle.append([(torch.ones(10, 2, 8), torch.zeros(10, 2, 8))] * 2, range(10))
        own = caches.manager("cpu")
        handle.free()
    assert own.closed
    with raising(ConfigError, "each device can have one cache"):
        open_caches(devices=["cpu", "cpu"], backend="cpu", geometry=geometry)
    with pytest.raises(ConfigError):
        open_caches(devices=[], backend="cpu", geometry=geometry)
