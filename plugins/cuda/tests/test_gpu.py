"""What only a GPU can show. With `GPU_CHECK_DRY_RUN=1` the same code runs on the CPU where it can, to try the tests.

`scripts/gpu_check.sh` runs this module and the benchmarks on one card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager, open_cache
from kvcache_core.attention import attend_dense
from kvcache_core.paged import StaticDecode

HAS_GPU = torch.cuda.is_available()
DRY_RUN = not HAS_GPU and os.environ.get("GPU_CHECK_DRY_RUN") == "1"
DEVICE = "cuda:0" if HAS_GPU else "cpu"
KERNELS = {"reference": (1, 16, 256), "varlen": (256, 512), "flashinfer": (1, 16, 256)}

if not (HAS_GPU or DRY_RUN):
    pytest.skip("needs a CUDA GPU, or GPU_CHECK_DRY_RUN=1", allow_module_level=True)
gpu_only = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")


def fits_here(kernel: str) -> bool:
    if kernel == "flashinfer":
        return HAS_GPU and find_spec("flashinfer") is not None
    return HAS_GPU or kernel == "reference"


def kernels_and_sizes() -> list[Any]:
    return [
        pytest.param(kernel, size, marks=pytest.mark.skipif(not fits_here(kernel), reason=f"{kernel} is not here"))
        for kernel, sizes in KERNELS.items()
        for size in sizes
    ]


NewCache = Callable[..., KvCacheManager]


@pytest.fixture
def new_cache() -> Iterator[NewCache]:
    opened: list[KvCacheManager] = []

    def make(
        kernel: str = "auto", block_size: int | str = "auto", swap_blocks: int = 0, **config: Any
    ) -> KvCacheManager:
        settings = {"geometry": CacheGeometry.uniform(2, 2, 64), "dtype": "bfloat16", "budget": "4096 tokens"} | config
        options = {"kernel": kernel, "swap_blocks": swap_blocks, "device": "auto" if HAS_GPU else "cpu"}
        opened.append(open_cache(backend="cuda", block_size=block_size, options=options, **settings))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def run(
    cache: KvCacheManager, new: dict[KvCacheHandle, int], query_heads: int, layer: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of random rows; return its queries and its attention in one layer."""
    total, spec = sum(new.values()), cache.own_spec(layer)
    query = randn(total, query_heads, spec.head_dim, dtype=cache.dtype)
    with cache.step(new) as step:
        for each in cache.geometry.caching_layers:
            rows = [randn(total, spec.num_kv_heads, dim, dtype=cache.dtype) for dim in _dims(cache, each)]
            step.write(each, *rows)
        return query, step.attend(layer, query)


def _dims(cache: KvCacheManager, layer: int) -> tuple[int, int]:
    spec = cache.own_spec(layer)
    return spec.head_dim, spec.value_head_dim


