"""Append one token to all layers, against `DynamicCache.update`, which copies the whole cache every time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench
from kvcache_core.bench.workload import (
    GEOMETRY,
    decode,
    dynamic_cache,
    new_rows,
    open_benchmark_cache,
    prefill,
)

__all__ = ["measure"]

LONG, SHORT = 8_000, 100
LENGTHS = (100, 500, 2_000, 8_000, 32_000)


@torch.inference_mode()
def measure(bench: Bench) -> list[Figure | Series]:
    """Time an append, all checks included, at a long and at a short context, and in between."""
    return [*_long_and_short(bench), _by_length(bench)]


def _long_and_short(bench: Bench) -> list[Figure]:
    rows = new_rows(1)
    with open_benchmark_cache(2 * LONG) as cache, cache.allocate() as long, cache.allocate() as short:
        prefill(long, LONG)
        prefill(short, SHORT)
        update = _update(LONG)

        def append_long() -> None:
            decode(cache, long, rows, None)

        def append_short() -> None:
            decode(cache, short, rows, None)

        lengths = bench.interleaved({"long": append_long, "short": append_short}, rounds=240)
        # An update moves so much memory that whoever comes after it finds the processor's caches empty.
        caches = bench.interleaved({"dynamic": update, "cold": append_long, "warm": append_long}, rounds=60)
    peer = "transformers"
    ratio = Figure.of("append, of an update", caches["warm"] / caches["dynamic"], "x", peer=peer, at_most=1 / 30)
    cold = Figure.of("append right after an update, of it", caches["cold"] / caches["dynamic"], "x", peer=peer)
    return [
        Figure.of(f"append at {LONG} tokens", lengths["long"] * 1e6, "µs"),
        Figure.of(f"append at {SHORT} tokens", lengths["short"] * 1e6, "µs"),
        Figure.of("append, long of short", lengths["long"] / lengths["short"], "x", at_most=1.5),
        Figure.of(f"DynamicCache.update at {LONG} tokens", caches["dynamic"] * 1e6, "µs", peer=peer),
        ratio,
        cold,
    ]


def _by_length(bench: Bench) -> Series:
    series = Series(name="Append one token to 30 layers", x="tokens in the cache", y="µs")
    rows = new_rows(1)
    for length in LENGTHS[:2] if bench.quick else LENGTHS:
        with open_benchmark_cache(length + 1_000) as cache, cache.allocate() as handle:
            prefill(handle, length)
            cases = {"kvcache-core": lambda: decode(cache, handle, rows, None), "DynamicCache": _update(length)}
            for name, samples in bench.interleaved(cases, rounds=15).items():
                series.add(name, length, samples.median * 1e6)
    return series


def _update(length: int) -> Callable[[], None]:
    cache, headed = dynamic_cache(length), new_rows(1).transpose(0, 1)[None]

    def update() -> None:
        for layer in range(GEOMETRY.num_layers):
            cache.update(headed, headed, layer)

    return update
