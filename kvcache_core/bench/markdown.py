"""A report as Markdown, for pages such as `benchmarks/RESULTS.md`."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache_core.bench.figures import Figure
from kvcache_core.bench.run import BenchReport

__all__ = ["as_markdown"]


def as_markdown(report: BenchReport) -> str:
    """Return the machine, a table for each suite, and what was not measured."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} threads; {machine['system']}; "
        f"Python {machine['python']}; {versions}; {machine['date'][:10]}."
    ]
    if report.busy is not None:
        lines += ["", f"Other work kept {report.busy:.0%} of the cores busy in the minute before."]
    for suite, figures in report.figures.items():
        lines += ["", f"### {suite}", "", *_table(figures)]
    notes = [f"{suite} was not measured: {why}" for suite, why in report.skipped.items()]
    notes += [f"{peer} is not installed: no comparison with {what}" for peer, what in report.missing.items()]
    return "\n".join([*lines, *(f"\n{note}." for note in notes)]) + "\n"


def _table(figures: Iterable[Figure]) -> Iterable[str]:
    yield "| figure | value | quarter to three quarters | target | |"
    yield "|---|---:|---:|---:|---|"
    for figure in figures:
        spread = "" if figure.low is None else f"{figure.low:,.3g} to {figure.high:,.3g}"
        met = {None: "", True: "met", False: "**missed**"}[figure.met]
        yield f"| {figure.name} | {figure.value:,.3g} {figure.unit} | {spread} | {figure.target} | {met} |"
