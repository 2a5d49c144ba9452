"""The memory of a paged cache: blocks of all layers, found by id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from typing_extensions import override

from kvcache_core.errors import ShapeError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.paged.gathering import gather_rows
from kvcache_core.paged.layout import PoolLayout, TensorLayout
from kvcache_core.storage import BlockCopy, BlockRows

__all__ = ["BlockPool", "Pool", "Upload"]

#: Brings an index tensor from the host to the device.
Upload = Callable[[torch.Tensor], torch.Tensor]


class Pool(ABC):
    """Blocks `0` to `num_blocks + 1` of every layer, found by id.

    Block 0 is the null block: what tables are padded with, all zeros. The last one is the trash block: where writes go
    that nobody wants. Neither is ever handed out, and they are two, so that what is thrown away is never read.

    The memory does not move as long as the pool lives.

    Attributes:
        block_size: Tokens per block.
        num_blocks: Blocks that can be handed out.
        trash_block: Id of the trash block.
    """

    null_block = 0

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.trash_block = num_blocks + 1

    @property
    def trash_slot(self) -> int:
        """The slot that unwanted rows are written to."""
        return self.trash_block * self.block_size

    # -- views -------------------------------------------------------------------------------------------

    @abstractmethod
    def key(self, layer: int) -> torch.Tensor:
        """K blocks of a layer, `[num_blocks + 2, block_size, num_kv_heads, head_dim]`; a view, as all of these.

        Raises:
            WouldCopy: They do not lie in one tensor.
        """

    @abstractmethod
    def value(self, layer: int) -> torch.Tensor:
        """V blocks of a layer, `[num_blocks + 2, block_size, num_kv_heads, value_head_dim]`; raises what `key` does."""

    def key_slots(self, layer: int) -> torch.Tensor:
        """K rows of a layer by slot, `[slots, num_kv_heads, head_dim]`; raises what `key` does."""
        return self.key(layer).flatten(0, 1)

    def value_slots(self, layer: int) -> torch.Tensor:
        """V rows of a layer by slot, `[slots, num_kv_heads, value_head_dim]`; raises what `key` does."""
        return self.value(layer).flatten(0, 1)

    # -- rows --------------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows in one layer.

        Args:
            layer: A layer that caches K and V of its own.
            slots: `block id * block_size + row` of each, int64 `[rows]` on the device, none outside the pool.
            key: `[rows, num_kv_heads, head_dim]`, any strides.
            value: `[rows, num_kv_heads, value_head_dim]` likewise.
        """

    @abstractmethod
    def gather(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first rows of a sequence out of its blocks, `[num_tokens, num_kv_heads, dim]` K and V."""

    # -- blocks ------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_rows(self, copies: Iterable[BlockCopy], upload: Upload) -> None:
        """Copy the first rows of blocks to other blocks, in all layers."""

    @abstractmethod
    def zero(self, rows: Iterable[BlockRows], upload: Upload) -> None:
        """Zero rows of blocks, in all layers."""

    @abstractmethod
    def commit(self, num_blocks: int) -> None:
        """Touch the first blocks that are handed out, so that their memory is taken now rather than later."""

    # -- the whole ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all allocations."""

    @abstractmethod
    def nonzero_null_layers(self) -> Iterator[int]:
        """Yield the layers whose null block somebody has written to."""

    @abstractmethod
    def clear(self) -> None:
        """Give up all memory; tensors that others hold keep theirs."""


class BlockPool(Pool):
    """A pool with one allocation for each layer group, whose tensors may be captured in a graph.

    Args:
        geometry: What to hold.
        block_size: Tokens per block.
        num_blocks: Blocks that can be handed out.
        allocate: Returns so many zeros as a flat tensor.

    Attributes:
        layouts: Where the blocks lie, by layer group.
        memory: The allocations, by layer group.
    """

    def __init__(
        self, geometry: CacheGeometry, block_size: int, num_blocks: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        super().__init__(block_size, num_blocks)
        self.layouts = tuple(PoolLayout(group, num_blocks + 2, block_size) for group in geometry.groups)
        with torch.inference_mode(False):  # else nobody could write to it outside that mode
            self.memory = tuple(_flat(allocate, layout.num_elements) for layout in self.layouts)
        self._places = {layer: number for number, group in enumerate(geometry.groups) for layer in group.layers}
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for layer, number in self._places.items():
            memory, layout = self.memory[number], self.layouts[number]
            self._keys[layer] = _view(memory, layout.key(layer))
            self._values[layer] = _view(memory, layout.value(layer))
        self._key_slots = {layer: blocks.flatten(0, 1) for layer, blocks in self._keys.items()}
        self._value_slots = {layer: blocks.flatten(0, 1) for layer, blocks in self._values.items()}
        self._sections = tuple(
            _view(memory, section)
            for memory, layout in zip(self.memory, self.layouts, strict=True)
            for section in layout.sections
        )

    @override
    def key(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    @override
    def value(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    @override
    def key_slots(self, layer: int) -> torch.Tensor:
        return self._key_slots[layer]

    @override
    def value_slots(self, layer: int) -> torch.Tensor:
        return self._value_slots[layer]

    def layout(self, layer: int) -> tuple[TensorLayout, TensorLayout]:
        """Where K and V blocks of a layer lie in the memory of its group."""
        layout = self.layouts[self._places[layer]]
        return layout.key(layer), layout.value(layer)

    @property
    def sections(self) -> tuple[torch.Tensor, ...]:
        """Everything, as views `[layers and roles, blocks, block_size, num_kv_heads, dim]`."""
        return self._sections

    @override
    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._key_slots[layer].index_copy_(0, slots, key)
        self._value_slots[layer].index_copy_(0, slots, value)

    @override
    def gather(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = upload(torch.tensor(blocks[: -(-num_tokens // self.block_size)], dtype=torch.int64))
        return gather_rows(self._keys[layer], ids, num_tokens), gather_rows(self._values[layer], ids, num_tokens)

    @override
    def copy_rows(self, copies: Iterable[BlockCopy], upload: Upload) -> None:
        for source, target, rows in copies:
            for section in self._sections:  # all layers of a group at once
                section[:, target, :rows].copy_(section[:, source, :rows])

    @override
    def zero(self, rows: Iterable[BlockRows], upload: Upload) -> None:
        whole = []
        for block, start, stop in rows:
            if stop - start == self.block_size:
                whole.append(block)
            else:
                for section in self._sections:
                    section[:, block, start:stop].zero_()
        if whole:
            blocks = upload(torch.tensor(whole, dtype=torch.int64))
            for section in self._sections:
                section.index_fill_(1, blocks, 0)

    @override
    def commit(self, num_blocks: int) -> None:
        for section in self._sections:
            section[:, 1 : num_blocks + 1].zero_()

    @property
    @override
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)

    @override
    def nonzero_null_layers(self) -> Iterator[int]:
        for layer in sorted(self._places):
            if self._keys[layer][self.null_block].any() or self._values[layer][self.null_block].any():
                yield layer

    @override
    def clear(self) -> None:
        self.memory = self._sections = ()
        for views in (self._keys, self._values, self._key_slots, self._value_slots):
            views.clear()


def _flat(allocate: Callable[[int], torch.Tensor], num_elements: int) -> torch.Tensor:
    memory = allocate(num_elements)
    if memory.shape != (num_elements,) or not memory.is_contiguous():
        raise ShapeError(
            f"a pool needs {num_elements} elements in a row, not {list(memory.shape)} with strides {memory.stride()}"
        )
    return memory


def _view(memory: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return memory.as_strided(layout.shape, layout.strides, memory.storage_offset() + layout.offset)
