"""Series as pictures that a person can look at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvcache_core.bench.figures import Series

__all__ = ["draw"]


def draw(series: Iterable[Series], folder: Path) -> list[Path]:
    """Write one PNG for each series into `folder`, which is made if it is not there; return their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in series:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for name, points in one.lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axes.set(title=one.name, xlabel=one.x, ylabel=one.y, xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        axes.set_xticks(sorted({x for points in one.lines.values() for x, _ in points}), minor=False)
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', one.name.lower()).strip('-')}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths
