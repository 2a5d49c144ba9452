"""`kvcache doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_core.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from kvcache_core.discovery import DiscoveryProblem
    from kvcache_core.report import BackendReport, DoctorReport, ObserverReport

__all__ = ["doctor"]


def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds each backend has to answer.", min=0.1)] = 60.0,
    as_json: JsonFlag = False,
) -> None:
    """Try every installed backend and observer, and say what is wrong.

    Each is tried in a process of its own, so that one which hangs or crashes is reported like any other. The exit
    status is 1 when something that is installed is broken, incompatible or unreadable.
    """
    from kvcache_core.report import examine  # noqa: PLC0415 - only this command needs it

    report = examine(timeout=timeout)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.healthy:
        raise typer.Exit(1)


def _print(report: DoctorReport) -> None:
    typer.echo(f"kvcache-core {report.version or '(no metadata)'}, interface {report.interface}")
    typer.echo(f"Python {report.python} at {report.executable}, {report.platform}")
    if report.backends:
        typer.echo("\nBackends:\n")
        print_table(("BACKEND", "STATE", "INTERFACE", "PROVIDED BY"), [_row(backend) for backend in report.backends])
        for backend in report.backends:
            _print_findings(backend)
    else:
        typer.echo("\nNo backend is installed.")
    if report.observers:
        typer.echo("\nObservers:\n")
        rows = [(each.name, each.state, _owner(each)) for each in report.observers]
        print_table(("OBSERVER", "STATE", "PROVIDED BY"), rows)
        for observer in report.observers:
            if observer.reason:
                typer.echo(f"\n  {observer.qualified}\n    {observer.state}: {observer.reason}")
    if report.problems:
        typer.echo("\nInstalled metadata:")
        for problem in report.problems:
            _print_problem(problem)
    if report.environment:
        typer.echo("\nEnvironment:")
        for name, value in report.environment.items():
            typer.echo(f"  {name}={value}")
    typer.echo("\n" + ("Nothing is broken." if report.healthy else "Something that is installed is broken."))


def _row(backend: BackendReport) -> tuple[str, ...]:
    return backend.name, backend.state, backend.interface or "?", _owner(backend)


def _owner(plugin: BackendReport | ObserverReport) -> str:
    where = f"editable, {plugin.source or plugin.location}" if plugin.editable else plugin.location
    return f"{plugin.distribution} {plugin.version} ({where})"


def _print_findings(backend: BackendReport) -> None:
    typer.echo(f"\n  {backend.qualified}")
    if backend.device:
        typer.echo(f"    device: {backend.device}")
    if backend.reason:
        code = f" [{backend.code}]" if backend.code else ""
        typer.echo(f"    {backend.state}{code}: {backend.reason}")
    if backend.hint:
        typer.echo(f"    hint: {backend.hint}")
    if backend.ambiguous:
        typer.echo(f"    its name is taken twice: ask for it as {backend.qualified}")


def _print_problem(problem: DiscoveryProblem) -> None:
    line = f", line {problem.line}" if problem.line else ""
    owner = f"{problem.distribution}: " if problem.distribution else ""
    mark = "broken" if problem.breaks_plugin else "note"
    typer.echo(f"  {mark} [{problem.code}]: {owner}{problem.reason}\n    {problem.location}{line}")
