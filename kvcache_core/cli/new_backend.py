"""`kvcache new-backend NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcache_core.cli.output import JsonFlag, print_json

__all__ = ["new_backend"]


def new_backend(
    name: Annotated[str, typer.Argument(help="What users will write to choose it; letters, digits and hyphens.")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="A new or empty directory.", show_default="kvcache-NAME in the current directory"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the distribution of a new backend, complete with tests, to begin your own with."""
    from kvcache_core.scaffold import BackendNames, write_backend  # noqa: PLC0415 - only this command needs it

    names = BackendNames.of(name)
    folder = folder if folder is not None else Path(names.distribution)
    written = write_backend(names, folder)
    if as_json:
        print_json(
            {
                "name": names.name,
                "distribution": names.distribution,
                "package": names.package,
                "folder": str(folder),
                "files": [path.as_posix() for path in written],
            }
        )
        return
    typer.echo(f"{names.distribution}, with the backend {names.name!r}, is in {folder}:\n")
    for path in written:
        typer.echo(f"  {path.as_posix()}")
    typer.echo(
        f"\nNext:\n\n  pip install -e '{folder}[test]'\n  kvcache conformance {names.name}\n\n"
        f"Then make it yours, beginning with src/{names.package}/storage.py."
    )
