"""Whether a loaded class is the storage that the interface and its own descriptor promise."""

from __future__ import annotations

import inspect
from typing import Any

from kvcache_core.plugin import BackendDescriptor, KvCacheHandle, Storage

__all__ = ["storage_faults"]


def storage_faults(storage: Any, descriptor: BackendDescriptor) -> list[str]:
    """Say what keeps `storage` from being used; nothing when all is well."""
    if not inspect.isclass(storage):
        return [f"{storage!r} is not a class"]
    missing = [name for name in sorted(Storage.__abstractmethods__) if not _implements(storage, name)]
    own = sorted(set(getattr(storage, "__abstractmethods__", ())) - Storage.__abstractmethods__)
    faults = [f"missing methods: {', '.join([*missing, *own])}"] if missing or own else []
    if not issubclass(storage, Storage):
        return [*faults, "it does not subclass kvcache_core.plugin.Storage"]
    faults += _attribute_faults(storage, descriptor)
    return faults


def _implements(storage: type, name: str) -> bool:
    method = inspect.getattr_static(storage, name, None)
    return method is not None and not getattr(method, "__isabstractmethod__", False)


def _attribute_faults(storage: type[Storage], descriptor: BackendDescriptor) -> list[str]:
    faults = []
    placement = getattr(storage, "placement", None)
    if placement != descriptor.placement:
        faults.append(f"its placement is {placement!r} but its descriptor says {descriptor.placement!r}")
    handle_type = getattr(storage, "handle_type", None)
    if not (inspect.isclass(handle_type) and issubclass(handle_type, KvCacheHandle)):
        faults.append(f"its handle_type must be a subclass of KvCacheHandle, not {handle_type!r}")
    if not isinstance(getattr(storage, "dense_is_view", None), bool):
        faults.append("its dense_is_view must be True or False")
    undone = sorted(descriptor.capabilities - frozenset(storage.capabilities))
    if undone:
        faults.append(f"its descriptor declares capabilities that the class does not: {', '.join(undone)}")
    return faults
