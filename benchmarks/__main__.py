"""Run the benchmarks and print a table, or JSON."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks._measure import Figure, busy

NAMES = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(NAMES)}; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure against transformers' caches. Ratios within one run count; times depend on the machine."""
    unknown = sorted(set(only or ()) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(NAMES)}", param_hint="--only")
    console = Console(stderr=True)
    load = busy()
    if load > 0.25:
        console.print(f"[yellow]other work keeps {load:.0%} of this machine's cores busy; figures will suffer")
    results: dict[str, list[Figure]] = {}
    for name in only or NAMES:
        with console.status(f"measuring {name}"):
            results[name] = import_module(f"benchmarks.{name}").measure()
    if as_json:
        figures = {name: [figure.as_dict() for figure in found] for name, found in results.items()}
        print(json.dumps({"busy": load, "figures": figures}, indent=2))
    else:
        _print_table(results)


def _print_table(results: dict[str, list[Figure]]) -> None:
    table = Table("figure", "value", "target", "")
    for name, figures in results.items():
        table.add_section()
        for figure in figures:
            mark = {None: "", True: "[green]met", False: "[red]missed"}[figure.met]
            table.add_row(f"{name}: {figure.name}", f"{figure.value:,.3g} {figure.unit}", figure.target, mark)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
