"""The storage of the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from typing_extensions import override

from kvcache_core.budget import format_bytes
from kvcache_core.errors import BackendUnavailableError, ConfigError, ShapeError
from kvcache_core.host_memory import host_memory
from kvcache_core.paged import AttentionKernel, BlockPool, PagedStorage, ReferenceKernel
from kvcache_core.paged.host import lazy_zeros
from kvcache_core.paged.host_tier import HostTier
from kvcache_core.plugin import Batch, DeviceMemory, KvCacheHandle, StorageSpec
from kvcache_cuda.handle import CudaKvCacheHandle
from kvcache_cuda.kernels import Situation, judge
from kvcache_cuda.options import CudaOptions
from kvcache_cuda.plugin import CAPABILITIES
from kvcache_cuda.streams import StreamOrder

__all__ = ["CudaStorage"]


class CudaStorage(PagedStorage):
    """Keys and values in a pool of blocks on one GPU, or on the CPU where the options say so.

    Args:
        spec: What to build; `spec.options` is a `CudaOptions`, or None for the defaults.

    Attributes:
        kernel_report: Which kernel attends, and why not another.
    """

    handle_type: ClassVar[type[KvCacheHandle]] = CudaKvCacheHandle
    capabilities: ClassVar[frozenset[str]] = CAPABILITIES
    pool: BlockPool

    def __init__(self, spec: StorageSpec) -> None:
        device = torch.device(spec.device)
        self._options: CudaOptions = spec.options if spec.options is not None else CudaOptions()
        self._on_gpu = device.type == "cuda"
        self._streams = StreamOrder(device) if self._on_gpu else None
        self.takes_memory_lazily = not self._on_gpu
        self.kernel_report = judge(self._options.kernel, _situation(spec, device))
        if self.kernel_report.chosen is None:
            raise BackendUnavailableError(
                f"{self.kernel_report}; set option kernel to 'auto'",
                code="kernel-unavailable",
                reason=str(self.kernel_report),
                backend="cuda",
            )
        super().__init__(spec)

    @classmethod
    @override
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        if torch.device(device).type != "cuda":
            return host_memory()
        torch.cuda.empty_cache()  # what torch keeps for later could not serve an allocation as large as a pool
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, free=free)

    # -- what the device does differently ------------------------------------------------------------------

    @override
    def allocate(self, num_elements: int) -> torch.Tensor:
        if not self._on_gpu:
            return lazy_zeros(num_elements, self.dtype)
        try:
            return super().allocate(num_elements)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(num_elements) from error

    def _no_memory(self, num_elements: int) -> ConfigError:
        free, _ = torch.cuda.mem_get_info(self.device)
        spec = self.spec
        wanted = num_elements * self.dtype.itemsize
        fitting = max(0, free // self.bytes_per_block) * spec.block_size
        return ConfigError(
            f"budget is too large for {self.device}: {format_bytes(wanted)} are needed at once and "
            f'{format_bytes(free)} are free; give "{fitting} tokens" or less',
            key="budget",
            details=[f"{spec.num_blocks} blocks of {spec.block_size} tokens were asked for"],
        )

    @override
    def make_kernel(self) -> AttentionKernel:
        chosen = self.kernel_report.chosen
        name = chosen.name if chosen else "reference"
        if name == "flashinfer":
            from kvcache_cuda.flashinfer import FlashInferKernel  # noqa: PLC0415 - needs FlashInfer

            return FlashInferKernel(self.pool, self.upload, self.device)
        if name == "varlen":
            from kvcache_cuda.varlen import VarlenKernel  # noqa: PLC0415 - needs torch 2.13

            return VarlenKernel(self.pool, self.upload)
        return ReferenceKernel(self.pool, self.upload, decodes_together=self._on_gpu)

    @override
    def upload(self, indices: torch.Tensor) -> torch.Tensor:
        if not self._on_gpu:
            return indices
        # Pinned memory of its own for each tensor: torch gives it to nobody else before the copy is done.
        return indices.pin_memory().to(self.device, non_blocking=True)

    @override
    def order(self) -> None:
        if self._streams is not None:
            self._streams.enter()

    @override
    def make_tier(self) -> HostTier | None:
        blocks = self._options.swap_blocks
        return HostTier(self.pool, blocks, self._allocate_on_host, self.upload) if blocks else None

    def _allocate_on_host(self, num_elements: int) -> torch.Tensor:
        if not self._on_gpu:
            return lazy_zeros(num_elements, self.dtype)
        return torch.zeros(num_elements, dtype=self.dtype, pin_memory=True)

    @override
    @contextmanager
    def swapping(self) -> Iterator[None]:
        if self._streams is None:
            yield
            return
        with self._streams.aside():
            yield

    @override
    def wait_for_swaps(self) -> None:
        if self._streams is not None:
            self._streams.wait_aside()

    @override
    def plan(self, batch: Batch) -> Any:
        if self._options.check_tables:
            self._check_tables(batch)
        return super().plan(batch)

    def _check_tables(self, batch: Batch) -> None:
        size, last = self.spec.block_size, self.spec.num_blocks
        for number, segment in enumerate(batch.segments):
            used = segment.blocks[: -(-segment.stop // size)]
            if not 0 <= segment.start <= segment.stop <= len(used) * size:
                raise ShapeError(
                    f"sequence {number}: positions {segment.start} to {segment.stop} do not fit {len(used)} blocks"
                )
            wrong = [block for block in used if not 1 <= block <= last]
            if wrong or len(set(used)) != len(used):
                raise ShapeError(f"sequence {number}: blocks {wrong or list(used)} are none of 1 to {last}, or doubled")


def _situation(spec: StorageSpec, device: torch.device) -> Situation:
    major, minor = torch.__version__.split(".")[:2]
    return Situation(
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        torch_version=(int(major), int(minor)),
        has_flashinfer=find_spec("flashinfer") is not None,
        dtype=spec.dtype,
        block_size=spec.block_size,
        geometry=spec.geometry,
    )
