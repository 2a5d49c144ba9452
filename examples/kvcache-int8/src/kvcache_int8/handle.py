"""The handle of the int8 backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from kvcache_core import ShapeError
from kvcache_core.paged import PagedKvCacheHandle

if TYPE_CHECKING:
    from kvcache_int8.storage import Int8Storage

__all__ = ["Int8KvCacheHandle"]


class Int8KvCacheHandle(PagedKvCacheHandle):
    """A handle to a sequence that is stored in 8 bits.

    `key_cache` and `value_cache` convert to the cache's dtype.
    """

    __slots__ = ()

    def quantised(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Copy what is stored of one layer, K and V each as codes and scales; their product is the rows.

        Codes are int8 `[num_tokens, num_kv_heads, dim]`, scales bfloat16 `[num_tokens, num_kv_heads, 1]`.

        Raises:
            ShapeError: There is no such layer, or it caches nothing.
        """
        self.require_usable()
        producer = self.manager.geometry.producer(layer)
        if producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so there is nothing to read")
        storage, table = cast("Int8Storage", self.manager.storage), self.block_table
        return storage.pool.gather_quantised(producer, table.physical_blocks, table.sequence_length, storage.upload)
