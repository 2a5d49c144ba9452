"""The tensors that the layers of one step read and write, cut out of a sequence's memory once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch

from kvcache_core.plugin import Batch, CacheGeometry, Segment
from kvcache_cpu.memory import Memory, Slot
from kvcache_cpu.native.kernel import MOST_NEW_TOKENS, Rows, RowsTable

__all__ = ["StepPlan", "StepViews"]

Pair = tuple[torch.Tensor, torch.Tensor]


class StepPlan:
    """What a step has prepared for all its layers.

    Attributes:
        parts: The views of each sequence.
        short: The parts with so few new tokens that the kernel serves them.
        long: The others.
    """

    __slots__ = ("_tables", "long", "parts", "short")

    def __init__(self, batch: Batch, geometry: CacheGeometry, memory: Memory[Any]) -> None:
        self._tables: dict[int, RowsTable] = {}
        self.parts = [StepViews(segment, geometry, self._tables, memory) for segment in batch.segments]
        self.short = [part for part in self.parts if part.num_new_tokens <= MOST_NEW_TOKENS]
        self.long = [part for part in self.parts if part.num_new_tokens > MOST_NEW_TOKENS]

    def table(self, group: int) -> RowsTable:
        """Where the rows of the short parts lie in a layer group."""
        table = self._tables.get(group)
        if table is None:
            table = self._tables[group] = RowsTable([part.rows(group) for part in self.short])
        return table


class StepViews:
    """One sequence's part of a step, layer by layer.

    A step may outlive its sequence, or be followed by many others, and must not hold the memory then. So a slot
    knows the views that were made last and clears them; those of an earlier step are cut again if need be.

    Attributes:
        slot: The sequence.
        num_new_tokens: Rows that the step adds.
        row: The first of them in packed tensors.
        in_bulk: The memory wants to hear of each layer's write.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_geometry",
        "_memory",
        "_start",
        "_stop",
        "_tables",
        "_targets",
        "in_bulk",
        "num_new_tokens",
        "row",
        "slot",
    )

    def __init__(
        self, segment: Segment, geometry: CacheGeometry, tables: dict[int, RowsTable], memory: Memory[Any]
    ) -> None:
        self.slot: Slot = segment.slot
        self.num_new_tokens = segment.num_new_tokens
        self.row = segment.row
        self.in_bulk = memory.wrote_in_bulk(segment.slot)
        self._memory = memory
        self._geometry = geometry
        self._start = segment.start
        self._stop = segment.stop
        self._tables = tables
        self._targets: dict[int, Pair] = {}
        self._context: dict[int, Pair] = {}
        self.slot.clear_views()
        self.slot.views = ref(self)

    def target(self, layer: int) -> Pair:
        """Where the new rows of a layer go: K `[new tokens, kv heads, head_dim]`, and V."""
        if not self._targets:
            self._targets = dict(self._cut(self._start, self._stop))
        return self._targets[layer]

    def context(self, layer: int) -> Pair:
        """All rows of a layer, the new ones included: K `[tokens, kv heads, head_dim]`, and V."""
        if not self._context:
            self._context = dict(self._cut(0, self._stop))
        return self._context[layer]

    def rows(self, group: int) -> Rows:
        """All rows of a layer group, the new ones included."""
        keys, values = self.slot.tensors
        elsewhere = self._memory.elsewhere(self.slot)
        return Rows(keys[group], values[group], self._stop, self.num_new_tokens, self.row, *elsewhere)

    def clear(self) -> None:
        """Let go of the memory."""
        self._targets = {}
        self._context = {}
        self._tables.clear()  # of all parts of the step

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, Pair]]:
        length = stop - start
        cut: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
        cut = lambda rows: rows.narrow(2, start, length).transpose(1, 2).unbind(0)  # noqa: E731
        for group, keys, values in zip(self._geometry.groups, *self.slot.tensors, strict=True):
            yield from zip(group.layers, zip(cut(keys), cut(values), strict=True), strict=True)
