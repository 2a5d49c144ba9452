"""Attention and writes on a GPU, as shares of the bandwidth that a plain copy reaches on the same card.

`python benchmarks/gpu.py` prints the figures and, with `--record`, adds them to `benchmarks/RESULTS.md`. With
`--device cpu` the same code runs in a small size, to try the program: its figures mean nothing.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from kvcache_core import CacheGeometry, KvCacheManager, open_cache
from kvcache_core.bench.figures import Figure
from kvcache_core.paged import StaticDecode

RESULTS = Path(__file__).with_name("RESULTS.md")
BLOCK_SIZES = {"flashinfer": 16, "varlen": 256, "reference": 16}


@dataclass(frozen=True)
class Size:
    """What is measured: decode over `sequences` of `tokens`, and the writing of `written` tokens."""

    sequences: int
    tokens: int
    written: int
    rounds: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


CARD = Size(sequences=32, tokens=4096, written=16_384, rounds=30)
TRIAL = Size(sequences=3, tokens=64, written=128, rounds=2)


def measure_on(device: str, size: Size) -> list[Figure]:
    """Measure every kernel that is at hand."""
    bandwidth = _copy_bandwidth(device, size)
    figures = [Figure(name="copy bandwidth", value=bandwidth / 1e9, unit="GB/s")]
    for kernel in _kernels(device):
        figures += _measure_kernel(device, kernel, size, bandwidth)
    return figures


def _kernels(device: str) -> list[str]:
    if device == "cpu":
        return ["reference"]
    return [kernel for kernel in BLOCK_SIZES if kernel != "flashinfer" or find_spec("flashinfer")]


def _measure_kernel(device: str, kernel: str, size: Size, bandwidth: float) -> list[Figure]:
    geometry = CacheGeometry.uniform(1, size.kv_heads, size.head_dim)
    tokens = size.sequences * (size.tokens + 512) + size.written + 512
    options = {"kernel": kernel, "device": "cpu" if device == "cpu" else "auto"}
    with open_cache(
        backend="cuda",
        geometry=geometry,
        dtype="bfloat16",
        budget=f"{tokens} tokens",
        block_size=BLOCK_SIZES[kernel],
        max_sequence_length=max(size.tokens + 512, size.written),
        options=options,
    ) as cache:
        return [*_decode(cache, device, kernel, size, bandwidth), *_write(cache, device, kernel, size, bandwidth)]


def _decode(cache: KvCacheManager, device: str, kernel: str, size: Size, bandwidth: float) -> list[Figure]:
    handles = [cache.allocate() for _ in range(size.sequences)]
    rows = _rows(size.tokens - 1, size, device)
    for handle in handles:
        handle.append([(rows, rows)])
    rows = _rows(size.sequences, size, device)
    query = torch.randn(size.sequences, size.query_heads, size.head_dim, device=device).bfloat16()
    with cache.step(dict.fromkeys(handles, 1)) as step:
        step.write(0, rows, rows)
        seconds = _median(lambda: step.attend(0, query), device, size)
        figures = [_share(f"decode attention, {kernel}", _bytes_read(size), seconds, bandwidth, _aim(kernel))]
        if kernel != "flashinfer":
            blocks = -(-size.tokens // cache.block_size)
            static = StaticDecode(cache.storage, size.sequences, blocks)  # type: ignore[arg-type]
            static.load(step)
            seconds = _median(_captured(lambda: static.attend(0, query), device), device, size)
            figures.append(_share(f"the same, captured, {kernel}", _bytes_read(size), seconds, bandwidth, None))
    start = time.perf_counter()
    for _ in range(size.rounds):
        with cache.step(dict.fromkeys(handles, 1)) as step:
            step.write(0, rows, rows)
            step.attend(0, query)
    _wait(device)
    seconds = (time.perf_counter() - start) / size.rounds
    figures.append(Figure(name=f"whole decode step of one layer, {kernel}", value=seconds * 1e6, unit="µs"))
    for handle in handles:
        handle.free()
    return figures


def _write(cache: KvCacheManager, device: str, kernel: str, size: Size, bandwidth: float) -> list[Figure]:
    rows = _rows(size.written, size, device)
    with cache.allocate() as handle, cache.step({handle: size.written}) as step:
        batch = step.batch
        seconds = _median(lambda: cache.storage.write(batch, 0, rows, rows), device, size)
        step.mark_written()
    moved = 2 * 2 * rows.nbytes  # K and V, each read and written
    return [_share(f"write of {size.written} tokens, blocks of {cache.block_size}", moved, seconds, bandwidth, 70.0)]


def _aim(kernel: str) -> float | None:
    return 85.0 if kernel == "flashinfer" else None


def _share(name: str, moved: int, seconds: float, bandwidth: float, aim: float | None) -> Figure:
    return Figure(name=name, value=100 * moved / seconds / bandwidth, unit="% of a copy", at_least=aim)


def _bytes_read(size: Size) -> int:
    return size.sequences * size.tokens * size.kv_heads * size.head_dim * 2 * 2


def _rows(count: int, size: Size, device: str) -> torch.Tensor:
    return torch.randn(count, size.kv_heads, size.head_dim, device=device).bfloat16()


def _copy_bandwidth(device: str, size: Size) -> float:
    """Bytes read and written per second by a copy of as many bytes as decode attention reads."""
    source = torch.ones(_bytes_read(size), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median(lambda: target.copy_(source), device, size)


def _median(case: Callable[[], object], device: str, size: Size) -> float:
    """Median seconds of a call, by the device's own clock."""
    for _ in range(3):
        case()
    times = []
    for _ in range(size.rounds):
        if device == "cpu":
            start = time.perf_counter()
            case()
            times.append(time.perf_counter() - start)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        case()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _captured(case: Callable[[], object], device: str) -> Callable[[], object]:
    if device == "cpu":
        return case
    case()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case()
    return graph.replay


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program in a small size.")] = "cuda",
    record: Annotated[bool, typer.Option(help="Add the figures to RESULTS.md.")] = False,
) -> None:
    """Measure attention and writes on a GPU."""
    figures = measure_on(device, TRIAL if device == "cpu" else CARD)
    card = torch.cuda.get_device_name(0) if device != "cpu" else f"CPU trial, {platform.machine()}"
    lines = [f"## {card}, {date.today()}, torch {torch.__version__}", "", "| figure | value | aim |", "|---|---|---|"]
    lines += [f"| {figure.name} | {figure.value:,.3g} {figure.unit} | {figure.target} |" for figure in figures]
    text = "\n".join(lines) + "\n"
    print(text)
    if record and device != "cpu":
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    typer.run(main)
