"""The typer application: its commands, each in a module of its own that imports heavy things inside."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache_core.cli.bench import bench
from kvcache_core.cli.conformance import conformance
from kvcache_core.cli.demo import demo
from kvcache_core.cli.doctor import doctor
from kvcache_core.cli.generate import generate
from kvcache_core.cli.listing import list_backends
from kvcache_core.cli.new_backend import new_backend
from kvcache_core.cli.output import command
from kvcache_core.cli.plan import plan
from kvcache_core.cli.schema import schema
from kvcache_core.cli.show import show

__all__ = ["app"]

app = typer.Typer(
    name="kvcache",
    help="One interface for the key/value cache of transformer inference, many memories behind it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command("list")(command(list_backends))
app.command("show")(command(show))
app.command("doctor")(command(doctor))
app.command("conformance")(command(conformance))
app.command("new-backend")(command(new_backend))
app.command("schema")(command(schema))
app.command("plan")(command(plan))
app.command("generate")(command(generate))
app.command("demo")(command(demo))
app.command("bench")(command(bench))


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvcache_core import _compat  # noqa: PLC0415 - reads installed metadata

        typer.echo(f"kvcache-core {_compat.core_version() or 'unknown'}")
        raise typer.Exit


@app.callback()
def _options_of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
