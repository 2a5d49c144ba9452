"""The tensors that the layers of one step read and write, cut out of a sequence's memory once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import ref

import torch

from kvcache_core.plugin import CacheGeometry, Segment
from kvcache_cpu.memory import Slot

__all__ = ["StepViews"]

Pair = tuple[torch.Tensor, torch.Tensor]


class StepViews:
    """One sequence's part of a step, layer by layer.

    A step may outlive its sequence, or be followed by many others, and must not hold the memory then. So a slot
    knows the views that were made last and clears them; those of an earlier step are cut again if need be.

    Attributes:
        slot: The sequence.
        num_new_tokens: Rows that the step adds.
        in_bulk: The memory wants to hear of each layer's write.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_geometry",
        "_start",
        "_stop",
        "_targets",
        "in_bulk",
        "num_new_tokens",
        "slot",
    )

    def __init__(self, segment: Segment, geometry: CacheGeometry, *, in_bulk: bool) -> None:
        self.slot: Slot = segment.slot
        self.num_new_tokens = segment.num_new_tokens
        self.in_bulk = in_bulk
        self._geometry = geometry
        self._start = segment.start
        self._stop = segment.stop
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

    def clear(self) -> None:
        """Let go of the memory."""
        self._targets = {}
        self._context = {}

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, Pair]]:
        length = stop - start
        cut: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
        cut = lambda rows: rows.narrow(2, start, length).transpose(1, 2).unbind(0)  # noqa: E731
        for group, keys, values in zip(self._geometry.groups, *self.slot.tensors, strict=True):
            yield from zip(group.layers, zip(cut(keys), cut(values), strict=True), strict=True)
