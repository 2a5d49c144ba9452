"""The step of a forward pass: takes each layer's K and V and returns what stands for those of all columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kvcache_core.integrations.transformers.dense import KeyValue, as_model_reads, padded
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.integrations.transformers.pass_plan import PassPlan
from kvcache_core.integrations.transformers.pending import StandIn, WrittenLayer, note_layer
from kvcache_core.integrations.transformers.rows import Row, discard, drop, forget, pick
from kvcache_core.manager import KvCacheManager

__all__ = ["OpenStep"]


class OpenStep:
    """A step over the rows that a pass stores; rows that several of the batch continue are forked for it.

    Args:
        manager: The cache.
        rows: The rows before the pass, which `abort` leaves as they are.
        plan: What the pass adds.
        pending: Whether `write` returns stand-ins, since our attention function reads the cache itself.
        packing: How the model's batch was packed before it ran, if it was: it then computes one row of tokens.

    Raises:
        CacheFullError: There is no room; nothing has changed.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        rows: Sequence[Row],
        plan: PassPlan,
        *,
        pending: bool,
        packing: Packing | None = None,
    ) -> None:
        self._former = rows
        self._plan = plan
        self._pending = pending
        stored = plan.stored_rows
        before = pick(rows, [plan.sources[number] for number in stored])
        try:
            self._step = manager.begin(
                {row.handle: plan.new_tokens[number] for row, number in zip(before, stored, strict=True)}
            )
        except BaseException:
            drop(before, keep=rows)
            raise
        self._rows = [plan.row_after(row, number) for row, number in zip(before, stored, strict=True)]
        self._model_packing = packing
        self._packing = (
            plan.packing(manager.device) if packing is None else Packing.of_one_row(plan.num_stored, manager.device)
        )
        self._prefers_attend = manager.storage.prefers_attend(plan.width)
        self._is_dense = plan.num_rows == 1 and not self._rows[0].gaps

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KeyValue:
        """Store the new K and V of a layer, `[rows, heads, new columns, dim]`.

        Returns:
            K and V `[rows, heads, columns, dim]` in their dtype: views of the cache, a padded copy, or stand-ins.
        """
        packing = self._packing
        self._step.write(layer, packing.pack(key), packing.pack(value))
        if not self._pending:
            keys, values = self._dense(layer, key.dtype, value.dtype)
            note_layer(keys, WrittenLayer(values, self._step, layer, packing, None, None, self._prefers_attend))
            return keys, values
        keys, values = self._stand_in(key), self._stand_in(value)
        dense = partial(self._dense, layer, key.dtype, value.dtype)
        note_layer(
            keys, WrittenLayer(values, self._step, layer, packing, self._model_packing, dense, prefers_attend=True)
        )
        return keys, values

    def commit(self) -> list[Row]:
        """Make the tokens part of the rows; returns the rows of the whole batch.

        Raises:
            CacheFullError: There is no room for the rows that repeat others; nothing has changed.
        """
        followers = self._plan.followers
        try:
            self._step.commit()
            if followers is None:
                return self._rows
        except BaseException:
            drop(self._rows, keep=self._former)
            raise
        try:
            return pick(self._rows, followers)
        except BaseException:
            forget(self._rows)  # rows repeat others only where the cache was empty before
            drop(self._rows, keep=self._former)
            raise

    def abort(self) -> None:
        """Leave the rows as they were before."""
        if self._step.state == "open" and self._former[0].handle.is_valid:
            self._step.abort()
        drop(self._rows, keep=self._former)

    def abandon(self) -> None:
        """As `abort`, but from a finalizer."""
        self._step.discard()
        discard(self._rows)

    def _dense(self, layer: int, key_dtype: torch.dtype, value_dtype: torch.dtype) -> KeyValue:
        step, plan = self._step, self._plan
        if self._is_dense:
            keys, values = as_model_reads(step.gather(layer))
        else:
            columns = plan.columns + plan.width
            keys, values = padded(self._rows, columns, lambda row: step.gather(layer, row.handle))
            if plan.followers is not None:
                followers = torch.tensor(plan.followers, device=keys.device)
                keys, values = keys.index_select(0, followers), values.index_select(0, followers)
        return keys.to(key_dtype), values.to(value_dtype)

    def _stand_in(self, new: torch.Tensor) -> torch.Tensor:
        """What stands for the K or V of all columns."""
        rows, heads, width, dim = new.shape
        return StandIn.empty((rows, heads, self._plan.columns + width, dim), new.dtype)
