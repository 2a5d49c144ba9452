"""The observers that a configuration names: found in installed metadata, and imported because they were named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcache_core import messages
from kvcache_core.disabling import Disabled
from kvcache_core.errors import ConfigError
from kvcache_core.hookspecs import event_hooks
from kvcache_core.loading import import_module
from kvcache_core.names import parse_request

if TYPE_CHECKING:
    from kvcache_core.discovery import Entry
    from kvcache_core.registry import BackendRegistry

__all__ = ["NamedObserver", "load_observer", "named_observers"]


class _Config(Protocol):
    @property
    def observers(self) -> Sequence[str]: ...
    def origin(self, key: str) -> str: ...


@dataclass(frozen=True)
class NamedObserver:
    """An observer that a plugin provides.

    Attributes:
        label: Its name and provider, as messages show them.
        hooks: Functions to call with each event.
    """

    label: str
    hooks: tuple[Callable[[Any], object], ...]


def named_observers(config: _Config, registry: BackendRegistry, switched_off: Disabled) -> list[NamedObserver]:
    """Import the observers that a configuration names, except those that are switched off.

    Raises:
        ConfigError: One is not installed, several distributions provide it, or its code raises.
    """
    found = []
    for name in config.observers:
        entry = _find(name, registry, config.origin("observers"))
        if not switched_off.ban_on(entry):
            found.append(load_observer(entry, config.origin("observers")))
    return found


def _find(name: str, registry: BackendRegistry, origin: str) -> Entry:
    request = parse_request(name)
    claims = [
        entry
        for entry in registry.observers()
        if entry.name == request.name and request.distribution in (None, entry.distribution.key)
    ]
    if len(claims) == 1:
        return claims[0]
    if claims:
        picks = messages.either([repr(claim.qualified) for claim in claims])
        problem = f"{len(claims)} installed distributions provide an observer named {name!r}; write {picks}"
    else:
        known = sorted({entry.name for entry in registry.observers()})
        guess = messages.suggestion(request.name, known)
        meant = f"did you mean {guess!r}? " if guess else ""
        problem = f"no observer named {name!r} is installed; {meant}(installed: {', '.join(known) or 'none'})"
    raise ConfigError(problem, key="observers", origin=origin)


def load_observer(entry: Entry, origin: str) -> NamedObserver:
    """Import an observer.

    Raises:
        ConfigError: Its code raises, or implements no hook; named as the fault of `origin`, which asked for it.
    """
    label = messages.label(entry.name, entry.distribution)
    try:
        return NamedObserver(label, event_hooks(import_module(entry.module)))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the observer {label} cannot be used: mend it, or take {entry.name!r} out of observers",
            key="observers",
            origin=origin,
            details=[f"importing {entry.module}: {messages.cause_line(error)}"],
        ) from error
