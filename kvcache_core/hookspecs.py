"""The hooks a plugin module can implement, and the careful call of one plugin's hooks.

pluggy checks the shape of the implementations. Each plugin gets a plugin manager of its own: a misspelt or
failing hook stays that plugin's trouble, nothing has to be rolled back, and no lock is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from kvcache_core.plugin import BackendDescriptor, HostInfo

if TYPE_CHECKING:
    from kvcache_core.events import CacheEvent

__all__ = ["PROJECT", "HookError", "KvCacheHooks", "event_hooks", "hookspec", "query_backends"]

#: pluggy's project name; also that of `kvcache_core.plugin.hookimpl`.
PROJECT = "kvcache_core"

hookspec = pluggy.HookspecMarker(PROJECT)


class KvCacheHooks:
    """The hooks of kvcache-core. They take one data object each, which can gain fields without breaking plugins."""

    @hookspec
    def kvcache_backends(self, host: HostInfo) -> Sequence[BackendDescriptor]:  # type: ignore[empty-body]
        """Return a descriptor for each backend this module provides, importing nothing heavy.

        Args:
            host: The kvcache-core that asks.
        """

    @hookspec
    def kvcache_event(self, event: CacheEvent) -> None:
        """Hear of something that happened in a cache whose configuration names this observer.

        Called outside all locks, one event after the other; an observer that raises is reported once.

        Args:
            event: What happened, as one of the classes of `kvcache_core.events`.
        """


class HookError(Exception):
    """A plugin module does not implement its hooks as specified."""


def query_backends(module: ModuleType, host: HostInfo) -> tuple[BackendDescriptor, ...]:
    """Return what a plugin module's `kvcache_backends` hooks declare.

    Raises:
        HookError: The module implements no such hook, or one of a wrong shape or result.
        Exception: Whatever the hook itself raises.
    """
    implementations = _implementations(module, "kvcache_backends")
    declared: list[BackendDescriptor] = []
    for implementation in implementations:
        declared += _checked(implementation(host))
    names = [descriptor.name for descriptor in declared]
    if len(set(names)) < len(names):
        raise HookError(f"kvcache_backends declares a backend twice: {', '.join(sorted(names))}")
    return tuple(declared)


def _checked(result: object) -> Iterable[BackendDescriptor]:
    if isinstance(result, Sequence) and all(isinstance(item, BackendDescriptor) for item in result):
        return result
    shown = type(result).__name__
    if isinstance(result, Sequence) and not isinstance(result, str):
        shown += " of " + ", ".join(sorted({type(item).__name__ for item in result}))
    raise HookError(f"kvcache_backends must return a list of BackendDescriptor, not {shown}")


def event_hooks(module: ModuleType) -> tuple[Callable[[CacheEvent], object], ...]:
    """Return a plugin module's `kvcache_event` hooks, to be called with each event.

    Raises:
        HookError: The module implements no such hook, or one of a wrong shape.
    """
    return tuple(_implementations(module, "kvcache_event"))


def _implementations(module: ModuleType, hook: str) -> list[Callable[[Any], Any]]:
    """Return a module's implementations of a hook, as functions of the one argument that every hook has."""
    # Anything else could compare, hash or evaluate properties as it likes, inside pluggy.
    if not isinstance(module, ModuleType):
        raise HookError(f"a plugin must be a module, not {type(module).__name__}")
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(KvCacheHooks)
    try:
        manager.register(module, module.__name__)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(name for name in vars(KvCacheHooks) if name.startswith("kvcache_"))
        raise HookError(f"{' '.join(str(error).split())} (the hooks are: {known})") from error
    found = getattr(manager.hook, hook).get_hookimpls()
    if not found:
        raise HookError(f"{module.__name__} implements no {hook} hook; mark the function with @hookimpl")
    return [partial(_call, implementation) for implementation in found]


def _call(implementation: pluggy.HookImpl, argument: object) -> Any:
    return implementation.function(*[argument for _ in implementation.argnames])
