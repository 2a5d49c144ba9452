"""The protocol of a backend: what it must bring, what it gets for free, and when core calls it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheManager, ShapeError
from kvcache_core.plugin import CAPABILITIES, Batch, BlockCopy, BlockRows, DeviceMemory, Storage
from tests.caches import MIXED, STORAGES, NewCache, assert_holds, filled, grow, make_spec
from tests.storages.paged import PagedStorage


def test_a_storage_brings_these_methods() -> None:
    required = {"device_memory", "open", "fork", "reserve", "truncate", "close", "write", "attend", "gather"}
    assert Storage.__abstractmethods__ == required | {"nbytes", "shutdown"}
    with pytest.raises(TypeError, match="abstract"):
        Storage()  # type: ignore[abstract]


def test_the_capabilities_are_a_closed_list() -> None:
    assert {"swap", "compress", "move", "window_frees", "unequal_head_dims", "graph_capture"} == CAPABILITIES


@pytest.mark.parametrize("storage", STORAGES)
def test_a_storage_gets_defaults_for_the_rest(storage: type[Storage]) -> None:
    made = storage(make_spec())  # type: ignore[call-arg]
    assert Storage.shared_tokens(made, None, 7) == 7
    assert made.plan(Batch([], 4, torch.device("cpu"))) is None
    assert tuple(made.audit()) == ()
    assert Storage.scrub(made, [BlockRows(1, 0, 4)]) is None  # type: ignore[func-returns-value]
    assert made.device_memory("cpu", None) == DeviceMemory(total=1 << 30, free=1 << 29)
    assert made.prefers_attend(1) is not made.dense_is_view
    assert made.bytes_per_block == 4 * made.bytes_per_token(made.spec.geometry, "float32", None)


def test_plain_bytes_follow_from_geometry_and_dtype() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)):
        assert Storage.bytes_per_token(CacheGeometry.uniform(3, 2, 8), dtype, None) == 3 * 2 * 16 * size
        assert Storage.bytes_per_token(MIXED, dtype, None) == (2 * 2 * 16 + 10) * size


def test_a_spec_cannot_be_changed() -> None:
    for field in dataclasses.fields(make_spec()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(make_spec(), field.name, None)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "16", None])
@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_sequence_length"])
def test_vllm_43496_block_size_zero_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=rf"^{name} must be an int of at least 1 .*, not {value!r}$"):
        make_spec(**{name: value})


# -- when core calls what ------------------------------------------------------------------------------------


class WatchedStorage(PagedStorage):
    """A storage that writes down what core asks of it, and whether the cache's lock was held."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[tuple[str, Any]] = []
        self.cache: KvCacheManager | None = None
        self.wrong: list[str] = []

    def _note(self, name: str, told: Any, *, locked: bool) -> None:
        self.calls.append((name, told))
        if self.cache is not None and self.cache.store._guard._lock.locked() is not locked:
            self.wrong.append(name)

    def told(self, name: str) -> list[Any]:
        found = [told for called, told in self.calls if called == name]
        self.calls.clear()
        return found

    def open(self, max_tokens: int) -> None:
        self._note("open", max_tokens, locked=True)

    def fork(self, slot: None, num_tokens: int) -> None:
        self._note("fork", num_tokens, locked=True)

    def shared_tokens(self, slot: None, num_tokens: int) -> int:
        self._note("shared_tokens", num_tokens, locked=True)
        return num_tokens

    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        self._note("reserve", (list(blocks), start, stop, list(copies)), locked=True)
        super().reserve(slot, blocks, start, stop, copies)

    def truncate(self, slot: None, num_tokens: int) -> None:
        self._note("truncate", num_tokens, locked=True)

    def close(self, slot: None) -> None:
        self._note("close", None, locked=True)

    def scrub(self, rows: Iterable[BlockRows]) -> None:
        rows = list(rows)
        self._note("scrub", rows, locked=True)
        super().scrub(rows)

    def shutdown(self) -> None:
        self._note("shutdown", None, locked=True)

    def plan(self, batch: Batch) -> str:
        self._note("plan", batch, locked=False)
        return "the plan"

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._note("write", (batch, layer, key, value), locked=False)
        super().write(batch, layer, key, value)

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        self._note("attend", (batch, layer, scale, window), locked=False)
        return super().attend(batch, layer, query, scale, window)

    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Any:
        self._note("gather", (list(blocks), num_tokens, layer), locked=False)
        return super().gather(slot, blocks, num_tokens, layer)


@pytest.fixture
def cache(new_cache: NewCache) -> KvCacheManager:
    made = new_cache(WatchedStorage)
    made.storage.cache = made  # type: ignore[attr-defined]
    return made


def watched(cache: KvCacheManager) -> WatchedStorage:
    assert isinstance(cache.storage, WatchedStorage)
    return cache.storage


