"""A contiguous storage that keeps int8 codes with one scale a token and head, and reads them back as floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcache_core.attention import attend_dense
from kvcache_core.plugin import Batch, BlockCopy, CacheGeometry, DeviceMemory, KvCacheHandle, Storage, StorageSpec


class Int8KvCacheHandle(KvCacheHandle):
    """A handle to a sequence that is stored quantised."""

    __slots__ = ()


@dataclass
class Codes:
    """One tensor of one layer: codes `[capacity, heads, dim]` and scales `[capacity, heads, 1]`."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, heads: int, dim: int, device: torch.device) -> Codes:
        with torch.inference_mode(mode=False):  # or a sequence could only be written to in the mode it was opened in
            codes = torch.empty(capacity, heads, dim, dtype=torch.int8, device=device)
            return cls(codes, torch.full((capacity, heads, 1), float("nan"), device=device))

    def put(self, start: int, rows: torch.Tensor) -> None:
        scale = rows.float().abs().amax(-1, keepdim=True) / 127
        codes = (rows.float() / torch.where(scale == 0, 1, scale)).round()
        self.codes[start : start + len(rows)] = codes.to(torch.int8)
        self.scales[start : start + len(rows)] = scale

    def get(self, stop: int, dtype: torch.dtype) -> torch.Tensor:
        return (self.codes[:stop].float() * self.scales[:stop]).to(dtype)

    def copy_from(self, other: Codes, rows: int) -> None:
        self.codes[:rows] = other.codes[:rows]
        self.scales[:rows] = other.scales[:rows]


class Slot(dict[int, tuple[Codes, Codes]]):
    """Layer -> K and V of one sequence."""

    def __init__(self, storage: Int8Storage, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        for group in storage.spec.geometry.groups:
            for layer in group.layers:
                key = Codes.empty(max_tokens, group.num_kv_heads, group.head_dim, storage.device)
                self[layer] = (key, Codes.empty(max_tokens, group.num_kv_heads, group.value_head_dim, storage.device))


class Int8Storage(Storage):
    placement = "contiguous"
    handle_type = Int8KvCacheHandle
    dense_is_view = False
    capabilities = frozenset({"unequal_head_dims"})

    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        self._slots: dict[int, Slot] = {}

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 29)

    @classmethod
    def bytes_per_token(cls, geometry: CacheGeometry, dtype: str, options: Any) -> int:
        return sum(len(g.layers) * (g.elements_per_token + 2 * 4 * g.num_kv_heads) for g in geometry.groups)

    def open(self, max_tokens: int) -> Slot:
        slot = Slot(self, max_tokens)
        self._slots[id(slot)] = slot
        return slot

    def fork(self, slot: Slot, num_tokens: int) -> Slot:
        copy = self.open(slot.max_tokens)
        for layer, (key, value) in slot.items():
            copy[layer][0].copy_from(key, num_tokens)
            copy[layer][1].copy_from(value, num_tokens)
        return copy

    def shared_tokens(self, slot: Slot, num_tokens: int) -> int:
        return 0  # a fork is a copy

    def reserve(self, slot: Slot, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        return None

    def truncate(self, slot: Slot, num_tokens: int) -> None:
        for pair in slot.values():
            for codes in pair:
                codes.codes[num_tokens:] = 0
                codes.scales[num_tokens:] = 0

    def close(self, slot: Slot) -> None:
        del self._slots[id(slot)]

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for segment in batch.segments:
            rows = slice(segment.row, segment.row + segment.num_new_tokens)
            segment.slot[layer][0].put(segment.start, key[rows])
            segment.slot[layer][1].put(segment.start, value[rows])

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], self.spec.geometry.layer_spec(layer).value_head_dim)  # type: ignore[union-attr]
        for segment in batch.segments:
            rows = slice(segment.row, segment.row + segment.num_new_tokens)
            key, value = self.gather(segment.slot, segment.blocks, segment.stop, layer)
            out[rows] = attend_dense(query[rows], key, value, scale=scale, window=window)
        return out

    def gather(
        self, slot: Slot, blocks: Sequence[int], num_tokens: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = slot[layer]
        return key.get(num_tokens, self.dtype), value.get(num_tokens, self.dtype)

    @property
    def nbytes(self) -> int:
        tensors = [c for slot in self._slots.values() for pair in slot.values() for c in pair]
        return sum(c.codes.nbytes + c.scales.nbytes for c in tensors)

    def shutdown(self) -> None:
        self._slots.clear()
