"""What the backend is chosen by, takes, and shows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from kvcache_core import (
    BackendUnavailableError,
    CacheGeometry,
    KvCacheManager,
    LayerGroup,
    OptionsError,
    WouldCopy,
    open_cache,
)

from kvcache_int8.handle import Int8KvCacheHandle

GEOMETRY = CacheGeometry(num_layers=3, groups=(LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=64),), shared={2: 0})


def opened(**config: Any) -> KvCacheManager:
    return open_cache(backend="int8", **{"geometry": GEOMETRY, "budget": "16 blocks", **config})


def filled(cache: KvCacheManager, count: int) -> Any:
    handle = cache.allocate()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, count, 2, 64, generator=generator).to(cache.dtype) for _ in range(2)]
    handle.append([(key, value) for key, value in rows])
    return handle


def test_declaring_the_backend_imports_no_torch() -> None:
    program = "import importlib, sys; importlib.import_module(sys.argv[1]); sys.exit('torch' in sys.modules)"
    for module in ("plugin", "options", "probe"):
        subprocess.run([sys.executable, "-c", program, f"kvcache_int8.{module}"], check=True)


@pytest.mark.parametrize(("dtype", "saved"), [("float32", 0.74), ("bfloat16", 0.48)])
def test_it_takes_little_more_than_a_byte_for_each_element(dtype: str, saved: float) -> None:
    plain = GEOMETRY.bytes_per_token(dtype)
    with opened(dtype=dtype, budget="1000 tokens") as cache:
        assert cache.stats().total_blocks * cache.block_size >= 1000 - cache.block_size
        taken = cache.storage.bytes_per_block / cache.block_size
        assert taken / plain < 1 - saved
        # two blocks more, the null and the trash block
        assert cache.storage.nbytes == cache.storage.bytes_per_block * (cache.stats().total_blocks + 2)


def test_a_budget_in_bytes_holds_almost_twice_the_tokens_of_bfloat16() -> None:
    with opened(dtype="bfloat16", budget="1MiB") as cache:
        tokens = cache.stats().total_blocks * cache.block_size
    assert tokens / ((1 << 20) / GEOMETRY.bytes_per_token("bfloat16")) > 1.9


def test_a_handle_shows_what_is_stored() -> None:
    with opened(dtype="float32") as cache:
        handle = filled(cache, 37)
        assert isinstance(handle, Int8KvCacheHandle)
        for layer in range(3):
            both = handle.kv_cache(layer)
            assert both is not None
            for rows, (codes, scales) in zip(both, handle.quantised(layer), strict=True):
                assert (codes.dtype, codes.shape) == (torch.int8, (37, 2, 64))
                assert torch.equal(codes * scales.float(), rows)
        for look in (handle.pool, handle.dense):
            with pytest.raises(WouldCopy, match="8-bit codes"):
                look(0)
        handle.free()


def test_forks_share_until_one_writes_and_stay_apart_then() -> None:
    with opened(dtype="float32") as cache:
        handle = filled(cache, 20)
        fork = handle.fork()
        before = [tensor.clone() for layer in (0, 1) for tensor in handle.kv_cache(layer) or ()]
        fork.append([(torch.ones(1, 2, 64), torch.ones(1, 2, 64))] * 2)
        after = [tensor for layer in (0, 1) for tensor in handle.kv_cache(layer) or ()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(torch.equal(old, new[:20]) for old, new in zip(before, fork.kv_cache(0) or (), strict=False))
        fork.free()
        handle.free()


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 17, 1000])
def test_a_decode_step_attends_as_to_the_rows_it_reads_back(window: int | None, chunk_tokens: int) -> None:
    geometry = CacheGeometry.uniform(num_layers=1, num_kv_heads=2, head_dim=32, window=window)
    with opened(geometry=geometry, dtype="float32", block_size=16, options={"chunk_tokens": chunk_tokens}) as cache:
        handle = cache.allocate()
        handle.append([tuple(torch.randn(2, 100, 2, 32, generator=torch.Generator().manual_seed(0)))])
        query = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
        with cache.step({handle: 1}) as step:
            step.write(0, torch.zeros(1, 2, 32), torch.ones(1, 2, 32))
            out = step.attend(0, query)
            key, value = (rows[-window if window else 0 :].double() for rows in step.gather(0, handle))
        scores = torch.einsum("hgd,nhd->hgn", query.double().view(2, 3, 32), key) * 32**-0.5
        expected = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), value).reshape(1, 6, 32)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        handle.free()


def test_a_device_that_torch_lacks_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch has that device")
    with pytest.raises(BackendUnavailableError, match="torch cannot use device 'cuda"):
        opened(device="cuda:0")


def test_options_are_checked() -> None:
    for wrong in ({"chunk_tokens": 0}, {"chunk": 4}):
        with pytest.raises(OptionsError, match="chunk"):
            opened(options=wrong)


def test_the_automatic_choice_takes_it_last() -> None:
    from kvcache_core.registry import get_registry

    registry = get_registry()
    others = [registry.describe(name).descriptor.priority for name in registry.names() if name != "int8"]
    assert all(registry.describe("int8").descriptor.priority < priority for priority in others)
