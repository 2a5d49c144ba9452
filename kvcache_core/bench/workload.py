"""The cache that most suites measure: the shape of SmolLM2-135M, in bfloat16, on the CPU backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager, open_cache

if TYPE_CHECKING:
    from transformers import DynamicCache

__all__ = [
    "DTYPE",
    "GEOMETRY",
    "QUERY_HEADS",
    "TOKEN_BYTES",
    "decode",
    "dynamic_cache",
    "new_rows",
    "open_benchmark_cache",
    "prefill",
]

GEOMETRY = CacheGeometry.uniform(30, 3, 64, dtype="bfloat16")
QUERY_HEADS = 9
DTYPE = torch.bfloat16
TOKEN_BYTES = GEOMETRY.bytes_per_token("bfloat16")


def open_benchmark_cache(tokens: int) -> KvCacheManager:
    """Open a CPU cache with room for so many tokens."""
    return open_cache(backend="cpu", geometry=GEOMETRY, budget=f"{tokens} tokens", max_sequence_length=tokens)


def new_rows(num_tokens: int) -> torch.Tensor:
    """Random keys or values of so many tokens in one layer, `[tokens, kv heads, head dim]`."""
    return torch.randn(num_tokens, 3, 64).to(DTYPE)


def prefill(handle: KvCacheHandle, num_tokens: int) -> None:
    """Store random tokens in all layers."""
    rows = new_rows(num_tokens)
    handle.append([(rows, rows)] * GEOMETRY.num_layers)


def decode(cache: KvCacheManager, handle: KvCacheHandle, rows: torch.Tensor, query: torch.Tensor | None) -> None:
    """Store further tokens in all layers, and attend over all if there is a query."""
    with cache.step({handle: rows.shape[0]}) as step:
        for layer in range(GEOMETRY.num_layers):
            step.write(layer, rows, rows)
            if query is not None:
                step.attend(layer, query)


def dynamic_cache(num_tokens: int) -> DynamicCache:
    """A DynamicCache of transformers with so many random tokens."""
    from transformers import DynamicCache

    cache = DynamicCache()
    rows = new_rows(num_tokens).transpose(0, 1)[None].contiguous()
    for layer in range(GEOMETRY.num_layers):
        cache.update(rows, rows, layer)
    return cache
