"""The storage: how it is sized, what it refuses, and what its handles show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache_core import ConfigError, KvCacheManager, ShapeError, open_cache
from kvcache_core.errors import UnsupportedError, WouldCopy
from kvcache_core.paged import StaticDecode
from kvcache_metal.guards import GUARDS
from kvcache_metal.handle import MetalKvCacheHandle
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.caches import GEOMETRY, append, rows_of, spec_of

GIB = 1 << 30


@pytest.fixture
def cache() -> Iterator[KvCacheManager]:
    with KvCacheManager(MetalStorage(spec_of())) as cache:
        yield cache
        assert cache.audit() == ()


def test_a_handle_is_the_backends_own_and_tells_its_guards(cache: KvCacheManager) -> None:
    with cache.allocate() as handle:
        own = handle.unwrap(MetalKvCacheHandle)
        assert own.guards.disabled == frozenset()
        assert all(name in repr(own.guards) for name in GUARDS)
        assert own.pool(0)[0].shape == (34, 4, 2, 64)


def test_without_options_all_guards_are_in_force() -> None:
    assert MetalStorage(spec_of(options=None)).guards.disabled == frozenset()


def test_the_pool_is_a_tensor_for_each_layer_and_role_and_no_view() -> None:
    tensors = list(MetalStorage(spec_of()).pool.tensors)
    assert len(tensors) == 4
    assert all(tensor.storage_offset() == 0 and tensor.is_contiguous() for tensor in tensors)


def test_a_tensor_stays_below_4_gib_and_2_to_the_31_elements() -> None:
    storage = MetalStorage(spec_of(dtype="bfloat16", num_blocks=8_000_000, max_sequence_length=128))
    assert storage.pool.num_shards > 1
    assert all(tensor.nbytes < 2**32 for tensor in storage.pool.tensors)
    storage = MetalStorage(
        spec_of({"max_tensor_bytes": 2**40}, dtype="bfloat16", num_blocks=8_000_000, max_sequence_length=128)
    )
    assert all(tensor.numel() < 2**31 for tensor in storage.pool.tensors)
    assert any(tensor.nbytes > 2**32 - 2**16 for tensor in storage.pool.tensors)


def test_a_sequence_that_could_not_be_read_into_one_tensor_is_refused() -> None:
    changes = {"dtype": "bfloat16", "num_blocks": 5_000_000}
    with pytest.raises(ConfigError, match="more than MPS can attend to at once; give 13421772 or less") as caught:
        MetalStorage(spec_of(max_sequence_length=20_000_000, **changes))
    assert caught.value.key == "max_sequence_length"
    MetalStorage(spec_of(max_sequence_length=13_421_772, **changes))
    MetalStorage(spec_of({"disable_guards": ["bounded_tensors"]}, max_sequence_length=20_000_000, **changes))


def test_a_block_that_fits_no_tensor_is_refused() -> None:
    with pytest.raises(ShapeError, match="smaller block_size"):
        MetalStorage(spec_of({"max_tensor_bytes": 1000}))


def test_a_layer_in_several_tensors_is_read_and_not_handed_out() -> None:
    with KvCacheManager(MetalStorage(spec_of({"max_tensor_bytes": 1 << 14}))) as cache, cache.allocate() as handle:
        append(cache, handle, 70)
        own = handle.unwrap(MetalKvCacheHandle)
        for stored, written in zip(handle.kv_cache(1), rows_of(cache, 1, 70), strict=True):
            assert torch.equal(stored, written)
        for show in (own.pool, own.dense):
            with pytest.raises(WouldCopy, match="tensors"):
                show(0)
        assert cache.audit() == ()


def test_memory_on_the_cpu_is_taken_as_it_is_used() -> None:
    storage = MetalStorage(spec_of(num_blocks=1_000_000))
    assert storage.nbytes == 0
    storage = MetalStorage(spec_of(initial_blocks=5))
    assert storage.nbytes == 5 * storage.bytes_per_block
    assert not any(tensor.any() for tensor in storage.pool.tensors)


def test_a_decode_step_cannot_be_captured(cache: KvCacheManager) -> None:
    with pytest.raises(UnsupportedError, match="tables of a decode step"):
        StaticDecode(cache.storage, 2, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", [-2, 10**6])
def test_pytorch_189968_slots_outside_the_pool_are_refused_on_the_host(cache: KvCacheManager, slot: int) -> None:
    storage = cache.storage
    before = [tensor.clone() for tensor in storage.pool.tensors]
    with pytest.raises(ShapeError, match="is none of this pool's"):
        storage.write_slots(0, torch.tensor([slot]), torch.ones(1, 2, 64), torch.ones(1, 2, 64))
    storage.write_slots(0, torch.tensor([-1]), torch.ones(1, 2, 64), torch.ones(1, 2, 64))
    for tensor, old in zip(storage.pool.tensors, before, strict=True):
        assert torch.equal(tensor[:-1], old[:-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_declared_dtype_is_stored_as_it_is(dtype: str) -> None:
    with KvCacheManager(MetalStorage(spec_of(dtype=dtype))) as cache, cache.allocate() as handle:
        append(cache, handle, 5)
        for stored, written in zip(handle.kv_cache(1), rows_of(cache, 1, 5), strict=True):
            assert torch.equal(stored, written)


# -- memory of the GPU -------------------------------------------------------------------------------------


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch would say on a Mac of which Metal recommends 24 GiB, where the driver holds 6."""
    asked: list[str] = []

    def say(name: str, answer: Any) -> None:
        monkeypatch.setattr(torch.mps, name, lambda: (asked.append(name), answer)[1])

    say("empty_cache", None)
    say("recommended_max_memory", 24 * GIB)
    say("driver_allocated_memory", 6 * GIB)
    return asked


def test_what_metal_recommends_less_what_the_driver_holds_is_free(mac: list[str]) -> None:
    memory = MetalStorage.device_memory("mps:0", None)
    assert (memory.total, memory.free) == (24 * GIB, 18 * GIB)
    assert mac[0] == "empty_cache"


def test_a_driver_that_holds_more_than_is_recommended_leaves_nothing(
    mac: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 30 * GIB)
    assert MetalStorage.device_memory("mps", None).free == 0


def test_a_pool_that_would_make_the_machine_swap_is_refused_and_told_what_fits(mac: list[str]) -> None:
    per_block = 4 * 2 * 2 * 2 * 64 * 4
    with pytest.raises(ConfigError, match=r"18 GiB of what Metal recommends are free") as caught:
        MetalStorage(spec_of(device="mps:0", num_blocks=18 * GIB // per_block))
    fitting = 4 * (18 * GIB // per_block - 2)
    assert f'give "{fitting} tokens" or less' in str(caught.value)
    assert caught.value.key == "budget"


def test_a_share_of_the_hosts_memory_is_taken_on_the_cpu() -> None:
    free = MetalStorage.device_memory("cpu", None).free
    with open_cache(backend="metal", geometry=GEOMETRY, budget=0.25, options={"device": "cpu"}) as cache:
        assert 0.2 * free < cache.stats().total_bytes < 0.3 * free
