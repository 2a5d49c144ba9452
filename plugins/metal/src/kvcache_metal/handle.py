"""The Metal backend's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvcache_core.paged import PagedKvCacheHandle

if TYPE_CHECKING:
    from kvcache_metal.guards import Guards
    from kvcache_metal.storage import MetalStorage

__all__ = ["MetalKvCacheHandle"]


class MetalKvCacheHandle(PagedKvCacheHandle):
    """A handle to a sequence in blocks on an Apple GPU."""

    __slots__ = ()

    @property
    def guards(self) -> Guards:
        """The guards against known faults of torch MPS that are in force."""
        self.require_usable()
        return cast("MetalStorage", self.manager.storage).guards
