"""The handle of a paged backend."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch

from kvcache_core.errors import ShapeError, WouldCopy
from kvcache_core.handle import KvCacheHandle

if TYPE_CHECKING:
    from kvcache_core.paged.storage import PagedStorage

__all__ = ["PagedKvCacheHandle"]


class PagedKvCacheHandle(KvCacheHandle):
    """A handle to a sequence whose tokens lie in blocks of a pool.

    `key_cache` and `value_cache` gather a copy. What needs none reads the pool through the block table.
    """

    __slots__ = ()

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V blocks of a layer, of all sequences, `[blocks, block_size, heads, dim]`: views at fixed addresses.

        Block ids are those of `block_table`. Block 0 is the null block and the last one the trash block. Whoever
        looks here sees other sequences' memory too.

        Raises:
            ShapeError: There is no such layer, or it caches nothing.
        """
        storage, producer = self._paged(layer)
        return storage.pool.key(producer), storage.pool.value(producer)

    def block_ids(self) -> torch.Tensor:
        """Ids of the blocks that hold the stored tokens, int32 `[blocks]`, on the device."""
        table = self.block_table
        used = table.physical_blocks[: table.blocks_needed_for_length(table.sequence_length)]
        return self.manager.storage.upload(torch.tensor(used, dtype=torch.int32))

    def dense(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as views, `[num_tokens, heads, dim]`; valid until the handle's next change.

        Raises:
            WouldCopy: The sequence's blocks are not neighbours in memory; `kv_cache` copies.
            ShapeError: There is no such layer, or it caches nothing.
        """
        storage, producer = self._paged(layer)
        table = self.block_table
        used = table.physical_blocks[: table.blocks_needed_for_length(table.sequence_length)]
        for before, block in pairwise(used):
            if block != before + 1:
                reason = f"block {before} is followed by block {block}"
                raise WouldCopy(
                    f"the tokens of {self.request_id!r} are not contiguous: {reason}; use kv_cache, which copies",
                    export="dense",
                    reason=reason,
                )
        first = used[0] * table.block_size if used else 0
        rows = slice(first, first + table.sequence_length)
        storage.order()
        return storage.pool.key_slots(producer)[rows], storage.pool.value_slots(producer)[rows]

    def _paged(self, layer: int) -> tuple[PagedStorage, int]:
        self.require_usable()
        producer = self.manager.geometry.producer(layer)
        if producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so there is nothing to read")
        return cast("PagedStorage", self.manager.storage), producer
