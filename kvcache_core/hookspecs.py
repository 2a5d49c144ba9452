"""The hooks a plugin module can implement, and the careful call of one plugin's hooks.

pluggy checks the shape of the implementations. Each plugin gets a plugin manager of its own: a misspelt or
failing hook stays that plugin's trouble, nothing has to be rolled back, and no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

import pluggy

from kvcache_core.plugin import BackendDescriptor, HostInfo

__all__ = ["PROJECT", "HookError", "KvCacheHooks", "hookspec", "query_backends"]

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


class HookError(Exception):
    """A plugin module does not implement its hooks as specified."""


def query_backends(module: ModuleType, host: HostInfo) -> tuple[BackendDescriptor, ...]:
    """Return what a plugin module's `kvcache_backends` hooks declare.

    Raises:
        HookError: The module implements no such hook, or one of a wrong shape or result.
        Exception: Whatever the hook itself raises.
    """
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
    implementations = manager.hook.kvcache_backends.get_hookimpls()
    if not implementations:
        raise HookError(f"{module.__name__} implements no kvcache_backends hook; mark the function with @hookimpl")
    declared: list[BackendDescriptor] = []
    for implementation in implementations:
        arguments = [host for _ in implementation.argnames]
        declared += _checked(implementation.function(*arguments))
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
