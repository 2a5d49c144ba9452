"""`kvcache list`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer

from kvcache_core.cli.output import JsonFlag, print_json, print_table
from kvcache_core.disabling import Disabled
from kvcache_core.discovery import Entry
from kvcache_core.messages import FIRST_PARTY, install_command
from kvcache_core.registry import get_registry

__all__ = ["list_backends"]


def list_backends(as_json: JsonFlag = False) -> None:
    """List the installed backends and observers.

    Reads metadata only: no plugin is imported and no device touched.
    """
    registry = get_registry()
    switched_off = Disabled.read()
    states = _states(registry.entries(), switched_off)
    observers = _states(registry.observers(), switched_off)
    damaged = [problem for problem in registry.problems if problem.breaks_plugin]
    if as_json:
        listed = {"backends": [_as_json(*row) for row in states], "observers": [_as_json(*row) for row in observers]}
        print_json({**listed, "damaged": len(damaged)})
        return
    rows = [_row(*row) for row in states]
    installed = {entry.name for entry, _, _ in states}
    rows += [
        (name, owner, "", f"not installed: {install_command(name)}")
        for name, owner in FIRST_PARTY.items()
        if name not in installed
    ]
    print_table(("BACKEND", "PROVIDED BY", "VERSION", "STATE"), rows)
    if observers:
        typer.echo()
        print_table(("OBSERVER", "PROVIDED BY", "VERSION", "STATE"), [_row(*row) for row in observers])
    if damaged:
        typer.echo(f"{len(damaged)} damaged; see `kvcache doctor`", err=True)


_Row = tuple[Entry, str, str]


def _states(entries: Sequence[Entry], switched_off: Disabled) -> list[_Row]:
    """Each entry with its state and the reason."""
    claims = Counter(entry.name for entry in entries)
    return [(entry, *_state(entry, claims[entry.name] > 1, switched_off)) for entry in entries]


def _state(entry: Entry, is_ambiguous: bool, switched_off: Disabled) -> tuple[str, str]:
    ban = switched_off.ban_on(entry)
    if ban is not None:
        return "disabled", f"by {ban.word!r} in {ban.origin}"
    if is_ambiguous:
        return "ambiguous", f"ask for it as {entry.qualified}"
    return "installed", ""


def _row(entry: Entry, state: str, why: str) -> tuple[str, ...]:
    owner = entry.distribution
    return entry.name, owner.name, owner.version, f"{state}{f': {why}' if why else ''}"


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
