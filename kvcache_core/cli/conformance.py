"""`kvcache conformance NAME`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_core.cli.model_options import BackendOptions, let_waiting_threads_sleep, parse_options
from kvcache_core.cli.output import JsonFlag, precision_in_words, print_json, print_table

if TYPE_CHECKING:
    from kvcache_core.conformance import ConformanceReport, Result, Subject

__all__ = ["conformance"]

_MOST_LINES = 12


def conformance(
    name: Annotated[str, typer.Argument(help="A backend, or distribution:backend.")],
    option: BackendOptions = None,
    device: Annotated[
        str, typer.Option("--device", help="Device by torch's name; auto for the one the backend would take.")
    ] = "auto",
    select: Annotated[
        str | None,
        typer.Option(
            "-k",
            help="Run only the tests whose name, or whose part's name, fits this expression, as pytest's -k.",
            metavar="EXPRESSION",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one test may take.", min=0.1)] = 600.0,
    as_json: JsonFlag = False,
) -> None:
    r"""Run the conformance kit on an installed backend.

    What to try is what the backend itself declares. It runs in a process of its own, so that a backend which hangs
    or crashes is reported as well. The exit status is 1 when a test fails. Needs pip install 'kvcache-core\[testing]'.
    """
    from kvcache_core.cli.waiting import Waiting  # noqa: PLC0415 - as the others, only this command needs it
    from kvcache_core.conformance import run_kit  # noqa: PLC0415

    let_waiting_threads_sleep()
    options = parse_options(option)
    with Waiting() as waiting:
        waiting.phase("starting")
        planned = 0

        def show(done: int, count: int, test: str) -> None:
            nonlocal planned
            if count != planned:
                planned = count
                waiting.phase(f"trying {name}", total=count)
            waiting.advance_to(done, "tests")

        report = run_kit(name, options=options, device=device, select=select, timeout=timeout, progress=show)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.conforms:
        raise typer.Exit(1)


def _print(report: ConformanceReport) -> None:
    for key, value in _declared(report.subject).items():
        typer.echo(f"{key:<13}{value}")
    typer.echo()
    print_table(
        ("PART", "PASSED", "FAILED", "SKIPPED", "SECONDS", ""),
        [
            (
                group.name,
                *(str(count or "-") for count in (group.passed, group.failed, group.skipped)),
                f"{group.seconds:.1f}",
                group.summary,
            )
            for group in report.groups.values()
        ],
    )
    skipped = Counter(test.reason for test in report.tests if test.outcome == "skipped")
    for reason, count in skipped.items():
        typer.echo(f"\nskipped {count}: {reason}", nl=False)
    if skipped:
        typer.echo()
    for test in report.tests:
        if test.outcome == "failed":
            _print_failure(test)
    _print_verdict(report)


def _declared(subject: Subject) -> dict[str, str]:
    """What was tried, in words."""
    untried = f" (not tried: {', '.join(subject.untried_dtypes)})" if subject.untried_dtypes else ""
    return {
        "backend": subject.backend + (f", {subject.distribution}" if subject.distribution else ""),
        "options": ", ".join(f"{key}={value}" for key, value in subject.options.items()) or "defaults",
        "device": subject.device,
        "dtypes": ", ".join(subject.dtypes) + untried,
        "block sizes": ", ".join(map(str, subject.block_sizes)),
        "capabilities": ", ".join(subject.capabilities) or "none beyond the contract",
        "reads back": precision_in_words(subject.round_trip_error),
    }


def _print_failure(test: Result) -> None:
    typer.echo(f"\nfailed: {test.group}: {test.name}")
    lines = test.reason.splitlines()
    for line in lines[:_MOST_LINES]:
        typer.echo(f"    {line}")
    if len(lines) > _MOST_LINES:
        typer.echo(f"    ... {len(lines) - _MOST_LINES} more lines; see --json")


def _print_verdict(report: ConformanceReport) -> None:
    done, failed = len(report.tests), report.count("failed")
    figures = f"{report.count('passed')} passed, {failed} failed, {report.count('skipped')} skipped"
    typer.echo(f"\n{figures} in {report.seconds:.0f} s")
    if report.ending is not None:
        typer.echo(f"It ended early, after {done} of {report.planned} tests: {report.ending}")
    if report.conforms:
        typer.echo(f"{report.subject.backend} conforms.")
    else:
        typer.echo(f"{report.subject.backend} does not conform.")
