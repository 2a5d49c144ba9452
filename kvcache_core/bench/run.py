"""Running suites, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.machine import busy, describe_machine, missing_peers
from kvcache_core.bench.session import Bench
from kvcache_core.errors import ConfigError, KvCacheError

__all__ = ["SUITES", "BenchReport", "run_suites"]

#: Name of a suite -> its module in `kvcache_core.bench.suites`.
SUITES = {
    "append": "append",
    "attend": "attend",
    "batch": "batch",
    "bookkeeping": "bookkeeping",
    "discovery": "discovery",
    "events": "events",
    "fork": "fork",
    "generate": "generate",
    "import": "startup",
    "memory": "memory",
    "prefix": "prefix",
}


@dataclass
class BenchReport:
    """What a run gave.

    Attributes:
        machine: See `describe_machine`.
        busy: Share of the cores that other work kept busy before the run, or None if unknown.
        missing: Peers that are not installed -> what was not compared for want of them.
        figures: Suite -> its figures.
        series: Suite -> its series.
        skipped: Suite -> why it gave nothing.
    """

    machine: dict[str, Any]
    busy: float | None
    missing: dict[str, str]
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    series: dict[str, list[Series]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine,
            "busy": self.busy,
            "missing_peers": self.missing,
            "figures": _as_dicts(self.figures),
            "series": _as_dicts(self.series),
            "skipped": self.skipped,
        }


def run_suites(names: Iterable[str], bench: Bench) -> BenchReport:
    """Run suites in the given order; one that cannot run here is noted, and the others go on.

    Raises:
        ConfigError: There is no such suite; none is run.
    """
    names = list(names)
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise ConfigError(f"there is no suite {', '.join(map(repr, unknown))}; choose from {', '.join(SUITES)}")
    report = BenchReport(machine=describe_machine(), busy=busy(), missing=missing_peers())
    for name in names:
        try:
            found = import_module(f"kvcache_core.bench.suites.{SUITES[name]}").measure(bench)
        except (KvCacheError, ImportError) as error:
            report.skipped[name] = str(error).splitlines()[0]
            continue
        report.figures[name] = [one for one in found if isinstance(one, Figure)]
        report.series[name] = [one for one in found if isinstance(one, Series)]
    return report


def _as_dicts(found: Mapping[str, Iterable[Figure | Series]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [one.as_dict() for one in ones] for name, ones in found.items()}
