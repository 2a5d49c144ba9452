"""The storage of the CPU backend: each sequence's rows of a layer are one strided tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from kvcache_core.errors import CacheFullError, ShapeError, UnsupportedError
from kvcache_core.host_memory import host_memory
from kvcache_core.plugin import (
    Batch,
    BlockCopy,
    DeviceMemory,
    KvCacheHandle,
    Placement,
    Storage,
    StorageSpec,
)
from kvcache_cpu.attention import attend, choose_kernels
from kvcache_cpu.handle import CpuKvCacheHandle
from kvcache_cpu.heap import HeapMemory
from kvcache_cpu.mapped import MappedMemory
from kvcache_cpu.memory import Memory, Slot, SlotMemory
from kvcache_cpu.native.kernel import MOST_NEW_TOKENS
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.pages import mapping_fault
from kvcache_cpu.views import StepPlan, StepViews

__all__ = ["CpuStorage"]


class CpuStorage(Storage):
    """Keys and values in the machine's memory, contiguous by sequence and layer.

    Args:
        spec: What to build; `spec.options` is a `CpuOptions`, or None for the defaults.
    """

    placement: ClassVar[Placement] = "contiguous"
    handle_type: ClassVar[type[KvCacheHandle]] = CpuKvCacheHandle
    dense_is_view: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[str]] = frozenset({"unequal_head_dims"})

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.device = torch.device("cpu")
        self.dtype = getattr(torch, spec.dtype)
        options = spec.options if spec.options is not None else CpuOptions()
        self._kernels = choose_kernels(options.attention, spec.geometry, spec.dtype)
        self._memory = _memory(spec, options, self.dtype)
        self._geometry = spec.geometry
        self._places = {
            layer: (number, index)
            for number, group in enumerate(spec.geometry.groups)
            for index, layer in enumerate(group.layers)
        }

    @classmethod
    @override
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return host_memory()

    @property
    def memory_kind(self) -> str:
        """Where sequences live: `"mapped"` or `"heap"`."""
        return self._memory.kind

    @property
    def attention_kind(self) -> str:
        """What attends over the layers of some group: `"native"` where the compiled kernel does, else `"torch"`."""
        return "native" if any(self._kernels) else "torch"

    # -- sequences ---------------------------------------------------------------------------------------

    @override
    def open(self, max_tokens: int) -> Any:
        return self._memory.open(max_tokens)

    @override
    def fork(self, slot: Slot, num_tokens: int) -> Any:
        _require_rows(slot, num_tokens)
        return self._memory.fork(slot, num_tokens)

    @override
    def shared_tokens(self, slot: Slot, num_tokens: int) -> int:
        return self._memory.shared_tokens(slot, num_tokens)

    @override
    def reserve(self, slot: Slot, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        if stop > slot.capacity:
            size = self.spec.block_size
            raise CacheFullError(
                f"a sequence opened for {slot.capacity} tokens cannot hold {stop}; open it with more max_tokens",
                needed=-(-(stop - slot.capacity) // size),
                free=0,
            )
        self._memory.reserve(slot, start, stop)

    @override
    def truncate(self, slot: Slot, num_tokens: int) -> None:
        _require_rows(slot, num_tokens)
        self._memory.truncate(slot, num_tokens)

    @override
    def close(self, slot: Slot) -> None:
        self._memory.close(slot)

    # -- data --------------------------------------------------------------------------------------------

    @override
    def plan(self, batch: Batch) -> StepPlan:
        return StepPlan(batch, self._geometry, self._memory)

    @override
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        plan: StepPlan = batch.plan
        group, index = self._places[layer]
        kernel, parts = self._kernels[group], plan.parts
        if kernel is None or plan.long or not kernel.store(plan.table(group), index, key, value):
            _copy_rows(parts, layer, key, value)
        for part in parts:
            if part.in_bulk:
                self._memory.after_write(part.slot, group, index)

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        plan: StepPlan = batch.plan
        group, index = self._places[layer]
        kernel = self._kernels[group]
        if kernel is not None and plan.short and kernel.takes(query):
            out = kernel.attend(plan.table(group), index, query, scale, window)
            for part in plan.long:
                rows = slice(part.row, part.row + part.num_new_tokens)
                out[rows] = attend(query[rows], *part.context(layer), scale=scale, window=window)
            return out
        if len(plan.parts) == 1:
            return attend(query, *plan.parts[0].context(layer), scale=scale, window=window)
        if not plan.parts:
            return query.new_empty(0, query.shape[1], self._value_dim(layer))
        queries = query.split_with_sizes([part.num_new_tokens for part in plan.parts])
        return torch.cat(
            [
                attend(rows, *part.context(layer), scale=scale, window=window)
                for part, rows in zip(plan.parts, queries, strict=True)
            ]
        )

    @override
    def prefers_attend(self, num_new_tokens: int) -> bool:
        return num_new_tokens <= MOST_NEW_TOKENS and any(self._kernels)

    def read(self, batch: Batch, layer: int) -> None:
        """Read what `attend` would and do nothing with it, to know what the memory allows.

        Raises:
            UnsupportedError: The compiled kernel does not serve this layer.
        """
        group, index = self._places[layer]
        kernel = self._kernels[group]
        if kernel is None:
            raise UnsupportedError("only the compiled kernel can do nothing but read", capability="read")
        kernel.read(batch.plan.table(group), index)

    def _value_dim(self, layer: int) -> int:
        return self._geometry.groups[self._places[layer][0]].value_head_dim

    @override
    def gather(
        self, slot: Slot, blocks: Sequence[int], num_tokens: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, index = self._places[layer]
        keys, values = slot.tensors
        key, value = keys[group][index], values[group][index]
        return key.narrow(1, 0, num_tokens).transpose(0, 1), value.narrow(1, 0, num_tokens).transpose(0, 1)

    @override
    def context(self, batch: Batch, index: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan: StepPlan = batch.plan
        return plan.parts[index].context(layer)

    def describe(self, slot: Slot) -> SlotMemory:
        """Return what a sequence's memory is like at the moment."""
        return self._memory.describe(slot)

    # -- the whole ---------------------------------------------------------------------------------------

    @property
    @override
    def nbytes(self) -> int:
        return self._memory.nbytes

    @override
    def shutdown(self) -> None:
        self._memory.shutdown()

    @override
    def audit(self) -> Iterable[str]:
        return self._memory.audit()


def _memory(spec: StorageSpec, options: CpuOptions, dtype: torch.dtype) -> Memory[Any]:
    if options.memory == "heap" or (options.memory == "auto" and mapping_fault() is not None):
        return HeapMemory(spec, dtype)
    return MappedMemory(spec, dtype)


def _copy_rows(parts: Sequence[StepViews], layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Have torch copy the new rows of each part to where they belong."""
    sizes = [part.num_new_tokens for part in parts]
    for part, new_keys, new_values in zip(
        parts, key.split_with_sizes(sizes), value.split_with_sizes(sizes), strict=True
    ):
        if part.num_new_tokens:
            keys, values = part.target(layer)
            keys.copy_(new_keys)
            values.copy_(new_values)


def _require_rows(slot: Slot, num_tokens: int) -> None:
    if not 0 <= num_tokens <= slot.capacity:
        raise ShapeError(f"a sequence opened for {slot.capacity} tokens has no {num_tokens} tokens")
