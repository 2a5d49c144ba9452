"""Memory that sequences hold, as the kernel counts it, against the bytes of their tokens."""

from __future__ import annotations

import torch

from benchmarks._measure import GEOMETRY, Figure, decode, new_rows, open_benchmark_cache, prefill
from kvcache_core import KvCacheHandle
from kvcache_cpu.pages import PAGE
from kvcache_cpu.residency import residency

__all__ = ["measure"]

TOKEN_BYTES = GEOMETRY.bytes_per_token("bfloat16")
RUNS = GEOMETRY.num_layers * 3 * 2


def held(handle: KvCacheHandle) -> int:
    """Bytes of the pages of one sequence, those it shares included."""
    mapping = handle.sequence.slot.mapping
    return sum(residency(mapping.address, mapping.length))


def private(handle: KvCacheHandle) -> int:
    """Bytes of the pages that a sequence has copied."""
    mapping = handle.sequence.slot.mapping
    return residency(mapping.address, mapping.length).private


@torch.inference_mode()
def measure() -> list[Figure]:
    """Count pages of sequences and forks."""
    figures = []
    with open_benchmark_cache(40_000) as cache:
        for length in (100, 1_000, 8_000):
            with cache.allocate() as handle:
                prefill(handle, length)
                exact = length * TOKEN_BYTES
                figures.append(
                    Figure(
                        name=f"memory of {length} tokens, of their bytes",
                        value=held(handle) / exact,
                        unit="x",
                        at_most=max(1.02, (exact + RUNS * PAGE) / exact),
                    )
                )
        with cache.allocate() as source:
            prefill(source, 8_000)
            with source.fork() as first, source.fork() as second:
                figures.append(Figure(name="private bytes of a fork", value=private(second), unit="bytes", at_most=0))
                for fork in (first, second):
                    decode(cache, fork, new_rows(1), None)
                figures.append(
                    Figure(
                        name="private pages per run after a fork's first token",
                        value=private(second) / PAGE / RUNS,
                        unit="pages",
                        at_most=1,
                    )
                )
            figures.append(
                Figure(
                    name="storage bytes with the forks freed, of the tokens' bytes",
                    value=cache.storage.nbytes / (8_000 * TOKEN_BYTES),
                    unit="x",
                    at_most=1.02,
                )
            )
        figures.append(Figure(name="storage bytes with all freed", value=cache.storage.nbytes, unit="bytes", at_most=0))
    return figures
