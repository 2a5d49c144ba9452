"""The storage of the Metal backend."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from typing_extensions import override

from kvcache_core.budget import format_bytes
from kvcache_core.errors import ConfigError
from kvcache_core.host_memory import host_memory
from kvcache_core.paged import AttentionKernel, PagedStorage
from kvcache_core.paged.host import lazy_zeros
from kvcache_core.plugin import Batch, DeviceMemory, KvCacheHandle, StorageSpec
from kvcache_metal.guards import Guards
from kvcache_metal.handle import MetalKvCacheHandle
from kvcache_metal.kernel import MetalKernel
from kvcache_metal.options import LARGEST_TENSOR, MetalOptions
from kvcache_metal.plan import StepPlan
from kvcache_metal.plugin import CAPABILITIES
from kvcache_metal.pool import MetalPool

__all__ = ["MetalStorage"]


class MetalStorage(PagedStorage):
    """Keys and values in a pool of blocks on an Apple GPU, or on the CPU where the options say so.

    Args:
        spec: What to build; `spec.options` is a `MetalOptions`, or None for the defaults.

    Attributes:
        guards: The guards against known faults of torch MPS that are in force.

    Raises:
        ConfigError: The GPU does not have the memory that the budget asks for, or a sequence could be too long.
    """

    handle_type: ClassVar[type[KvCacheHandle]] = MetalKvCacheHandle
    capabilities: ClassVar[frozenset[str]] = CAPABILITIES
    pool: MetalPool

    def __init__(self, spec: StorageSpec) -> None:
        self._options: MetalOptions = spec.options if spec.options is not None else MetalOptions()
        self._on_gpu = torch.device(spec.device).type == "mps"
        self.takes_memory_lazily = not self._on_gpu
        self.guards = Guards(self._options.disable_guards)
        super().__init__(spec)

    @classmethod
    @override
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        if torch.device(device).type != "mps":
            return host_memory()
        torch.mps.empty_cache()  # what torch keeps for later could not serve an allocation as large as a pool
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(total=total, free=max(0, total - torch.mps.driver_allocated_memory()))

    @override
    def make_pool(self) -> MetalPool:
        if self._on_gpu:
            self._require_memory()
        self._require_readable_sequences()
        most = self.guards.bounded_tensors(self.dtype, self._options.max_tensor_bytes)
        return MetalPool(self.spec, self.allocate, self.guards, most)

    def _require_memory(self) -> None:
        """Refuse a pool that does not fit: MPS would take it, and the whole machine would swap."""
        spec = self.spec
        free = self.device_memory(spec.device, None).free
        wanted = (spec.num_blocks + 2) * self.bytes_per_block
        if wanted > free:
            fitting = max(0, free // self.bytes_per_block - 2) * spec.block_size
            raise ConfigError(
                f"budget is too large for {self.device}: {format_bytes(wanted)} are needed and {format_bytes(free)} "
                f'of what Metal recommends are free; give "{fitting} tokens" or less',
                key="budget",
                details=[f"{spec.num_blocks} blocks of {spec.block_size} tokens were asked for"],
            )

    def _require_readable_sequences(self) -> None:
        """Refuse sequences that could not be read into one tensor."""
        most = self.guards.bounded_tensors(self.dtype, LARGEST_TENSOR)
        spec = self.spec
        widest = max(
            (group.num_kv_heads * max(group.head_dim, group.value_head_dim) for group in spec.geometry.groups),
            default=0,
        )
        longest = self.guards.bucketed_lengths(spec.max_sequence_length)
        if most is not None and longest * widest > most:
            fitting = 4 * (most // widest) // 5  # a bucket may be a quarter longer
            raise ConfigError(
                f"max_sequence_length {spec.max_sequence_length} is more than MPS can attend to at once; "
                f"give {fitting} or less",
                key="max_sequence_length",
                details=[f"a token has {widest} elements of K or V in a layer, and a tensor at most {most}"],
            )

    @override
    def allocate(self, num_elements: int) -> torch.Tensor:
        return super().allocate(num_elements) if self._on_gpu else lazy_zeros(num_elements, self.dtype)

    @override
    def upload(self, indices: torch.Tensor) -> torch.Tensor:
        return self.guards.blocking_uploads(indices, self.device)

    @override
    def make_kernel(self) -> AttentionKernel:
        return MetalKernel(self.pool, self.upload, self.guards)

    @override
    def context(self, batch: Batch, index: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        stop = batch.segments[index].stop
        if stop == 0:
            return super().context(batch, index, layer)
        plan: StepPlan = batch.plan
        return self.pool.take_tokens(layer, plan.places(index), stop)
