"""The CPU backend's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvcache_core.plugin import KvCacheHandle

if TYPE_CHECKING:
    from kvcache_cpu.memory import SlotMemory
    from kvcache_cpu.storage import CpuStorage

__all__ = ["CpuKvCacheHandle"]


class CpuKvCacheHandle(KvCacheHandle):
    """A handle to a sequence in the machine's memory.

    `key_cache` and `value_cache` return views. To keep what they show beyond the handle's next truncate, or to save it
    to a file, clone them first: a view's storage spans the whole memory reserved for the sequence.
    """

    __slots__ = ()

    @property
    def memory(self) -> SlotMemory:
        """What the sequence's memory is like at the moment: kind, bytes, and what it shares with forks."""
        self.require_usable()
        storage = cast("CpuStorage", self.manager.storage)
        return storage.describe(self.sequence.slot)
