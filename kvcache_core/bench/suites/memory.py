"""Memory that sequences hold, as the kernel counts it, against the bytes of their tokens."""

from __future__ import annotations

import torch

from kvcache_core import KvCacheHandle, UnsupportedError
from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench
from kvcache_core.bench.workload import GEOMETRY, TOKEN_BYTES, decode, new_rows, open_benchmark_cache, prefill

__all__ = ["measure"]

#: Contiguous runs of one sequence: K and V of every kv head in every layer.
RUNS = GEOMETRY.num_layers * 3 * 2
PROMPT, OWN = 2_000, 100
MIB = 1 << 20


@torch.inference_mode()
def measure(bench: Bench) -> list[Figure | Series]:
    """Count the pages of sequences and forks.

    Raises:
        UnsupportedError: This system has no mapped memory, whose pages could be counted.
    """
    with open_benchmark_cache(100) as cache:
        if getattr(cache.storage, "memory_kind", None) != "mapped":
            raise UnsupportedError("pages can be counted on Linux only", capability="mapped memory")
    return [*_sequences(), *_forks(), _by_sequences(bench)]


def _pages(handle: KvCacheHandle) -> tuple[int, int]:
    """Bytes of the pages of one sequence: those of the file, which others may share, and private copies."""
    from kvcache_cpu.residency import residency

    mapping = handle.sequence.slot.mapping
    return residency(mapping.address, mapping.length)


def _sequences() -> list[Figure]:
    from kvcache_cpu.pages import PAGE

    figures = []
    with open_benchmark_cache(16_000) as cache:
        for length in (100, 1_000, 8_000):
            with cache.allocate() as handle:
                prefill(handle, length)
                exact = length * TOKEN_BYTES
                most = max(1.02, (exact + RUNS * PAGE) / exact)
                name = f"memory of {length} tokens, of their bytes"
                figures.append(Figure(name=name, value=sum(_pages(handle)) / exact, unit="x", at_most=most))
    return figures


def _forks() -> list[Figure]:
    from kvcache_cpu.pages import PAGE

    with open_benchmark_cache(40_000) as cache:
        with cache.allocate() as source:
            prefill(source, 8_000)
            with source.fork() as first, source.fork() as second:
                untouched = _pages(second)[1]
                for fork in (first, second):
                    decode(cache, fork, new_rows(1), None)
                touched = _pages(second)[1] / PAGE / RUNS
            kept = cache.storage.nbytes / (8_000 * TOKEN_BYTES)
        freed = cache.storage.nbytes
    return [
        Figure(name="private bytes of a fork", value=untouched, unit="bytes", at_most=0),
        Figure(name="private pages per run after a fork's first token", value=touched, unit="pages", at_most=1),
        Figure(name="storage bytes with the forks freed, of the tokens' bytes", value=kept, unit="x", at_most=1.02),
        Figure(name="storage bytes with all freed", value=freed, unit="bytes", at_most=0),
    ]


def _by_sequences(bench: Bench) -> Series:
    """Continuations of one prompt, each with tokens of its own; a DynamicCache holds a copy of the prompt for each."""
    series = Series(name=f"Continuations of one prompt of {PROMPT} tokens", x="continuations", y="MiB")
    for count in (1, 4) if bench.quick else (1, 2, 4, 8, 16, 32):
        with open_benchmark_cache(PROMPT + (count + 1) * (OWN + 100)) as cache, cache.allocate() as source:
            prefill(source, PROMPT)
            forks = [source.fork() for _ in range(count)]
            for fork in forks:
                prefill(fork, OWN)
            series.add("kvcache-core", count, cache.storage.nbytes / MIB)
            for fork in forks:
                fork.free()
        series.add("DynamicCache, from its tensors' sizes", count, count * (PROMPT + OWN) * TOKEN_BYTES / MIB)
    return series
