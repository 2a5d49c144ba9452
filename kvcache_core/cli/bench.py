"""`kvcache bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_core.cli.model_options import let_waiting_threads_sleep
from kvcache_core.cli.output import JsonFlag, print_json, print_table
from kvcache_core.errors import BackendError

if TYPE_CHECKING:
    from kvcache_core.bench.figures import Figure
    from kvcache_core.bench.run import BenchReport

__all__ = ["bench"]

#: Share of the cores that others may keep busy without a word about it.
_QUIET = 0.25


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Suites to run, separated by commas or by repeating it.", show_default="all", metavar="SUITE"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds and small sizes, to see that it works. The figures mean little.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Folder to write PNG plots to. Needs matplotlib.", metavar="FOLDER")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: JsonFlag = False,
) -> None:
    r"""Measure against the caches that are installed, on the CPU backend.

    Ratios are taken round by round within one run; times depend on the machine. A peer that is not installed is named
    and not compared. Needs pip install 'kvcache-core\[bench]'.
    """
    _require_torch()
    from kvcache_core.bench.run import SUITES, run_suites  # noqa: PLC0415 - only this command needs it
    from kvcache_core.bench.session import Bench  # noqa: PLC0415
    from kvcache_core.cli.waiting import Waiting  # noqa: PLC0415

    let_waiting_threads_sleep()
    names = [name.strip() for entry in only or () for name in entry.split(",") if name.strip()]
    with Waiting() as waiting:
        waiting.phase("starting")
        shown = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if what != shown:
                shown = what
                waiting.phase(f"measuring {what}", total=total)
            waiting.advance_to(done, "rounds")

        report = run_suites(names or SUITES, Bench(quick=quick, progress=show))
    written = _draw(report, plots)
    if as_json:
        print_json({**report.as_dict(), "quick": quick, "plots": [str(path) for path in written]})
    elif markdown:
        from kvcache_core.bench.markdown import as_markdown  # noqa: PLC0415

        typer.echo(as_markdown(report), nl=False)
    else:
        _print_report(report)
        for path in written:
            typer.echo(f"wrote {path}")


def _require_torch() -> None:
    try:
        import torch  # noqa: F401, PLC0415
    except ImportError:
        raise BackendError("kvcache bench needs torch and a backend: pip install 'kvcache-core[bench]'") from None


def _draw(report: BenchReport, folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    from kvcache_core.bench.plots import draw  # noqa: PLC0415

    try:
        return draw([one for ones in report.series.values() for one in ones], folder)
    except ImportError:
        raise BackendError("plots need matplotlib: pip install 'kvcache-core[bench]'") from None


def _print_report(report: BenchReport) -> None:
    machine = report.machine
    typer.echo(f"{machine['processor']}, {machine['cores']} cores, torch {machine['versions'].get('torch', '?')}")
    if report.busy is not None and report.busy > _QUIET:
        typer.echo(f"Other work kept {report.busy:.0%} of the cores busy before this run: figures suffer.", err=True)
    rows = [_row(suite, figure) for suite, figures in report.figures.items() for figure in figures]
    print_table(("suite", "figure", "value", "quarter to three quarters", "target", ""), rows)
    for suite, why in report.skipped.items():
        typer.echo(f"{suite} was not measured: {why}")
    for peer, what in report.missing.items():
        typer.echo(f"{peer} is not installed, so there is no comparison with {what}")


def _row(suite: str, figure: Figure) -> tuple[str, ...]:
    spread = "" if figure.low is None else f"{figure.low:,.3g} to {figure.high:,.3g}"
    met = {None: "", True: "met", False: "missed"}[figure.met]
    return suite, figure.name, f"{figure.value:,.3g} {figure.unit}", spread, figure.target, met
