"""Attention over blocks in plain torch: exact on every device, and what all other kernels are measured by."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from kvcache_core.attention import attend_dense
from kvcache_core.batch import Batch
from kvcache_core.paged.gathering import SequenceRows
from kvcache_core.paged.kernel import AttentionKernel

__all__ = ["ReferenceKernel"]


class ReferenceKernel(AttentionKernel):
    """Reads each sequence out of its blocks and attends to it as to contiguous memory."""

    name: ClassVar[str] = "reference"

    @override
    def plan(self, batch: Batch) -> tuple[SequenceRows, ...]:
        size = self.pool.block_size
        return tuple(SequenceRows(segment, size, self.upload) for segment in batch.segments if segment.num_new_tokens)

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        return self.attend_rows(batch.plan, layer, query, scale, window)

    def attend_rows(
        self, parts: tuple[SequenceRows, ...], layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend as `attend` does, to what `plan` has returned."""
        key, value = self.pool.key(layer), self.pool.value(layer)
        out = [
            attend_dense(query[part.new_rows], part.of(key), part.of(value), scale=scale, window=window)
            for part in parts
        ]
        return out[0] if len(out) == 1 else torch.cat(out)
