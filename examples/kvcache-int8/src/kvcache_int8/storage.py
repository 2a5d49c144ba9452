"""The storage of the int8 backend."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from kvcache_core import BackendUnavailableError
from kvcache_core.paged import AttentionKernel, PagedStorage
from kvcache_core.plugin import CacheGeometry, DeviceMemory, KvCacheHandle, StorageSpec, host_memory

from kvcache_int8.handle import Int8KvCacheHandle
from kvcache_int8.kernel import Int8Kernel
from kvcache_int8.options import Int8Options
from kvcache_int8.plugin import CAPABILITIES
from kvcache_int8.pool import Int8Pool, bytes_per_token

__all__ = ["Int8Storage"]


class Int8Storage(PagedStorage):
    """Keys and values in 8 bits, in a pool of blocks on any device that torch has.

    Args:
        spec: What to build; `spec.options` is an `Int8Options`, or None for the defaults.

    Raises:
        BackendUnavailableError: torch does not have the device.
    """

    handle_type: ClassVar[type[KvCacheHandle]] = Int8KvCacheHandle
    capabilities: ClassVar[frozenset[str]] = CAPABILITIES

    pool: Int8Pool

    def __init__(self, spec: StorageSpec) -> None:
        self._options: Int8Options = spec.options or Int8Options()
        try:
            torch.empty(0, device=spec.device)
        except (RuntimeError, AssertionError) as error:  # torch built without it, or no such device
            reason = str(error).splitlines()[0]
            raise BackendUnavailableError(
                f"torch cannot use device {spec.device!r} ({reason}); choose another",
                code="no-device",
                reason=reason,
                backend="int8",
            ) from error
        super().__init__(spec)

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        """Return the memory from which a budget such as `"50%"` is taken."""
        if torch.device(device).type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return DeviceMemory(total=total, free=free)
        return host_memory()  # also that of a Mac's GPU

    @classmethod
    def bytes_per_token(cls, geometry: CacheGeometry, dtype: str, options: Any) -> int:
        """Return the bytes of a token in all layers: an element takes one, whatever the dtype, and a scale two."""
        return bytes_per_token(geometry)

    def make_pool(self) -> Int8Pool:
        """Take the memory."""
        return Int8Pool(self.spec, self.device, self.dtype)

    def make_kernel(self) -> AttentionKernel:
        """Attend over codes and scales."""
        return Int8Kernel(self.pool, self.upload, self.dtype, self._options.chunk_tokens)