def expected(handle: KvCacheHandle, query: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """Attention of the last tokens of a handle in float32."""
    both = handle.kv_cache(layer)
    assert both is not None
    spec = handle.layer_spec(layer)
    assert spec is not None
    key, value = (rows.float() for rows in both)
    return attend_dense(query.float(), key, value, scale=spec.head_dim**-0.5, window=spec.window)


def poison(cache: KvCacheManager) -> None:
    for section in cache.storage.pool.sections:  # type: ignore[attr-defined]
        section[:, 1:] = float("nan")


# -- kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "block_size"), kernels_and_sizes())
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("heads", [2, 8])
def test_kernels_agree_with_float32_in_ragged_batches_full_of_nan(
    new_cache: NewCache, kernel: str, block_size: int, window: int | None, heads: int
) -> None:
    cache = new_cache(kernel, block_size, geometry=CacheGeometry.uniform(2, 2, 64, window=window))
    poison(cache)
    handles = [cache.allocate() for _ in range(4)]
    for counts in ((300, 17, 0, 1), (1, 1, 1, 1), (1, 300, 5, 0), (0, 0, 2, 1), (1, 1, 1, 1)):
        query, got = run(cache, dict(zip(handles, counts, strict=True)), heads)
        assert got.isfinite().all()
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            part = slice(start, start + count)
            wanted = expected(handle, query[part])
            torch.testing.assert_close(got[part].float(), wanted, rtol=2e-2, atol=2e-2)
            start += count
    for handle in handles:
        handle.free()


@pytest.mark.parametrize(("kernel", "block_size"), kernels_and_sizes())
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_flash_attention_1579_head_dims_work_or_are_refused_when_the_pool_is_built(
    new_cache: NewCache, kernel: str, block_size: int, dim: int
) -> None:
    geometry = CacheGeometry.uniform(1, 2, dim)
    if kernel == "flashinfer" and dim not in (64, 128, 256):
        with pytest.raises(RuntimeError, match="head_dim"):
            new_cache(kernel, block_size, geometry=geometry)
        return
    cache = new_cache(kernel, block_size, geometry=geometry)
    with cache.allocate() as handle:
        for count in (270, 1):
            query, got = run(cache, {handle: count}, 4)
            torch.testing.assert_close(got.float(), expected(handle, query), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("kernel", "block_size"), kernels_and_sizes())
def test_changed_future_tokens_leave_earlier_rows_alone(new_cache: NewCache, kernel: str, block_size: int) -> None:
    cache = new_cache(kernel, block_size, geometry=CacheGeometry.uniform(1, 2, 64))
    key, value, query = (randn(64, 2, 64) for _ in range(3))
    outs = []
    for change in (0.0, 3.0):
        key[-1] += change
        value[-1] += change
        with cache.allocate() as handle, cache.step({handle: 64}) as step:
            step.write(0, key, value)
            outs.append(step.attend(0, query))
            step.abort()
    assert torch.equal(outs[0][:-1], outs[1][:-1])


@gpu_only
def test_pytorch_162588_rows_beyond_the_reach_of_32_bits_are_right(new_cache: NewCache) -> None:
    for kernel in (name for name in KERNELS if fits_here(name) and name != "reference"):
        geometry = CacheGeometry.uniform(1, 1, 64)
        cache = new_cache(kernel, 256, geometry=geometry, budget="70000 tokens", max_sequence_length=70_000)
        with cache.allocate() as handle:
            query, got = run(cache, {handle: 65_600}, 1)
            key, value = (rows.float() for rows in handle.kv_cache(0) or ())
            for row in (0, 1, 65_535, 65_536, 65_537, 65_599):
                wanted = attend_dense(query[row : row + 1].float(), key[: row + 1], value[: row + 1], scale=64**-0.5)
                torch.testing.assert_close(got[row : row + 1].float(), wanted, rtol=2e-2, atol=2e-2)


# -- memory ------------------------------------------------------------------------------------------------


@gpu_only
def test_vllm_1486_a_pool_beyond_32_bit_offsets_is_exact_at_its_far_end(new_cache: NewCache) -> None:
    for kernel in (name for name in KERNELS if fits_here(name)):
        geometry = CacheGeometry.uniform(1, 8, 128)
        cache = new_cache(kernel, 256, geometry=geometry, budget="9000 blocks", max_sequence_length=4096)
        allocator = cache.block_allocator
        skipped = allocator.allocate_blocks(8990)
        with cache.allocate() as handle:
            for count in (600, 1):
                query, got = run(cache, {handle: count}, 32)
                torch.testing.assert_close(got.float(), expected(handle, query), rtol=2e-2, atol=2e-2)
            with handle.fork() as fork:
                before = handle.key_cache(0)
                run(cache, {fork: 3}, 32)
                assert torch.equal(handle.key_cache(0), before)
        allocator.free_blocks(skipped)
        cache.close()


@gpu_only
def test_a_share_of_the_memory_is_of_what_is_really_free() -> None:
    hog = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    free = torch.cuda.mem_get_info(0)[0]
    with open_cache(backend="cuda", geometry=CacheGeometry.uniform(2, 2, 64), budget=0.05) as cache:
        assert cache.stats().total_bytes <= 0.05 * free * 1.01
    del hog


# -- host and streams --------------------------------------------------------------------------------------


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Nothing inside may make the host wait for the device."""
    if not HAS_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "flashinfer"])
def test_a_decode_step_never_waits_for_the_device(new_cache: NewCache, kernel: str) -> None:
    if not fits_here(kernel):
        pytest.skip(f"{kernel} is not here")
    cache = new_cache(kernel, 256)
    handles = [cache.allocate() for _ in range(3)]
    run(cache, dict.fromkeys(handles, 20), 4)
    fork = handles[0].fork()
    rows, query = randn(4, 2, 64), randn(4, 4, 64)
    run(cache, {fork: 1}, 4)  # what is made on first use is made
    with no_host_sync(), cache.step(dict.fromkeys([*handles, fork], 1)) as step:
        for layer in range(2):
            step.write(layer, rows, rows)
            step.attend(layer, query)
    for handle in (*handles, fork):
        handle.free()


@gpu_only
def test_trtllm_15546_two_steps_behind_a_busy_device_each_use_their_own_tables(new_cache: NewCache) -> None:
    for kernel in (name for name in KERNELS if fits_here(name)):
        cache = new_cache(kernel, 256)
        first, second = cache.allocate(), cache.allocate()
        run(cache, {first: 300, second: 40}, 4)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        outs = [(handle, *run(cache, {handle: 1}, 4)) for handle in (first, second)]
        for handle, query, got in outs:
            torch.testing.assert_close(got.float(), expected(handle, query), rtol=2e-2, atol=2e-2)
        cache.close()


@gpu_only
def test_vllm_47282_a_recycled_block_is_not_written_before_its_last_reader_is_done(new_cache: NewCache) -> None:
    cache = new_cache("reference", 16, geometry=CacheGeometry.uniform(1, 2, 64), budget="64 tokens")
    side = torch.cuda.Stream()
    for _ in range(20):
        old = cache.allocate()
        query, _ = run(cache, {old: 64}, 2)
        torch.cuda.synchronize()
        wanted = expected(old, query[-1:])
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            with cache.step({old: 0}) as step:
                pass
            key, value = step.gather(0)
            old.free()
        new = cache.allocate()
        run(cache, {new: 64}, 2)  # takes the same blocks, on the default stream
        torch.cuda.synchronize()
        got = attend_dense(query[-1:].float(), key.float(), value.float(), scale=64**-0.5)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        new.free()


def swapping_cache(new_cache: NewCache, budget: str = "64 tokens") -> KvCacheManager:
    geometry = CacheGeometry.uniform(2, 2, 64)
    return new_cache("reference", 16, geometry=geometry, budget=budget, swap_blocks=16)


def test_vllm_45704_a_sequence_is_copied_out_only_after_it_was_written(new_cache: NewCache) -> None:
    """Behind a busy device, from another stream than the default one, many times."""
    cache = swapping_cache(new_cache)
    stream = torch.cuda.Stream() if HAS_GPU else None
    for round_ in range(20):
        rows = randn(48, 2, 64)
        with torch.cuda.stream(stream), cache.allocate() as handle:
            if HAS_GPU:
                torch.cuda._sleep(20_000_000)
            handle.append([(rows + round_, rows - round_)] * 2)
            cache.swap_out(handle)
            with cache.allocate() as other:  # takes the same blocks
                other.append([(rows * 0, rows * 0)] * 2)
            cache.swap_in(handle)
            for layer in range(2):
                key, value = handle.kv_cache(layer) or ()
                assert torch.equal(key, rows + round_)
                assert torch.equal(value, rows - round_)


@gpu_only
def test_swapping_does_not_make_the_host_wait(new_cache: NewCache) -> None:
    cache = swapping_cache(new_cache)
    handle = cache.allocate()
    run(cache, {handle: 40}, 4)
    cache.swap_out(handle)
    cache.swap_in(handle)
    with no_host_sync():
        cache.swap_out(handle)
        cache.swap_in(handle)
    handle.free()


@gpu_only
def test_the_probe_leaves_a_forked_child_free_to_use_cuda() -> None:
    program = (
        "import os, sys, torch\n"
        "from kvcache_core.plugin import ProbeRequest\n"
        "from kvcache_cuda.options import CudaOptions\n"
        "from kvcache_cuda.probe import probe\n"
        "print(probe(ProbeRequest(options=CudaOptions())))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.zeros(1, device='cuda')\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitpid(pid, 0)[1] != 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "flashinfer"])
def test_a_captured_decode_step_is_replayed_for_other_sequences_and_fewer(new_cache: NewCache, kernel: str) -> None:
    if not fits_here(kernel):
        pytest.skip(f"{kernel} is not here")
    cache = new_cache(kernel, 256)
    static = StaticDecode(cache.storage, max_sequences=4, max_blocks=2)  # type: ignore[arg-type]
    keys, values, queries = (torch.zeros(2, 4, heads, 64, device=DEVICE).bfloat16() for heads in (2, 2, 4))
    outs = torch.zeros_like(queries)

    def forward() -> None:
        for layer in range(2):
            static.write(layer, keys[layer], values[layer])
            outs[layer].copy_(static.attend(layer, queries[layer]))

    replay = captured(forward)
    handles = [cache.allocate() for _ in range(3)]
    run(cache, dict(zip(handles, (300, 20, 255), strict=True)), 4)
    for chosen in (handles, handles[:1], handles[1:]):
        for tensor in (keys, values, queries):
            tensor.normal_()
        with cache.step(dict.fromkeys(chosen, 1)) as step:
            static.load(step)
            replay()
            step.mark_written()
        for row, handle in enumerate(chosen):
            for layer in range(2):
                wanted = expected(handle, queries[layer, row : row + 1], layer)
                torch.testing.assert_close(outs[layer, row : row + 1].float(), wanted, rtol=2e-2, atol=2e-2)
        assert not outs[:, len(chosen) :].any()
    for handle in handles:
        handle.free()


def captured(forward: Callable[[], None]) -> Callable[[], None]:
    """Capture a function in a CUDA graph; on the CPU it is only called again."""
    if not HAS_GPU:
        return forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay
