"""A paged storage in plain torch: one pool of blocks a layer, tokens found through the block table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvcache_core.attention import attend_dense
from kvcache_core.plugin import Batch, BlockCopy, BlockRows, DeviceMemory, KvCacheHandle, Storage, StorageSpec


class PagedKvCacheHandle(KvCacheHandle):
    """A handle whose memory is a pool that the caller may look into."""

    __slots__ = ()

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pools of a layer, `[num_blocks + 1, block_size, num_kv_heads, head_dim]`."""
        storage = self.manager.storage
        assert isinstance(storage, PagedStorage)
        return storage.keys[layer], storage.values[layer]


class PagedStorage(Storage):
    placement = "paged"
    handle_type = PagedKvCacheHandle
    dense_is_view = False
    capabilities = frozenset({"unequal_head_dims"})

    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for group in spec.geometry.groups:
            for layer in group.layers:
                self.keys[layer] = self._pool(group.num_kv_heads, group.head_dim)
                self.values[layer] = self._pool(group.num_kv_heads, group.value_head_dim)

    def _pool(self, heads: int, dim: int) -> torch.Tensor:
        shape = (self.spec.num_blocks + 1, self.spec.block_size, heads, dim)
        with torch.inference_mode(mode=False):  # or the pool could only be written to in that mode
            return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)  # unwritten memory is poison

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 29)

    def open(self, max_tokens: int) -> None:
        return None

    def fork(self, slot: None, num_tokens: int) -> None:
        return None

    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        for pool in (*self.keys.values(), *self.values.values()):
            for copy in copies:
                pool[copy.target, : copy.rows] = pool[copy.source, : copy.rows]

    def truncate(self, slot: None, num_tokens: int) -> None:
        return None

    def close(self, slot: None) -> None:
        return None

    def scrub(self, rows: Iterable[BlockRows]) -> None:
        for pool in (*self.keys.values(), *self.values.values()):
            for block, start, stop in rows:
                pool[block, start:stop] = 0

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, batch.slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, batch.slot_mapping, value)

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], self.values[layer].shape[-1])
        for segment in batch.segments:
            rows = slice(segment.row, segment.row + segment.num_new_tokens)
            key, value = self.gather(segment.slot, segment.blocks, segment.stop, layer)
            out[rows] = attend_dense(query[rows], key, value, scale=scale, window=window)
        return out

    def gather(
        self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = torch.tensor(blocks[: -(-num_tokens // self.spec.block_size)], dtype=torch.long, device=self.device)
        key = self.keys[layer][used].flatten(0, 1)[:num_tokens]
        value = self.values[layer][used].flatten(0, 1)[:num_tokens]
        return key, value

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.keys.values(), *self.values.values()))

    def shutdown(self) -> None:
        self.keys.clear()
        self.values.clear()
