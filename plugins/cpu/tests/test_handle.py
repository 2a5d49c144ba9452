from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvcache_core import CacheGeometry, HandleError, KvCacheHandle, KvCacheManager, open_cache
from kvcache_cpu.handle import CpuKvCacheHandle
from kvcache_cpu.storage import CpuStorage

GEOMETRY = CacheGeometry.uniform(3, 2, 64, dtype="float32")


@pytest.fixture
def cache(kind: str) -> Iterator[KvCacheManager]:
    with open_cache(backend="cpu", geometry=GEOMETRY, budget="16MiB", options={"memory": kind}) as cache:
        yield cache


def append(handle: KvCacheHandle, num_tokens: int) -> None:
    handle.append([(torch.randn(num_tokens, 2, 64), torch.randn(num_tokens, 2, 64)) for _ in range(3)])


def test_a_configuration_opens_this_backend_with_its_own_handle_type(cache: KvCacheManager, kind: str) -> None:
    assert isinstance(cache.storage, CpuStorage)
    assert cache.storage.memory_kind == kind
    with cache.allocate(num_tokens=4) as handle:
        assert type(handle) is CpuKvCacheHandle
        assert handle.unwrap(CpuKvCacheHandle) is handle
        assert handle.dense_is_view
        assert handle.device == torch.device("cpu")


def test_a_handle_tells_what_its_memory_is_like(cache: KvCacheManager, kind: str) -> None:
    with cache.allocate() as handle:
        append(handle, 100)
        with handle.fork() as fork:
            memory = fork.unwrap(CpuKvCacheHandle).memory
            assert memory.kind == kind
            assert memory.reserved_bytes >= 100 * GEOMETRY.bytes_per_token("float32")
            if kind == "mapped":
                assert (memory.shared_tokens, memory.own_bytes) == (100, 0)
            else:
                assert memory.shared_tokens == 0
                assert memory.own_bytes == memory.reserved_bytes
            append(fork, 10)
            assert fork.unwrap(CpuKvCacheHandle).memory.own_bytes > 0
        fork_memory = fork.unwrap(CpuKvCacheHandle)
        with pytest.raises(HandleError):
            _ = fork_memory.memory


def test_views_of_a_freed_handle_stay_readable_and_hold_its_memory(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    append(handle, 40)
    key, value = handle.kv_cache(1)  # type: ignore[misc]
    kept = key.clone(), value.clone()
    handle.free()
    with cache.allocate() as other:
        append(other, 40)
        assert torch.equal(key, kept[0])
        assert torch.equal(value, kept[1])
    del key, value
    assert cache.storage.nbytes == 0


def test_a_step_that_is_kept_does_not_hold_a_freed_handles_memory(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    steps = []
    for _ in range(2):
        with cache.step({handle: 20}) as step:
            for layer in range(3):
                step.write(layer, torch.randn(20, 2, 64), torch.randn(20, 2, 64))
                step.attend(layer, torch.randn(20, 4, 64))
        steps.append(step)
    handle.free()
    assert cache.storage.nbytes == 0


def test_speculation_keeps_what_was_accepted_and_gives_the_rest_back(cache: KvCacheManager) -> None:
    with cache.allocate() as handle:
        append(handle, 10)
        rows = [(torch.randn(50, 2, 64), torch.randn(50, 2, 64)) for _ in range(3)]
        with cache.step({handle: 50}) as step:
            for layer, (key, value) in enumerate(rows):
                step.write(layer, key, value)
            step.accept(handle, 3)
        assert handle.num_tokens == 13
        assert torch.equal(handle.key_cache(2)[10:], rows[2][0][:3])  # type: ignore[index]
        assert cache.audit() == ()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_LMCache_LMCache_1858_threads_that_free_and_drop_handles_leave_the_books_whole(cache: KvCacheManager) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for round_ in range(25):
                handle = cache.allocate()
                append(handle, 20)
                kept = handle.kv_cache(0)[0].clone()  # type: ignore[index]
                fork = handle.fork()
                handle.truncate(5)
                append(handle, 7)
                append(fork, 3)
                assert torch.equal(fork.kv_cache(0)[0][:20], kept)  # type: ignore[index]
                if round_ % 2:
                    handle.free()
                    fork.free()
                # else both are dropped, for a finalizer to give back
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.gc()
    assert cache.audit() == ()
    assert cache.stats().active_caches == 0
    assert cache.storage.nbytes == 0
