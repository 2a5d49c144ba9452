"""What the tests build caches from, on the stand-in for MPS and without it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.plugin import StorageSpec
from kvcache_core.testing import reference_attention
from kvcache_metal.options import MetalOptions
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.stand_in import StandIn, on_stand_in

#: Whether what runs on a Mac's GPU runs on the CPU instead, to see that it would run.
DRY_RUN = bool(os.environ.get("METAL_CHECK_DRY_RUN"))
#: The GPU of a Mac, and the options of a cache there.
DEVICE = "cpu" if DRY_RUN else "mps:0"
OPTIONS: dict[str, Any] = {"device": "cpu"} if DRY_RUN else {}

GEOMETRY = CacheGeometry.uniform(2, 2, 64)

#: Largest difference from exact attention, for values of about 3.
ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def spec_of(options: dict[str, Any] | None = None, **changes: Any) -> StorageSpec:
    """A spec of 32 blocks of 4 tokens on the CPU."""
    values: dict[str, Any] = {
        "geometry": GEOMETRY,
        "block_size": 4,
        "num_blocks": 32,
        "max_sequence_length": 4 * 32,
        "dtype": "float32",
        "device": "cpu",
        "options": MetalOptions(device="cpu", **options or {}),
    }
    return StorageSpec(**values | changes)


def open_on(stand_in: StandIn, options: dict[str, Any] | None = None, **changes: Any) -> KvCacheManager:
    """Open a cache on a stand-in."""
    return KvCacheManager(on_stand_in(lambda: MetalStorage(spec_of(options, **changes)), stand_in))


def open_on_mps(options: dict[str, Any] | None = None, **changes: Any) -> KvCacheManager:
    """Open a cache on the GPU of this Mac."""
    storage = MetalStorage(
        replace(spec_of(**changes), device=DEVICE, options=MetalOptions(**OPTIONS | (options or {})))
    )
    return KvCacheManager(storage)


def random(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Reproducible normal numbers."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return numbers.to(dtype).to(device)


def rows_of(cache: KvCacheManager, layer: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V of one layer."""
    spec = cache.own_spec(layer)
    key, value = (
        random(count, spec.num_kv_heads, dim, dtype=cache.dtype, seed=100 * layer + role + seed, device=cache.device)
        for role, dim in ((0, spec.head_dim), (50, spec.value_head_dim))
    )
    return key, value


def append(cache: KvCacheManager, handle: KvCacheHandle, count: int, seed: int = 0) -> None:
    """Append random rows."""
    with cache.step({handle: count}) as step:
        for layer in cache.geometry.caching_layers:
            step.write(layer, *rows_of(cache, layer, count, seed))


def assert_attends_exactly(cache: KvCacheManager, new: dict[KvCacheHandle, int], heads: int = 4, seed: int = 0) -> None:
    """Do a step, and compare its attention with exact attention over the rows that were written."""
    before = {(handle, layer): handle.kv_cache(layer) for handle in new for layer in cache.geometry.caching_layers}
    with cache.step(new) as step:
        for layer in cache.geometry.caching_layers:
            key, value = rows_of(cache, layer, step.num_new_tokens, seed)
            step.write(layer, key, value)
            spec = cache.own_spec(layer)
            rows = step.num_new_tokens
            query = random(rows, heads, spec.head_dim, dtype=cache.dtype, seed=seed + layer, device=cache.device)
            out, first = step.attend(layer, query), 0
            for handle, count in new.items():
                part = slice(first, first + count)
                old = before[handle, layer]
                assert old is not None
                expected = reference_attention(
                    query[part],
                    torch.cat([old[0], key[part]]),
                    torch.cat([old[1], value[part]]),
                    scale=spec.head_dim**-0.5,
                    window=spec.window,
                )
                torch.testing.assert_close(out[part].cpu().double(), expected, rtol=0, atol=ERROR[cache.dtype])
                first += count
