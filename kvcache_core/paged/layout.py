"""Where the blocks of a pool lie in memory, as shapes, strides and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from kvcache_core.geometry import LayerGroup

__all__ = ["PoolLayout", "TensorLayout"]


class TensorLayout(NamedTuple):
    """A view of one allocation, in elements.

    Attributes:
        shape: Its extents.
        strides: Elements between neighbours along each of them.
        offset: Elements before its first one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class PoolLayout:
    """The layout of one layer group's blocks: one allocation, token-major blocks ("NHD").

    The K blocks of a layer are `[blocks, block_size, num_kv_heads, head_dim]` without gaps, and so are its V blocks.
    Where the dims are equal, K and V of a layer are neighbours: `[layers, 2, blocks, block_size, num_kv_heads,
    head_dim]`. Otherwise the V blocks of all layers follow the K blocks of all layers.

    Attributes:
        group: The layers, and what they cache.
        num_blocks: Blocks of each layer and role, those that are never handed out included.
        block_size: Tokens per block.
    """

    group: LayerGroup
    num_blocks: int
    block_size: int

    @property
    def joint(self) -> bool:
        """Whether K and V are equal in shape and strides."""
        return self.group.head_dim == self.group.value_head_dim

    def _elements(self, dim: int) -> int:
        return self.num_blocks * self.block_size * self.group.num_kv_heads * dim

    @property
    def num_elements(self) -> int:
        """Elements of the whole allocation."""
        return len(self.group.layers) * (
            self._elements(self.group.head_dim) + self._elements(self.group.value_head_dim)
        )

    def key(self, layer: int) -> TensorLayout:
        """The K blocks of a layer."""
        size = self._elements(self.group.head_dim)
        return self._blocks(self.group.layers.index(layer) * size * (2 if self.joint else 1), self.group.head_dim)

    def value(self, layer: int) -> TensorLayout:
        """The V blocks of a layer."""
        index, key_size = self.group.layers.index(layer), self._elements(self.group.head_dim)
        if self.joint:
            return self._blocks((2 * index + 1) * key_size, self.group.head_dim)
        value_size = self._elements(self.group.value_head_dim)
        return self._blocks(len(self.group.layers) * key_size + index * value_size, self.group.value_head_dim)

    def _blocks(self, offset: int, dim: int) -> TensorLayout:
        return _dense((self.num_blocks, self.block_size, self.group.num_kv_heads, dim), offset)

    @property
    def sections(self) -> tuple[TensorLayout, ...]:
        """The whole allocation as `[layers and roles, blocks, block_size, num_kv_heads, dim]`, one for each dim."""
        group, layers = self.group, len(self.group.layers)
        blocks = (self.num_blocks, self.block_size, group.num_kv_heads)
        if self.joint:
            return (_dense((2 * layers, *blocks, group.head_dim), 0),)
        return (
            _dense((layers, *blocks, group.head_dim), 0),
            _dense((layers, *blocks, group.value_head_dim), layers * self._elements(group.head_dim)),
        )


def _dense(shape: tuple[int, ...], offset: int) -> TensorLayout:
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorLayout(shape, strides, offset)
