"""The blocks: a sharded pool that is written and read as torch MPS can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad
from typing_extensions import override

from kvcache_core.paged import RowPlaces, ShardedPool, Upload, slots_of
from kvcache_core.plugin import StorageSpec
from kvcache_metal.guards import Guards

__all__ = ["MetalPool"]


class MetalPool(ShardedPool):
    """A sharded pool on MPS.

    Rows are stored with `index_put_`: `index_copy_` is missing in older releases, and slow before torch 2.13
    (pytorch#185750). Neither checks its indices (pytorch#189968), which is why slots are checked on the host.

    Args:
        spec: What to hold.
        allocate: Returns so many zeros as a flat tensor.
        guards: The guards in force.
        max_elements: Most elements of a tensor; None for any number.
    """

    def __init__(
        self,
        spec: StorageSpec,
        allocate: Callable[[int], torch.Tensor],
        guards: Guards,
        max_elements: int | None,
    ) -> None:
        self._guards = guards
        super().__init__(spec.geometry, spec.block_size, spec.num_blocks, allocate, max_elements=max_elements)

    @override
    def make_tensors(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return self._guards.whole_tensors(shapes, self._allocate)

    @override
    def put_rows(self, target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if len(slots):
            target.index_put_((slots,), self._guards.contiguous_operands(rows))

    def locate_tokens(self, blocks: Sequence[int], num_tokens: int, upload: Upload) -> RowPlaces:
        """Find the first tokens of a sequence, and rows of the null block up to a bucket's length."""
        slots = slots_of(blocks, self.block_size, 0, num_tokens)
        return self.locate(pad(slots, (0, self._guards.bucketed_lengths(num_tokens) - num_tokens)), upload)

    def take_tokens(self, layer: int, places: RowPlaces, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the tokens that were located; the memory holds nothing else."""
        key, value = self.take(layer, places)
        return key[:num_tokens], value[:num_tokens]

    @override
    def gather(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if num_tokens == 0:
            return super().gather(layer, blocks, 0, upload)
        return self.take_tokens(layer, self.locate_tokens(blocks, num_tokens, upload), num_tokens)
