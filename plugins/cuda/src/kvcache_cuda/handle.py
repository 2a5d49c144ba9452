"""The CUDA backend's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvcache_core.paged import PagedKvCacheHandle

if TYPE_CHECKING:
    from kvcache_cuda.kernels import KernelReport
    from kvcache_cuda.storage import CudaStorage

__all__ = ["CudaKvCacheHandle"]


class CudaKvCacheHandle(PagedKvCacheHandle):
    """A handle to a sequence in blocks on the GPU."""

    __slots__ = ()

    @property
    def kernel_report(self) -> KernelReport:
        """Which kernel attends, and why not another."""
        self.require_usable()
        return cast("CudaStorage", self.manager.storage).kernel_report
