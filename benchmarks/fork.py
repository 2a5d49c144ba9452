"""Fork a long sequence, and the first decode step of the fork."""

from __future__ import annotations

import copy

import torch

from benchmarks._measure import (
    DTYPE,
    QUERY_HEADS,
    Figure,
    decode,
    interleaved,
    new_rows,
    open_benchmark_cache,
    prefill,
)
from benchmarks.append import dynamic_cache
from kvcache_core import KvCacheHandle
from kvcache_cpu.residency import residency

__all__ = ["measure"]

LENGTH = 8_000


@torch.inference_mode()
def measure(rounds: int = 25) -> list[Figure]:
    """Time forks and what follows them; count the bytes that they copy."""
    rows, query = new_rows(1), torch.randn(1, QUERY_HEADS, 64).to(DTYPE)
    dynamic = dynamic_cache(LENGTH)
    deepcopy_seconds = interleaved({"deepcopy": lambda: copy.deepcopy(dynamic)}, rounds=5)["deepcopy"]
    with open_benchmark_cache(4 * LENGTH) as cache, cache.allocate() as source:
        prefill(source, LENGTH)
        forks: list[KvCacheHandle] = []

        def fork() -> None:
            forks.append(source.fork())

        def fork_and_decode() -> None:
            fork()
            decode(cache, forks[-1], rows, query)

        def free_forks() -> None:
            while forks:
                forks.pop().free()

        fork_seconds = interleaved({"fork": fork}, rounds=100)["fork"]
        mapping = forks[-1].sequence.slot.mapping
        copied = residency(mapping.address, mapping.length).private
        free_forks()
        seconds = interleaved(
            {"decode": lambda: decode(cache, source, rows, query), "fork and decode": fork_and_decode},
            rounds=rounds,
            between=free_forks,
        )
    return [
        Figure(name=f"fork of {LENGTH} tokens", value=fork_seconds * 1e6, unit="µs", at_most=50),
        Figure(name="bytes copied by a fork", value=copied, unit="bytes", at_most=0),
        Figure(name=f"deepcopy of a DynamicCache of {LENGTH} tokens", value=deepcopy_seconds * 1e6, unit="µs"),
        Figure(name="decode step, attention only", value=seconds["decode"] * 1e3, unit="ms"),
        Figure(
            name="fork and first decode step, of a decode step",
            value=seconds["fork and decode"] / seconds["decode"],
            unit="x",
            at_most=1.25,
        ),
    ]
