"""Attention over blocks in plain torch: exact on every device, and what all other kernels are measured by."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from typing_extensions import override

from kvcache_core.attention import attend_dense
from kvcache_core.batch import Batch
from kvcache_core.paged.gathering import SequenceRows
from kvcache_core.paged.kernel import AttentionKernel
from kvcache_core.paged.pool import Pool, Upload
from kvcache_core.paged.tables import Tables, tables_of

__all__ = ["ReferenceKernel", "ReferencePlan"]

#: Decoding sequences are padded to the longest one only if that at most doubles what is read.
_MOST_PADDING = 2


class ReferencePlan(NamedTuple):
    """What all layers of a step share: the tables if its sequences are attended together, else each one's rows."""

    tables: Tables | None
    rows: tuple[SequenceRows, ...]


class ReferenceKernel(AttentionKernel):
    """Reads each sequence out of its blocks and attends to it as to contiguous memory.

    Args:
        pool: The blocks.
        upload: Brings an index tensor from the host to the device.
        decodes_together: Whether to attend for all sequences at once where each adds one token. On a device that is
            slow to start things that is much faster; the results differ in the last bits.
    """

    name: ClassVar[str] = "reference"

    def __init__(self, pool: Pool, upload: Upload, *, decodes_together: bool = False) -> None:
        super().__init__(pool, upload)
        self._decodes_together = decodes_together

    @override
    def plan(self, batch: Batch) -> ReferencePlan:
        if self._decodes_together and _is_even_decode(batch):
            return ReferencePlan(tables_of(batch), ())
        size = self.pool.block_size
        parts = (SequenceRows(segment, size, self.upload) for segment in batch.segments if segment.num_new_tokens)
        return ReferencePlan(None, tuple(parts))

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        return self.attend_as_planned(batch.plan, layer, query, scale, window)

    def attend_as_planned(
        self, plan: ReferencePlan, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend as `attend` does, by what `plan` has returned."""
        if plan.tables is not None:
            return self.decode(plan.tables, layer, query, scale, window)
        key, value = self.pool.key(layer), self.pool.value(layer)
        out = [
            attend_dense(query[part.new_rows], part.of(key), part.of(value), scale=scale, window=window)
            for part in plan.rows
        ]
        return out[0] if len(out) == 1 else torch.cat(out)


def _is_even_decode(batch: Batch) -> bool:
    """Whether each of several sequences adds one token, and they are of similar length."""
    segments = batch.segments
    if len(segments) < 2 or any(segment.num_new_tokens != 1 for segment in segments):
        return False
    return len(segments) * batch.max_seq_len <= _MOST_PADDING * sum(segment.stop for segment in segments)
