"""Attention by FlashInfer's paged kernels, where it is installed."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import override

from kvcache_core.paged import AttentionKernel, BlockPool, ReferenceKernel
from kvcache_core.paged.tables import pages_of
from kvcache_core.plugin import Batch

__all__ = ["FlashInferKernel"]

#: Bytes in which a kernel keeps the partial results of long sequences; what FlashInfer's documentation advises.
_WORKSPACE_BYTES = 128 * 1024 * 1024


class _Shape(NamedTuple):
    """What a FlashInfer plan depends on besides the batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int
    dtype: torch.dtype


class _Idle(NamedTuple):
    """A wrapper that no step uses, and when the device is done with it."""

    wrapper: Any
    done: torch.cuda.Event


class _Wrappers:
    """FlashInfer's wrappers, which hold one plan at a time.

    A wrapper stages its plan through pinned memory of its own, so it serves the next step only once the device has
    done all that the step before has asked of it; until then another is taken.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._idle: list[_Idle] = []

    def take(self) -> Any:
        """Return a wrapper that nothing is waiting for."""
        for index, (wrapper, done) in enumerate(self._idle):
            if done.query():  # type: ignore[no-untyped-call,unused-ignore]
                del self._idle[index]
                return wrapper
        return self._make()

    def give_back(self, wrapper: Any, stream: torch.cuda.Stream) -> None:
        """Take back a wrapper whose work was asked of `stream`."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
        done.record(stream)
        self._idle.append(_Idle(wrapper, done))


class StepPlan:
    """The plans of one step, one for each shape among its layers.

    It goes, and its wrappers go back, with the batch that it is the plan of; so it must not hold that batch.
    """

    def __init__(self, kernel: FlashInferKernel, batch: Batch) -> None:
        self._decodes = all(segment.num_new_tokens == 1 for segment in batch.segments)
        self._wrappers = kernel.decode_wrappers if self._decodes else kernel.prefill_wrappers
        self._planned: dict[_Shape, Any] = {}
        self.reference = kernel.reference.plan(batch)

    def for_shape(self, batch: Batch, shape: _Shape) -> Any:
        """Return a wrapper that is planned for this batch and shape."""
        wrapper = self._planned.get(shape)
        if wrapper is None:
            wrapper = self._wrappers.take()
            stream = torch.cuda.current_stream(batch.device)
            weakref.finalize(self, self._wrappers.give_back, wrapper, stream).atexit = False
            self._plan(wrapper, batch, shape)
            self._planned[shape] = wrapper
        return wrapper

    def _plan(self, wrapper: Any, batch: Batch, shape: _Shape) -> None:
        pages = pages_of(batch)
        tables = (pages.indptr.on_host, pages.indices.on_device, pages.last_page_len.on_host)
        common = {
            "window_left": shape.window_left,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, batch.block_size)
        if self._decodes:
            wrapper.plan(*tables, *sizes, **common)
        else:
            wrapper.plan(pages.new_indptr.on_host, *tables, *sizes, causal=True, **common)


class FlashInferKernel(AttentionKernel):
    """FlashInfer's batch decode and batch prefill over the pool.

    Queries of another dtype than the stored one go to the reference: the kernel would round them.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(self, pool: BlockPool, upload: Any, device: torch.device) -> None:
        super().__init__(pool, upload)
        import flashinfer  # noqa: PLC0415 - installed only where somebody wants it

        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.reference = ReferenceKernel(pool, upload, decodes_together=True)
        self.decode_wrappers = _Wrappers(
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        )
        self.prefill_wrappers = _Wrappers(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))

    @override
    def plan(self, batch: Batch) -> StepPlan:
        return StepPlan(self, batch)

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        plan: StepPlan = batch.plan
        key, value = self.pool.key(layer), self.pool.value(layer)
        if query.dtype is not key.dtype:
            return self.reference.attend_as_planned(plan.reference, layer, query, scale, window)
        shape = _Shape(
            query.shape[1], key.shape[2], key.shape[3], scale, -1 if window is None else window - 1, query.dtype
        )
        out: torch.Tensor = plan.for_shape(batch, shape).run(query.contiguous(), (key, value))
        return out