def test_core_calls_bookkeeping_under_its_lock_and_data_without(new_cache: NewCache) -> None:
    cache = new_cache(WatchedStorage, scrub=True)
    storage = watched(cache)
    storage.cache = cache
    handle = filled(cache, 6)
    fork = handle.fork()
    grow(fork, 3)
    with cache.step({handle: 2}) as step:
        for layer in range(3):
            key, value = fork.kv_cache(layer)  # type: ignore[misc]
            step.write(layer, key[:2], value[:2])
            step.attend(layer, key[:2])
        step.accept(handle, 1)
    fork.truncate(2)
    fork.free()
    cache.close()
    assert storage.wrong == []
    names = {name for name, _ in storage.calls}
    assert names == {
        *("open", "fork", "shared_tokens", "reserve", "truncate", "close", "scrub", "shutdown"),
        *("plan", "write", "attend", "gather"),
    }


def test_reserve_is_told_blocks_positions_and_copies(cache: KvCacheManager) -> None:
    storage = watched(cache)
    handle = filled(cache, 6)
    assert storage.told("reserve") == [([1, 2], 0, 6, [])]
    fork = handle.fork()
    grow(handle, 3, "b")
    assert storage.told("reserve") == [([1, 4, 3], 6, 9, [BlockCopy(source=2, target=4, rows=2)])]
    grow(fork, 1, "c")
    grow(fork, 1, "c")
    assert storage.told("reserve") == []  # the block is the fork's own now, and its memory was reserved as a whole
    grow(fork, 1, "c")
    assert storage.told("reserve") == [([1, 2, 5], 8, 9, [])]
    assert_holds(handle, a=6, b=9)
    assert_holds(fork, a=6, c=9)


def test_a_full_shared_block_is_not_copied(cache: KvCacheManager) -> None:
    handle = filled(cache, 8)
    fork = handle.fork()
    watched(cache).calls.clear()
    grow(fork, 1, "b")
    [(blocks, _, _, copies)] = watched(cache).told("reserve")
    assert (blocks, copies) == ([1, 2, 3], [])
    assert_holds(handle, a=8)


def test_a_step_without_new_tokens_copies_nothing(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    handle.fork()
    watched(cache).calls.clear()
    cache.begin({handle: 0}).commit()
    assert watched(cache).told("reserve") == [([1, 2], 6, 6, [])]
    assert handle.block_table.physical_blocks == (1, 2)


def test_all_layers_of_a_step_get_one_batch_with_its_plan(cache: KvCacheManager) -> None:
    storage = watched(cache)
    filled(cache, 3)
    batches = {id(batch) for batch, _, _, _ in storage.told("write")}
    assert len(batches) == 1
    step = cache.begin({cache.allocate(): 2})
    [batch] = storage.told("plan")
    assert batch.plan == "the plan"
    assert [(segment.start, segment.stop, segment.row) for segment in batch.segments] == [(0, 2, 0)]
    step.abort()


def test_attention_of_a_shared_layer_asks_for_the_producers(new_cache: NewCache) -> None:
    cache = new_cache(WatchedStorage, geometry=MIXED)
    with cache.step({cache.allocate(): 2}) as step:
        for layer in (0, 2, 3):
            spec = cache.own_spec(layer)
            key = torch.randn(2, spec.num_kv_heads, spec.head_dim)
            step.write(layer, key, torch.randn(2, spec.num_kv_heads, spec.value_head_dim))
        step.attend(4, torch.randn(2, 2, 8))
        step.attend(3, torch.randn(2, 1, 4), scale=2.0)
    asked = [told[1:] for told in watched(cache).told("attend")]
    assert asked == [(2, 8**-0.5, None), (3, 2.0, 3)]


def test_the_storage_gets_tensors_that_fit_exactly(cache: KvCacheManager) -> None:
    cache.allow_dtype_cast = True
    handle = cache.allocate()
    handle.append([(torch.ones(2, 2, 8, dtype=torch.float64), torch.ones(2, 2, 8, dtype=torch.float16))] * 3)
    for _, _, key, value in watched(cache).told("write"):
        assert key.dtype is value.dtype is torch.float32
        assert key.shape == value.shape == (2, 2, 8)


def test_scrub_is_asked_for_only_where_the_cache_is_told_to(cache: KvCacheManager, new_cache: NewCache) -> None:
    def use(cache: KvCacheManager) -> list[Any]:
        handle = filled(cache, 14)
        watched(cache).calls.clear()
        handle.truncate(6)
        return watched(cache).told("scrub")

    assert use(cache) == []
    assert use(new_cache(WatchedStorage, scrub=True)) == [
        [BlockRows(3, 0, 4), BlockRows(4, 0, 4)],
        [BlockRows(2, 2, 4)],
    ]


def test_core_works_while_another_thread_is_inside_a_write(cache: KvCacheManager) -> None:
    """Kernels are slow: a write must not keep the others from opening and freeing sequences."""
    storage = watched(cache)
    storage.cache = None
    inside, go_on = threading.Event(), threading.Event()
    write = storage.write

    def slow(*arguments: Any) -> None:
        inside.set()
        assert go_on.wait(10)
        write(*arguments)

    storage.write = slow  # type: ignore[method-assign]
    handle = cache.allocate()
    thread = threading.Thread(target=grow, args=(handle, 5))
    thread.start()
    try:
        assert inside.wait(10)
        other = cache.allocate(num_tokens=9)
        assert (cache.stats().active_caches, cache.stats().used_blocks, cache.audit()) == (2, 5, ())
        other.free()
    finally:
        go_on.set()
        thread.join()
    assert_holds(handle, a=5)
