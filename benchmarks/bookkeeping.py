"""The books alone: naming prompts, finding and reserving blocks, decoding, freeing; against vLLM's where that is.

The trace: 200 requests, each of 1,024 tokens that all share and 200 to 1,000 of its own, in blocks of 16; then 64
decoded tokens each, 50 sequences at a time. Nothing is stored and nothing attends.

vLLM runs in an interpreter of its own: name one that can import `vllm.v1.core.kv_cache_manager` in the environment
variable `BENCH_VLLM_PYTHON`. Without it only our own figures are given.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks._measure import Figure
from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.paged import PagedStorage
from kvcache_core.plugin import Batch, DeviceMemory, StorageSpec

__all__ = ["measure", "trace"]

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
REQUESTS = 200
SHARED, OWN = 1024, (200, 1000)
BATCH, DECODED = 50, 64
VLLM_PYTHON = "BENCH_VLLM_PYTHON"


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


def measure() -> list[Figure]:
    """Run the trace over our books, and over vLLM's if there is an interpreter for it, in turn."""
    rounds: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    python = os.environ.get(VLLM_PYTHON)
    for _ in range(3):
        rounds.append(run_trace(trace()))
        if python:
            others.append(_run_vllm(python))
    ours = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    theirs = {name: statistics.median(each[name] for each in others) for name in others[0]} if others else {}
    figures = [
        Figure(name="admit a request (name, find, reserve)", value=ours["admit"], unit="µs"),
        Figure(name="free a request", value=ours["free"], unit="µs"),
        Figure(name="decode a token of one of 50 sequences", value=ours["decode"], unit="µs"),
        Figure(name="memory in blocks of 16 that holds no token", value=ours["waste"], unit="%", at_most=4),
        Figure(name="memory in blocks of 32 that holds no token", value=_waste_of(32), unit="%", at_most=4),
    ]
    for name, limit in (("admit", 0.5), ("free", 1.0), ("decode", 0.2)):
        if theirs:
            figures.append(Figure(name=f"{name}, vLLM", value=theirs[name], unit="µs"))
            ratio = ours[name] / theirs[name]
            figures.append(Figure(name=f"{name}, of vLLM's", value=ratio, unit="x", at_most=limit))
    return figures


def _waste_of(block_size: int) -> float:
    return run_trace(trace(), block_size)["waste"]


def run_trace(prompts: Sequence[list[int]], block_size: int = BLOCK_SIZE) -> dict[str, float]:
    """Return the microseconds of each operation, and the share of unused token slots in percent."""
    spec = StorageSpec(
        geometry=CacheGeometry.uniform(1, 1, 1),
        block_size=block_size,
        num_blocks=NUM_BLOCKS * BLOCK_SIZE // block_size,
        max_sequence_length=4096,
        dtype="float32",
        device="cpu",
    )
    settings = PrefixCacheConfig(enabled=True, namespace="model")
    with KvCacheManager(BooksOnly(spec), prefix=settings) as cache:
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
        "admit": seconds["admit"] / requests * 1e6,
        "free": seconds["free"] / requests * 1e6,
        "decode": seconds["decode"] / (requests * DECODED) * 1e6,
        "waste": 100 * (held - used) / held,
    }


def _run_vllm(python: str) -> dict[str, float]:
    task = {"prompts": trace(), "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "batch": BATCH, "decoded": DECODED}
    script = Path(__file__).with_name("_vllm_trace.py")
    done = subprocess.run([python, str(script)], input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{VLLM_PYTHON}={python} could not run the trace:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
