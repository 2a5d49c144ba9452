"""What the benchmarks share: figures, interleaved timing, and the shape they measure."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager, open_cache

__all__ = [
    "DTYPE",
    "GEOMETRY",
    "QUERY_HEADS",
    "Figure",
    "busy",
    "decode",
    "interleaved",
    "new_rows",
    "open_benchmark_cache",
    "prefill",
]

#: The shape of SmolLM2-135M.
GEOMETRY = CacheGeometry.uniform(30, 3, 64, dtype="bfloat16")
QUERY_HEADS = 9
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One result.

    Attributes:
        name: What was measured.
        value: The number.
        unit: Its unit; `"x"` for ratios.
        at_most: The number it should not exceed, or None.
        at_least: The number it should reach, or None.
    """

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target."""
        if self.at_most is None and self.at_least is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        """The target in words, or an empty string."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g} {self.unit}"
        return "" if self.at_least is None else f"≥ {self.at_least:g} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}


def busy() -> float:
    """Share of the machine's cores that other work kept busy during the last minute; above 0.25 figures suffer."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def interleaved(
    cases: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 3,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Return the median seconds of each case, all run in turn in every round.

    What disturbs the machine then disturbs all of them alike, so that their ratios mean something. `between` runs after
    each case and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + rounds):
            for name, case in cases.items():
                start = time.perf_counter()
                case()
                taken = time.perf_counter() - start
                if round_ >= warmup:
                    times[name].append(taken)
                between()
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def open_benchmark_cache(tokens: int) -> KvCacheManager:
    """Open a CPU cache with room for `tokens`."""
    return open_cache(backend="cpu", geometry=GEOMETRY, budget=f"{tokens} tokens", max_sequence_length=10_000)


def new_rows(num_tokens: int) -> torch.Tensor:
    """Keys or values of so many tokens in one layer."""
    return torch.randn(num_tokens, 3, 64).to(DTYPE)


def prefill(handle: KvCacheHandle, num_tokens: int) -> None:
    """Store random tokens."""
    rows = new_rows(num_tokens)
    handle.append([(rows, rows)] * GEOMETRY.num_layers)


def decode(cache: KvCacheManager, handle: KvCacheHandle, rows: torch.Tensor, query: torch.Tensor | None) -> None:
    """Store one more token, and attend over all if there is a query."""
    with cache.step({handle: rows.shape[0]}) as step:
        for layer in range(GEOMETRY.num_layers):
            step.write(layer, rows, rows)
            if query is not None:
                step.attend(layer, query)
