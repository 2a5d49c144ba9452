"""Attention by what torch ships: FlashAttention over block tables."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from typing_extensions import override

from kvcache_core.paged import AttentionKernel, ReferenceKernel, Tables
from kvcache_core.paged.reference import ReferencePlan
from kvcache_core.paged.tables import tables_of
from kvcache_core.plugin import Batch

__all__ = ["VarlenKernel"]


class StepPlan:
    """What all layers of a step share; each part is made when a layer needs it."""

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._reference: ReferencePlan | None = None

    def tables(self, batch: Batch) -> Tables:
        """For the kernel."""
        if self._tables is None:
            self._tables = tables_of(batch)
        return self._tables

    def for_reference(self, batch: Batch, kernel: ReferenceKernel) -> ReferencePlan:
        """For queries that the kernel does not take."""
        if self._reference is None:
            self._reference = kernel.plan(batch)
        return self._reference


class VarlenKernel(AttentionKernel):
    """`torch.nn.attention.varlen.varlen_attn` over the pool.

    Queries of another dtype than the stored one go to the reference: the kernel would round them.
    """

    name: ClassVar[str] = "varlen"

    @cached_property
    def _reference(self) -> ReferenceKernel:
        return ReferenceKernel(self.pool, self.upload, decodes_together=True)

    @override
    def plan(self, batch: Batch) -> StepPlan:
        return StepPlan()

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        plan: StepPlan = batch.plan
        if query.dtype is not self.pool.key(layer).dtype:
            return self._reference.attend_as_planned(
                plan.for_reference(batch, self._reference), layer, query, scale, window
            )
        return self._run(plan.tables(batch), layer, query, scale, window)

    @override
    def decode(self, tables: Tables, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        if query.dtype is not self.pool.key(layer).dtype:
            return super().decode(tables, layer, query, scale, window)
        return self._run(tables, layer, query, scale, window)

    def _run(self, tables: Tables, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - since torch 2.10; other kernels need no such

        key = self.pool.key(layer)
        out = varlen_attn(
            query if query.stride(-1) == 1 else query.contiguous(),
            key,
            self.pool.value(layer),
            tables.cu_seqlens_q,
            tables.cu_seqlens_k,
            tables.max_new_tokens,
            tables.max_seq_len,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[2],
            seqused_k=tables.seq_lens,
            block_table=tables.block_tables,
            num_splits=1,  # FlashAttention 2 may leave rows unwritten with any other number
        )
        return out if isinstance(out, torch.Tensor) else out[0]
