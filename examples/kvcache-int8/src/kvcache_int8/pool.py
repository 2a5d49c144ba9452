"""The memory: a pool of codes, and one of scales whose rows are one element long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from kvcache_core import WouldCopy
from kvcache_core.paged import BlockPool, Pool, Upload, gather_rows
from kvcache_core.plugin import BlockCopy, BlockRows, CacheGeometry, LayerGroup, StorageSpec

from kvcache_int8.quantise import SCALE_DTYPE, dequantise, quantise

__all__ = ["Int8Pool", "bytes_per_token"]

Quantised = tuple[torch.Tensor, torch.Tensor]


def bytes_per_token(geometry: CacheGeometry) -> int:
    """Return the bytes of a token's codes and scales in all layers."""
    codes = sum(len(group.layers) * group.elements_per_token for group in geometry.groups)
    scales = sum(len(group.layers) * group.elements_per_token for group in _scales_of(geometry).groups)
    return codes + scales * SCALE_DTYPE.itemsize


def _scales_of(geometry: CacheGeometry) -> CacheGeometry:
    groups = (
        LayerGroup(layers=group.layers, num_kv_heads=group.num_kv_heads, head_dim=1, value_head_dim=1)
        for group in geometry.groups
    )
    return CacheGeometry(num_layers=geometry.num_layers, groups=tuple(groups))


class Int8Pool(Pool):
    """Blocks of codes and, at the same places, blocks of scales.

    Args:
        spec: What to hold.
        device: Where.
        dtype: What rows are read back in.

    Attributes:
        codes: The codes.
        scales: The scales, `[..., 1]` in place of each row.
    """

    def __init__(self, spec: StorageSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(spec.block_size, spec.num_blocks)
        self._dtype = dtype

        def pool_of(geometry: CacheGeometry, stored: torch.dtype) -> BlockPool:
            def allocate(count: int) -> torch.Tensor:
                return torch.zeros(count, dtype=stored, device=device)

            return BlockPool(geometry, spec.block_size, spec.num_blocks, allocate)

        self.codes = pool_of(spec.geometry, torch.int8)
        self.scales = pool_of(_scales_of(spec.geometry), SCALE_DTYPE)

    def key(self, layer: int) -> torch.Tensor:
        """Refuse: rows have to be converted."""
        raise _no_view()

    def value(self, layer: int) -> torch.Tensor:
        """Refuse: rows have to be converted."""
        raise _no_view()

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Convert rows and store them."""
        key_codes, key_scales = quantise(key)
        value_codes, value_scales = quantise(value)
        self.codes.write(layer, slots, key_codes, value_codes)
        self.scales.write(layer, slots, key_scales, value_scales)

    def gather(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert the first rows of a sequence back."""
        key, value = self.gather_quantised(layer, blocks, num_tokens, upload)
        return dequantise(*key, self._dtype), dequantise(*value, self._dtype)

    def gather_quantised(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[Quantised, Quantised]:
        """Copy the first rows of a sequence as they are stored, K and V each as codes and scales."""
        used = blocks[: -(-num_tokens // self.block_size)]
        ids = upload(torch.tensor(used, dtype=torch.int64))
        return self.keys(layer, ids, num_tokens), self.values(layer, ids, num_tokens)

    def keys(self, layer: int, ids: torch.Tensor, num_tokens: int) -> Quantised:
        """Copy the first `num_tokens` rows out of the K blocks `ids`, as codes and scales."""
        return (
            gather_rows(self.codes.key(layer), ids, num_tokens),
            gather_rows(self.scales.key(layer), ids, num_tokens),
        )

    def values(self, layer: int, ids: torch.Tensor, num_tokens: int) -> Quantised:
        """Copy the first `num_tokens` rows out of the V blocks `ids`, as codes and scales."""
        return (
            gather_rows(self.codes.value(layer), ids, num_tokens),
            gather_rows(self.scales.value(layer), ids, num_tokens),
        )

    # -- both pools alike ----------------------------------------------------------------------------------

    def copy_rows(self, copies: Iterable[BlockCopy], upload: Upload) -> None:
        """Copy the first rows of blocks to other blocks, in all layers."""
        copies = list(copies)
        self.codes.copy_rows(copies, upload)
        self.scales.copy_rows(copies, upload)

    def zero(self, rows: Iterable[BlockRows], upload: Upload) -> None:
        """Zero rows of blocks, in all layers."""
        rows = list(rows)
        self.codes.zero(rows, upload)
        self.scales.zero(rows, upload)

    def commit(self, num_blocks: int) -> None:
        """Touch the first blocks that are handed out."""
        self.codes.commit(num_blocks)
        self.scales.commit(num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations."""
        return self.codes.nbytes + self.scales.nbytes

    def nonzero_null_layers(self) -> Iterator[int]:
        """Yield the layers whose null block somebody has written to."""
        yield from sorted({*self.codes.nonzero_null_layers(), *self.scales.nonzero_null_layers()})

    def clear(self) -> None:
        """Give up all memory."""
        self.codes.clear()
        self.scales.clear()


def _no_view() -> WouldCopy:
    reason = "rows are stored as 8-bit codes and scales"
    return WouldCopy(f"{reason}; use kv_cache, which converts them", export="pool", reason=reason)
