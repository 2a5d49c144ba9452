"""What core and plugins have agreed on in writing: a version, and the names under which plugins are found."""

from __future__ import annotations

__all__ = ["ENTRY_POINT_GROUP", "INTERFACE_VERSION", "OBSERVER_GROUP"]

#: Version of the interface in `kvcache_core.plugin`. A plugin works if its major is the same and its minor no greater.
INTERFACE_VERSION: tuple[int, int] = (1, 0)

#: The entry-point group in which distributions name the plugin modules of their backends.
ENTRY_POINT_GROUP = "kvcache_core.backends"

#: The entry-point group in which distributions name the modules of their observers.
OBSERVER_GROUP = "kvcache_core.observers"
