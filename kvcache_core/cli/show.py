"""`kvcache show NAME`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvcache_core.cli.model_options import BackendOptions, parse_options
from kvcache_core.cli.output import JsonFlag, precision_in_words, print_json, print_table

__all__ = ["show"]


def show(
    name: Annotated[str, typer.Argument(help="A backend, or distribution:backend.")],
    option: BackendOptions = None,
    timeout: Annotated[float, typer.Option(help="Seconds its probe has to answer.", min=0.1)] = 30.0,
    as_json: JsonFlag = False,
) -> None:
    """Describe a backend, its options and whether it runs here."""
    from kvcache_core.discovery import Entry  # noqa: PLC0415 - as the others, only this command needs it
    from kvcache_core.registry import get_registry  # noqa: PLC0415
    from kvcache_core.report import try_backend  # noqa: PLC0415
    from kvcache_core.schema import list_options  # noqa: PLC0415

    registry = get_registry()
    found = registry.find(name)
    backend = registry.describe(found)
    options = [asdict(option) for option in list_options(registry, backend)]
    asked = parse_options(option)
    trial = try_backend(found, timeout=timeout, load=False, options=asked) if isinstance(found, Entry) else {}
    facts = {**_declared(backend.descriptor), "distribution": None, "options": options, "probe": trial}
    if backend.distribution is not None:
        facts["distribution"] = asdict(backend.distribution)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _declared(descriptor: Any) -> dict[str, Any]:
    return {
        "name": descriptor.name,
        "summary": descriptor.summary,
        "interface": ".".join(map(str, descriptor.interface)),
        "placement": descriptor.placement,
        "devices": list(descriptor.devices),
        "dtypes": list(descriptor.dtypes),
        "round_trip_error": descriptor.round_trip_error,
        "capabilities": sorted(descriptor.capabilities),
        "priority": descriptor.priority,
        "block_sizes": list(descriptor.block_sizes),
        "default_block_size": descriptor.default_block_size,
        "storage": descriptor.storage,
    }


def _print(facts: dict[str, Any]) -> None:
    owner, trial = facts["distribution"], facts["probe"]
    typer.echo(f"{facts['name']}: {facts['summary']}\n")
    here = ", ".join(str(trial[key]) for key in ("device", "reason") if trial.get(key))
    if trial.get("hint"):
        here += f"; {trial['hint']}"
    sizes = ", ".join(map(str, facts["block_sizes"])) or "any power of two"
    lines = {
        "here": f"{trial.get('state', 'not tried')}{f' ({here})' if here else ''}",
        "provided by": f"{owner['name']} {owner['version']}, {owner['location']}" if owner else "this program",
        "interface": facts["interface"],
        "placement": facts["placement"],
        "devices": ", ".join(facts["devices"]),
        "dtypes": ", ".join(facts["dtypes"]),
        "reads back": precision_in_words(facts["round_trip_error"]),
        "block sizes": f"{sizes}; {facts['default_block_size']} unless configured",
        "capabilities": ", ".join(facts["capabilities"]) or "none beyond the contract",
        "priority": str(facts["priority"]),
    }
    width = max(map(len, lines))
    for key, value in lines.items():
        typer.echo(f"  {key:<{width}}  {value}")
    if not facts["options"]:
        typer.echo("\nIt has no options.")
        return
    typer.echo("\nOptions, as in [options] of a configuration file:\n")
    print_table(
        ("OPTION", "TYPE", "DEFAULT", "MEANING"),
        [
            (
                option["name"],
                option["type"],
                "(required)" if option["required"] else json.dumps(option["default"]),
                option["description"],
            )
            for option in facts["options"]
        ],
    )
