"""Attention over the pool on torch MPS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from typing_extensions import override

from kvcache_core.errors import UnsupportedError
from kvcache_core.paged import AttentionKernel, Tables, Upload
from kvcache_core.plugin import Batch
from kvcache_metal.attention import attend_visible, hidden_rows_are_harmless
from kvcache_metal.guards import Guards
from kvcache_metal.plan import Piece, PieceMaker, Reading, StepPlan
from kvcache_metal.pool import MetalPool

__all__ = ["MetalKernel"]


class MetalKernel(AttentionKernel):
    """Reads sequences out of their blocks, several at once where that fits, and attends to them in dense memory.

    Args:
        pool: The blocks.
        upload: Brings an index tensor to the device.
        guards: The guards in force.
    """

    name: ClassVar[str] = "mps"
    pool: MetalPool

    def __init__(self, pool: MetalPool, upload: Upload, guards: Guards) -> None:
        super().__init__(pool, upload)
        self._guards = guards
        self._maker = PieceMaker(pool, upload, guards)

    @override
    def plan(self, batch: Batch) -> StepPlan:
        return StepPlan(batch, self._maker)

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        plan: StepPlan = batch.plan
        asked = plan.queries(window, query.shape[1])
        dense = self._guards.contiguous_operands(query)
        out = [part for reading in asked.readings for part in self._attend(reading, layer, dense, scale, window)]
        together = self._guards.contiguous_operands(out[0] if len(out) == 1 else torch.cat(out))
        ordered = together[: batch.num_tokens] if asked.order is None else together.index_select(0, asked.order)
        return ordered.to(query.dtype)

    @override
    def decode(self, tables: Tables, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        raise UnsupportedError("MPS has no graphs to capture; use Step.attend", capability="graph_capture")

    def _attend(
        self, reading: Reading, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> Iterator[torch.Tensor]:
        """Read keys and values once, and attend to them; yields `[batch * tokens, num_heads, value_head_dim]`."""
        key, value = self.pool.take(layer, reading.places)
        compute = torch.promote_types(query.dtype, key.dtype)
        key, value = (rows.to(compute).view(reading.batch, reading.keys, *rows.shape[1:]) for rows in (key, value))
        for piece in reading.pieces:
            part = slice(piece.first_key, piece.first_key + piece.keys)
            asked = query.index_select(0, piece.query_rows).to(compute)
            if piece.hidden < piece.keys and not hidden_rows_are_harmless(
                self._guards, asked, key[0, part][piece.hidden :], value[0, part][piece.hidden :]
            ):
                yield self._one_by_one(piece, layer, query, scale, window)
                continue
            out = attend_visible(
                self._guards,
                asked.view(reading.batch, piece.tokens, *asked.shape[1:]),
                key[:, part],
                value[:, part],
                piece,
                scale=scale,
            )
            yield out.flatten(0, 1)

    def _one_by_one(
        self, piece: Piece, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """The slow path for memory that holds NaN or infinity: each query meets only the keys that it sees."""
        readings = self._maker.one_by_one(piece, window)
        rows = [row for reading in readings for row in self._attend(reading, layer, query, scale, window)]
        return torch.cat(rows + [rows[-1]] * (piece.tokens - len(rows)))
