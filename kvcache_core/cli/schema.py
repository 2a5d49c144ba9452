"""`kvcache schema [NAME]`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache_core.cli.output import JsonFlag, print_json

__all__ = ["schema"]


def schema(
    name: Annotated[str | None, typer.Argument(help="A backend whose options the schema should hold.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the JSON schema of a configuration file.

    An editor completes and checks files with it. With NAME it holds the options of that backend.
    """
    from kvcache_core.registry import get_registry  # noqa: PLC0415 - as the other, only this command needs it
    from kvcache_core.schema import config_schema  # noqa: PLC0415

    registry = get_registry()
    print_json(config_schema(registry, registry.describe(name) if name else None))
