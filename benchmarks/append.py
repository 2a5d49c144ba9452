"""Append one token to all layers, against `DynamicCache.update`, which copies the whole cache every time."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from benchmarks._measure import GEOMETRY, Figure, decode, interleaved, new_rows, open_benchmark_cache, prefill

__all__ = ["measure"]

LONG, SHORT = 8_000, 100


def dynamic_cache(num_tokens: int) -> DynamicCache:
    cache = DynamicCache()
    rows = new_rows(num_tokens).transpose(0, 1)[None].contiguous()
    for layer in range(GEOMETRY.num_layers):
        cache.update(rows, rows, layer)
    return cache


@torch.inference_mode()
def measure(rounds: int = 60) -> list[Figure]:
    """Time an append, all checks included, at a long and at a short context."""
    rows = new_rows(1)
    headed = rows.transpose(0, 1)[None]
    dynamic = dynamic_cache(LONG)
    with open_benchmark_cache(2 * LONG) as cache, cache.allocate() as long, cache.allocate() as short:
        prefill(long, LONG)
        prefill(short, SHORT)

        def update() -> None:
            for layer in range(GEOMETRY.num_layers):
                dynamic.update(headed, headed, layer)

        def append_long() -> None:
            decode(cache, long, rows, None)

        def append_short() -> None:
            decode(cache, short, rows, None)

        lengths = interleaved({"long": append_long, "short": append_short}, rounds=4 * rounds)
        # An update moves so much memory that whoever comes after it finds the processor's caches empty.
        caches = interleaved({"dynamic": update, "cold": append_long, "warm": append_long}, rounds=rounds)
    return [
        Figure(name=f"append at {LONG} tokens", value=lengths["long"] * 1e6, unit="µs"),
        Figure(name=f"append at {SHORT} tokens", value=lengths["short"] * 1e6, unit="µs"),
        Figure(name="append, long of short", value=lengths["long"] / lengths["short"], unit="x", at_most=1.5),
        Figure(name=f"DynamicCache.update at {LONG} tokens", value=caches["dynamic"] * 1e6, unit="µs"),
        Figure(name="append, of an update", value=caches["warm"] / caches["dynamic"], unit="x", at_most=1 / 30),
        Figure(name="append right after an update, of it", value=caches["cold"] / caches["dynamic"], unit="x"),
    ]
