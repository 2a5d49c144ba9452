"""What all commands share: JSON or a table on stdout, and errors as one message instead of a traceback."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ParamSpec, TextIO, TypeVar

import typer

from kvcache_core.errors import KvCacheError, KvCacheWarning

__all__ = ["ERROR_STATUS", "JsonFlag", "command", "precision_in_words", "print_json", "print_table"]

#: Exit status when a command could not do what it was asked to; click uses it for wrong usage as well.
ERROR_STATUS = 2

#: Every command takes `as_json: JsonFlag = False`.
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_WIDTH_OF_A_PIPE = 200


def command(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Make a function a command: errors of kvcache-core end it with one clean message, warnings are one line each.

    With `as_json` the error goes to stdout as `{"error": {...}}`, where a program reads it.
    """

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return function(*args, **kwargs)
            except KvCacheError as error:
                if kwargs.get("as_json"):
                    print_json({"error": _error_as_json(error)})
                else:
                    typer.echo(f"{type(error).__name__}: {error}", err=True)
                raise typer.Exit(ERROR_STATUS) from None

    return run


def _error_as_json(error: KvCacheError) -> dict[str, Any]:
    first, *details = str(error).splitlines()
    facts = {key: value for key, value in vars(error).items() if not key.startswith("_")}
    return {"type": type(error).__name__, "message": first, "details": [line.strip() for line in details], **facts}


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    where = "" if issubclass(category, KvCacheWarning) else f"{filename}:{lineno}: {category.__name__}: "
    typer.echo(f"warning: {where}{message}", err=True)


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their column names; nothing is cut when the output goes into a pipe."""
    from rich.console import Console  # noqa: PLC0415 - not needed for --json
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE).print(table)


def precision_in_words(round_trip_error: float) -> str:
    """What a backend reads back of what was written."""
    if round_trip_error:
        return f"within {round_trip_error:.2g} of the largest element of a row"
    return "every bit that was written"
