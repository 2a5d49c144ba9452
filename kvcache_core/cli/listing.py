"""`kvcache list`."""

from __future__ import annotations

import typer

from kvcache_core.cli.output import JsonFlag, print_json, print_table
from kvcache_core.disabling import Disabled
from kvcache_core.discovery import Entry
from kvcache_core.messages import FIRST_PARTY, install_command
from kvcache_core.registry import BackendRegistry, get_registry

__all__ = ["list_backends"]


def list_backends(as_json: JsonFlag = False) -> None:
    """List the installed backends.

    Reads metadata only: no plugin is imported and no device touched.
    """
    registry = get_registry()
    switched_off = Disabled.read()
    states = [(entry, *_state(entry, registry, switched_off)) for entry in registry.entries()]
    damaged = [problem for problem in registry.problems if problem.breaks_plugin]
    if as_json:
        print_json({"backends": [_as_json(*row) for row in states], "damaged": len(damaged)})
        return
    rows = [
        (entry.name, entry.distribution.name, entry.distribution.version, f"{state}{f': {why}' if why else ''}")
        for entry, state, why in states
    ]
    installed = {entry.name for entry, _, _ in states}
    rows += [
        (name, owner, "", f"not installed: {install_command(name)}")
        for name, owner in FIRST_PARTY.items()
        if name not in installed
    ]
    print_table(("BACKEND", "PROVIDED BY", "VERSION", "STATE"), rows)
    if damaged:
        typer.echo(f"{len(damaged)} damaged; see `kvcache doctor`", err=True)


def _state(entry: Entry, registry: BackendRegistry, switched_off: Disabled) -> tuple[str, str]:
    ban = switched_off.ban_on(entry)
    if ban is not None:
        return "disabled", f"by {ban.word!r} in {ban.origin}"
    if len(registry.claims(entry.name)) > 1:
        return "ambiguous", f"ask for it as {entry.qualified}"
    return "installed", ""


def _as_json(entry: Entry, state: str, why: str) -> dict[str, object]:
    owner = entry.distribution
    return {
        "name": entry.name,
        "qualified": entry.qualified,
        "distribution": owner.name,
        "version": owner.version,
        "location": owner.location,
        "editable": owner.editable,
        "module": entry.module,
        "state": state,
        "reason": why,
    }
