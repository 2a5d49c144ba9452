"""The memory of a paged cache: blocks of all layers, found by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from kvcache_core.geometry import CacheGeometry
from kvcache_core.paged.layout import PoolLayout, TensorLayout
from kvcache_core.storage import BlockCopy, BlockRows

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks `0` to `num_blocks + 1` of every layer; one allocation for each layer group.

    Block 0 is the null block: what tables are padded with, all zeros. The last one is the trash block: where writes go
    that nobody wants. Neither is ever handed out, and they are two, so that what is thrown away is never read.

    The memory does not move as long as the pool lives: its tensors may be captured in a graph.

    Args:
        geometry: What to hold.
        block_size: Tokens per block.
        num_blocks: Blocks that can be handed out.
        allocate: Returns so many zeros as a flat tensor.

    Attributes:
        block_size: Tokens per block.
        num_blocks: Blocks that can be handed out.
        trash_block: Id of the trash block.
        layouts: Where the blocks lie, by layer group.
        memory: The allocations, by layer group.
    """

    null_block = 0

    def __init__(
        self, geometry: CacheGeometry, block_size: int, num_blocks: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.trash_block = num_blocks + 1
        self.layouts = tuple(PoolLayout(group, num_blocks + 2, block_size) for group in geometry.groups)
        with torch.inference_mode(False):  # else nobody could write to it outside that mode
            self.memory = tuple(allocate(layout.num_elements) for layout in self.layouts)
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

    @property
    def trash_slot(self) -> int:
        """The slot that unwanted rows are written to."""
        return self.trash_block * self.block_size

    def key(self, layer: int) -> torch.Tensor:
        """K blocks of a layer, `[num_blocks + 2, block_size, num_kv_heads, head_dim]`; a view, as all of these."""
        return self._keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        """V blocks of a layer, `[num_blocks + 2, block_size, num_kv_heads, value_head_dim]`."""
        return self._values[layer]

    def key_slots(self, layer: int) -> torch.Tensor:
        """K rows of a layer by slot, `[slots, num_kv_heads, head_dim]`."""
        return self._key_slots[layer]

    def value_slots(self, layer: int) -> torch.Tensor:
        """V rows of a layer by slot, `[slots, num_kv_heads, value_head_dim]`."""
        return self._value_slots[layer]

    def layout(self, layer: int) -> tuple[TensorLayout, TensorLayout]:
        """Where K and V blocks of a layer lie in the memory of its group."""
        layout = self.layouts[self._places[layer]]
        return layout.key(layer), layout.value(layer)

    @property
    def sections(self) -> tuple[torch.Tensor, ...]:
        """Everything, as views `[layers and roles, blocks, block_size, num_kv_heads, dim]`."""
        return self._sections

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations."""
        return sum(memory.nbytes for memory in self.memory)

    # -- blocks ------------------------------------------------------------------------------------------

    def copy_rows(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first rows of blocks to other blocks, all layers of a group at once."""
        for source, target, rows in copies:
            for section in self._sections:
                section[:, target, :rows].copy_(section[:, source, :rows])

    def zero(self, rows: Iterable[BlockRows], upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Zero rows of blocks; those of whole blocks all at once.

        Args:
            rows: The rows.
            upload: Brings an index tensor to the device.
        """
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

    def commit(self, num_blocks: int) -> None:
        """Touch the first blocks that are handed out, so that their memory is taken now rather than later."""
        for section in self._sections:
            section[:, 1 : num_blocks + 1].zero_()

    def nonzero_null_layers(self) -> Iterator[int]:
        """Yield the layers whose null block somebody has written to."""
        for layer in sorted(self._places):
            if self._keys[layer][self.null_block].any() or self._values[layer][self.null_block].any():
                yield layer

    def clear(self) -> None:
        """Give up all memory; tensors that others hold keep theirs."""
        self.memory = self._sections = ()
        for views in (self._keys, self._values, self._key_slots, self._value_slots):
            views.clear()


def _view(memory: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return memory.as_strided(layout.shape, layout.strides, layout.offset)
