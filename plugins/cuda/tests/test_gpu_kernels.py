"""The GPU kernels are given the right arguments; stand-ins that follow their documented contracts compute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.paged import AttentionKernel, ReferenceKernel, StaticDecode
from kvcache_cuda.storage import CudaStorage
from kvcache_cuda.varlen import VarlenKernel
from plugins.cuda.tests import kernel_contracts
from plugins.cuda.tests.caches import spec_of


class Event:
    """An event that the device has reached, or has not."""

    reached = True

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return Event.reached


def varlen(storage: CudaStorage, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", kernel_contracts.varlen_attn)
    return VarlenKernel(storage.pool, storage.upload)


def flashinfer(storage: CudaStorage, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    stand_in: Any = ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = kernel_contracts.BatchDecodeWithPagedKVCacheWrapper
    stand_in.BatchPrefillWithPagedKVCacheWrapper = kernel_contracts.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    from kvcache_cuda.flashinfer import FlashInferKernel

    return FlashInferKernel(storage.pool, storage.upload, storage.device)


KERNELS = {"varlen": varlen, "flashinfer": flashinfer}
MakeCache = Callable[..., tuple[KvCacheManager, AttentionKernel]]


@pytest.fixture(params=KERNELS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a cache over one of the kernels."""
    opened = []

    def make_cache(window: int | None = None) -> tuple[KvCacheManager, AttentionKernel]:
        storage = CudaStorage(spec_of(geometry=CacheGeometry.uniform(2, 2, 8, window=window), dtype="bfloat16"))
        storage.kernel = KERNELS[request.param](storage, monkeypatch)
        opened.append(KvCacheManager(storage))
        return opened[-1], storage.kernel

    yield make_cache
    for cache in opened:
        cache.close()


def rows(count: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(count, heads, 8).bfloat16()


def run(cache: KvCacheManager, new: dict[KvCacheHandle, int], query: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """One step; return it, and the attention of its second layer."""
    total = sum(new.values())
    with cache.step(new) as step:
        for layer in range(2):
            step.write(layer, rows(total), rows(total))
        return step, step.attend(1, query)


def by_reference(cache: KvCacheManager, step: Any, query: torch.Tensor) -> torch.Tensor:
    kernel = ReferenceKernel(cache.storage.pool, cache.storage.upload)  # type: ignore[attr-defined]
    return kernel.attend_as_planned(kernel.plan(step.batch), 1, query, 8**-0.5, cache.own_spec(1).window)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads", [2, 6])
def test_prefill_decode_and_mixed_batches_equal_the_reference(make: MakeCache, window: int | None, heads: int) -> None:
    cache, _ = make(window)
    handles = [cache.allocate() for _ in range(3)]
    for counts in ((9, 5, 1), (1, 1, 1), (1, 0, 4), (0, 6, 0)):
        query = rows(sum(counts), heads)
        step, got = run(cache, dict(zip(handles, counts, strict=True)), query)
        assert torch.equal(got, by_reference(cache, step, query))
    for handle in handles:
        handle.free()


def test_queries_of_another_dtype_are_not_rounded(make: MakeCache) -> None:
    cache, _ = make()
    handles = [cache.allocate() for _ in range(3)]
    for count in (7, 1):
        query = torch.randn(3 * count, 4, 8)
        step, got = run(cache, dict.fromkeys(handles, count), query)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, by_reference(cache, step, query), rtol=1e-5, atol=1e-6)
    for handle in handles:
        handle.free()


def test_queries_in_any_memory_are_taken(make: MakeCache) -> None:
    cache, _ = make()
    handle = cache.allocate()
    query = rows(5, 4).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    step, got = run(cache, {handle: 5}, query)
    assert torch.equal(got, by_reference(cache, step, query))
    handle.free()


def test_a_decode_step_at_fixed_addresses_equals_the_step_and_pads_with_zeros(make: MakeCache) -> None:
    cache, _ = make(5)
    handles = [cache.allocate() for _ in range(2)]
    run(cache, dict(zip(handles, (9, 2), strict=True)), rows(11))
    static = StaticDecode(cache.storage, 4, 4)  # type: ignore[arg-type]
    with cache.step(dict.fromkeys(handles, 1)) as step:
        static.load(step)
        for layer in range(2):
            static.write(layer, rows(4), rows(4))
        query = rows(4, 6)
        out = static.attend(1, query)
        step.mark_written()
        torch.testing.assert_close(out[:2], step.attend(1, query[:2]), rtol=2e-2, atol=2e-2)
        assert not out[2:].any()
    for handle in handles:
        handle.free()


def test_a_step_plans_once_for_layers_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CudaStorage(spec_of(dtype="bfloat16"))
    storage.kernel = flashinfer(storage, monkeypatch)
    with KvCacheManager(storage) as cache:
        handle = cache.allocate()
        with cache.step({handle: 3}) as step:
            for layer in range(2):
                step.write(layer, rows(3), rows(3))
                step.attend(layer, rows(3, 4))
            wrappers = list(step.batch.plan._planned.values())
            assert [wrapper.plans for wrapper in wrappers] == [1]
        handle.free()


def test_trtllm_15546_a_wrapper_serves_the_next_step_only_when_the_device_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = CudaStorage(spec_of(dtype="bfloat16"))
    storage.kernel = flashinfer(storage, monkeypatch)
    with KvCacheManager(storage) as cache:
        handle = cache.allocate()

        def wrapper_of_a_step() -> int:
            with cache.step({handle: 2}) as step:
                for layer in range(2):
                    step.write(layer, rows(2), rows(2))
                step.attend(0, rows(2))
                (wrapper,) = step.batch.plan._planned.values()
            return id(wrapper)

        monkeypatch.setattr(Event, "reached", False)
        first, second = wrapper_of_a_step(), wrapper_of_a_step()
        assert first != second
        monkeypatch.setattr(Event, "reached", True)
        assert wrapper_of_a_step() in (first, second)
        handle.free()
