"""The storage on the CPU: sizing, table checks, kernels that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_core import BackendUnavailableError, ConfigError, KvCacheManager, ShapeError
from kvcache_core.plugin import Batch, Segment
from kvcache_cuda.handle import CudaKvCacheHandle
from kvcache_cuda.options import CudaOptions
from kvcache_cuda.storage import CudaStorage
from plugins.cuda.tests.caches import GEOMETRY, spec_of

NewCache = Callable[..., KvCacheManager]


def test_a_handle_is_the_backends_own_and_tells_its_kernel(new_cache: NewCache) -> None:
    cache = new_cache()
    with cache.allocate() as handle:
        own = handle.unwrap(CudaKvCacheHandle)
        assert own.kernel_report.chosen is not None
        assert own.kernel_report.chosen.name == "reference"
        assert own.pool(0)[0].shape == (18, 4, 2, 8)


@pytest.mark.parametrize("kernel", ["varlen", "flashinfer"])
def test_a_kernel_that_was_asked_for_and_does_not_fit_is_refused(kernel: Any) -> None:
    with pytest.raises(BackendUnavailableError, match="GPU only") as caught:
        CudaStorage(spec_of(options=CudaOptions(device="cpu", kernel=kernel)))
    assert caught.value.code == "kernel-unavailable"


def test_without_options_the_defaults_hold() -> None:
    assert CudaStorage(spec_of(options=None)).kernel.name == "reference"


def test_a_share_of_the_memory_is_taken_from_what_is_free(new_cache: NewCache) -> None:
    free = CudaStorage.device_memory("cpu", None).free
    cache = new_cache(budget=0.25)
    assert 0.2 * free < cache.stats().total_bytes < 0.3 * free
    assert cache.stats().storage_bytes < 1 << 20  # taken as it is used


def test_a_budget_too_small_for_a_block_says_what_fits_and_what_would(new_cache: NewCache) -> None:
    with pytest.raises(ConfigError, match="one block of 4 tokens") as caught:
        new_cache(budget="1000 B")
    assert "tokens would fit" in str(caught.value)
    assert "KiB" in str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "start", "stop"),
    [((1, 2), 0, 9), ((1, 1), 0, 8), ((0, 2), 0, 8), ((1, 17), 0, 8), ((-1, 2), 0, 8), ((1, 2), -1, 4), ((1,), 3, 2)],
)
def test_flashinfer_320_wrong_tables_are_refused_before_a_kernel_reads_them(
    blocks: tuple[int, ...], start: int, stop: int
) -> None:
    storage = CudaStorage(spec_of(options=CudaOptions(device="cpu", check_tables=True)))
    with pytest.raises(ShapeError, match="sequence 0"):
        storage.plan(Batch([Segment(None, blocks, start, stop, 0)], 4, storage.device))


def test_sound_tables_pass_the_check(new_cache: NewCache) -> None:
    cache = new_cache({"check_tables": True})
    with cache.allocate() as handle:
        rows = torch.randn(9, 2, 8)
        handle.append([(rows, rows)] * 2)
        handle.append([(rows[:0], rows[:0])] * 2)
        assert handle.num_tokens == 9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_declared_dtype_is_stored_as_it_is(new_cache: NewCache, dtype: str) -> None:
    cache = new_cache(dtype=dtype)
    with cache.allocate() as handle:
        rows = torch.randn(5, 2, 8).to(cache.dtype)
        handle.append([(rows, -rows)] * 2)
        assert torch.equal(handle.key_cache(1), rows)
        assert torch.equal(handle.value_cache(0), -rows)


def test_defragmenting_a_pool_is_refused_with_the_reason(new_cache: NewCache) -> None:
    with pytest.raises(NotImplementedError, match="cannot fragment"):
        new_cache().block_allocator.defragment()


def test_the_default_block_size_and_memory_do_not_depend_on_a_gpu() -> None:
    storage = CudaStorage(spec_of(geometry=GEOMETRY, num_blocks=1000))
    assert storage.nbytes == 0
    assert storage.bytes_per_block == 4 * 2 * 2 * 2 * 8 * 4
