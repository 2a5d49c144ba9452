"""The paged storage of `kvcache_core.paged` on the CPU, and caches over it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kvcache_core import KvCacheManager
from kvcache_core.paged import PagedStorage
from kvcache_core.paged.host import lazy_zeros
from kvcache_core.plugin import DeviceMemory, StorageSpec
from tests.caches import make_cache


class HostPool(PagedStorage):
    """A pool in host memory, full of NaN where nobody has written: what must not be read shows."""

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "export.flash_attn",
            "export.flashinfer",
            "export.varlen",
            "export.vllm",
            "graph_capture",
            "unequal_head_dims",
        }
    )
    poison: ClassVar[float] = float("nan")

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        for section in self.pool.sections:
            section[:, 1:] = self.poison

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 29)


class LazyHostPool(PagedStorage):
    """A pool whose memory the system commits as it is touched."""

    takes_memory_lazily = True

    def allocate(self, num_elements: int) -> torch.Tensor:
        return lazy_zeros(num_elements, self.dtype)

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 40, free=1 << 40)


opened: list[KvCacheManager] = []


def open_pool(storage: type[PagedStorage] = HostPool, **changes: Any) -> Any:
    """A cache of 16 blocks of 4 tokens unless `changes` say otherwise; closed when the test ends."""
    cache = make_cache(storage, **changes)
    opened.append(cache)
    return cache
