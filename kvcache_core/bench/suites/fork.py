"""Fork a long sequence, and the first decode step of the fork."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch

from kvcache_core import KvCacheHandle
from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench
from kvcache_core.bench.workload import (
    DTYPE,
    QUERY_HEADS,
    decode,
    dynamic_cache,
    new_rows,
    open_benchmark_cache,
    prefill,
)

__all__ = ["measure"]

LENGTH = 8_000
LENGTHS = (100, 500, 2_000, 8_000, 32_000)


@torch.inference_mode()
def measure(bench: Bench) -> list[Figure | Series]:
    """Time forks and what follows them."""
    return [*_fork_and_decode(bench), _by_length(bench)]


def _fork_and_decode(bench: Bench) -> list[Figure]:
    rows, query = new_rows(1), torch.randn(1, QUERY_HEADS, 64).to(DTYPE)
    forks: list[KvCacheHandle] = []

    def free_forks() -> None:
        while forks:
            forks.pop().free()

    with open_benchmark_cache(4 * LENGTH) as cache, cache.allocate() as source:
        prefill(source, LENGTH)

        def fork() -> None:
            forks.append(source.fork())

        def fork_and_decode() -> None:
            fork()
            decode(cache, forks[-1], rows, query)

        forked = bench.interleaved({"fork": fork}, rounds=200, between=free_forks)["fork"]
        steps = bench.interleaved(
            {"decode": lambda: decode(cache, source, rows, query), "fork and decode": fork_and_decode},
            rounds=25,
            between=free_forks,
        )
        free_forks()
    ratio = steps["fork and decode"] / steps["decode"]
    return [
        Figure.of(f"fork of {LENGTH} tokens", forked * 1e6, "µs", at_most=50),
        Figure.of("decode step, attention only", steps["decode"] * 1e3, "ms"),
        Figure.of("fork and first decode step, of a decode step", ratio, "x", at_most=1.25),
    ]


def _by_length(bench: Bench) -> Series:
    series = Series(name="Fork a sequence", x="tokens in the cache", y="µs")
    for length in LENGTHS[:2] if bench.quick else LENGTHS:
        dynamic = dynamic_cache(length)
        with open_benchmark_cache(length + 1_000) as cache, cache.allocate() as source:
            prefill(source, length)
            cases: dict[str, Callable[[], object]] = {
                "kvcache-core, fork and free": lambda: source.fork().free(),
                "copy.deepcopy(DynamicCache)": partial(copy.deepcopy, dynamic),
            }
            for name, samples in bench.interleaved(cases, rounds=7).items():
                series.add(name, length, samples.median * 1e6)
    return series
