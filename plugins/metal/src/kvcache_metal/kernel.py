"""Attention over the pool on torch MPS."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from kvcache_core.errors import UnsupportedError
from kvcache_core.paged import AttentionKernel, Tables
from kvcache_core.paged.pool import Upload
from kvcache_core.plugin import Batch
from kvcache_metal.attention import attend_visible, hidden_rows_are_harmless
from kvcache_metal.guards import Guards
from kvcache_metal.plan import Piece, PieceMaker, StepPlan
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
        pieces = plan.pieces(window, query.shape[1])
        out = [self._attend(piece, layer, query, scale, window) for piece in pieces.pieces]
        together = self._guards.contiguous_operands(out[0] if len(out) == 1 else torch.cat(out))
        ordered = together[: batch.num_tokens] if pieces.order is None else together.index_select(0, pieces.order)
        return ordered.to(query.dtype)

    @override
    def decode(self, tables: Tables, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        raise UnsupportedError("MPS has no graphs to capture; use Step.attend", capability="graph_capture")

    def _attend(self, piece: Piece, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attend a piece, `[batch * tokens, num_heads, value_head_dim]`."""
        query_rows = self._guards.contiguous_operands(query).index_select(0, piece.query_rows)
        key, value = self.pool.take(layer, piece.places)
        compute = torch.promote_types(query.dtype, key.dtype)
        query_rows, key, value = query_rows.to(compute), key.to(compute), value.to(compute)
        if piece.hidden < piece.keys and not hidden_rows_are_harmless(
            self._guards, query_rows, key[piece.hidden :], value[piece.hidden :]
        ):
            return self._one_by_one(piece, layer, query, scale, window)
        out = attend_visible(
            self._guards,
            query_rows.view(piece.batch, piece.tokens, *query_rows.shape[1:]),
            key.view(piece.batch, piece.keys, *key.shape[1:]),
            value.view(piece.batch, piece.keys, *value.shape[1:]),
            piece.visible,
            scale=scale,
            causal=piece.causal,
        )
        return out.flatten(0, 1)

    def _one_by_one(
        self, piece: Piece, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """The slow path for memory that holds NaN or infinity: each query meets only the keys that it sees."""
        rows = [self._attend(one, layer, query, scale, window) for one in self._maker.one_by_one(piece, window)]
        rows += [rows[-1]] * (piece.tokens - len(rows))
        return torch.cat(rows)
