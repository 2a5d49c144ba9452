"""How long it takes to find the backends among many installed distributions, beside the standard library's look-up.

Three backends hide among 500 and 2,000 distributions, of which one in three has console scripts; the files are warm.
The peer is `importlib.metadata.entry_points`, which reads the same directories, and gives up when one is damaged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import importlib_metadata  # noqa: F401 - before the path is changed; it then serves the standard library as well

from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench
from kvcache_core.discovery import scan
from kvcache_core.interface import ENTRY_POINT_GROUP

__all__ = ["measure"]

COUNTS = {500: 30.0, 2_000: None}


def measure(bench: Bench) -> list[Figure | Series]:
    """Scan each crowd, in turn with the standard library."""
    figures: list[Figure | Series] = []
    cases: dict[str, Callable[[], object]] = {
        "ours": scan,
        "theirs": partial(entry_points, group=ENTRY_POINT_GROUP),
    }
    for count, limit in COUNTS.items():
        with _crowd(count):
            if len(scan().entries) != 3:
                raise RuntimeError(f"found {scan().entries} instead of three backends")
            seconds = bench.interleaved(cases, rounds=15)
        peer = "importlib.metadata"
        ratio = seconds["ours"] / seconds["theirs"]
        figures += [
            Figure.of(f"find 3 backends among {count}", seconds["ours"] * 1e3, "ms", at_most=limit),
            Figure.of(f"{count}, importlib.metadata", seconds["theirs"] * 1e3, "ms", peer=peer),
            Figure.of(f"{count}, of importlib.metadata", ratio, "x", peer=peer),
        ]
    return figures


@contextmanager
def _crowd(count: int) -> Iterator[None]:
    """Have nothing on `sys.path` but so many distributions."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            name = f"package-{number}"
            metadata = Path(folder, f"package_{number}-1.0.dist-info")
            metadata.mkdir()
            description = "A line of the long description.\n" * 100
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n{description}")
            if number % (count // 3) == 7:
                (metadata / "entry_points.txt").write_text(
                    f"[{ENTRY_POINT_GROUP}]\nbackend-{number} = package.plugin\n"
                )
            elif number % 3 == 0:
                (metadata / "entry_points.txt").write_text("[console_scripts]\n" + f"{name} = package:main\n" * 2)
        before = sys.path[:]
        sys.path[:] = [folder]
        try:
            yield
        finally:
            sys.path[:] = before
