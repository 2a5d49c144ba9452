"""A pool whose tensors stay below a size: for devices whose kernels cannot address larger ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from typing_extensions import override

from kvcache_core.errors import ShapeError, WouldCopy
from kvcache_core.geometry import CacheGeometry
from kvcache_core.paged.pool import Pool, Upload
from kvcache_core.storage import BlockCopy, BlockRows

__all__ = ["RowPlaces", "ShardedPool", "slots_of"]

#: Blocks that are zeroed at once; bounds the memory that it takes for a moment.
_BLOCKS_AT_ONCE = 64


class RowPlaces(NamedTuple):
    """Where rows lie, in any layer.

    Attributes:
        parts: Shard, and the slots in it, int64 on the device; a shard that holds none of the rows is not named.
        order: Place of each row in the parts put together, int64 on the device; None where that is its own number.
    """

    parts: tuple[tuple[int, torch.Tensor], ...]
    order: torch.Tensor | None


class ShardedPool(Pool):
    """A pool in which K and V of every layer have tensors of their own, and as many as it takes to keep each small.

    Shard `i` of a layer holds `blocks_per_shard` consecutive blocks, all layers alike, and a block of its own for
    unwanted writes. Every tensor starts its allocation.

    Args:
        geometry: What to hold.
        block_size: Tokens per block.
        num_blocks: Blocks that can be handed out.
        allocate: Returns so many zeros as a flat tensor.
        max_elements: Most elements of a tensor; None for any number.

    Attributes:
        blocks_per_shard: Blocks of each shard but the last, the one for unwanted writes not counted.
        num_shards: Tensors of each layer and role.

    Raises:
        ShapeError: A block does not fit a tensor of that size.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        block_size: int,
        num_blocks: int,
        allocate: Callable[[int], torch.Tensor],
        *,
        max_elements: int | None,
    ) -> None:
        super().__init__(block_size, num_blocks)
        total = num_blocks + 1  # the null block among them
        self.blocks_per_shard = total if max_elements is None else _fitting_blocks(geometry, block_size, max_elements)
        self.blocks_per_shard = min(total, self.blocks_per_shard)
        self._sizes = [
            min(self.blocks_per_shard, total - first) + 1 for first in range(0, total, self.blocks_per_shard)
        ]
        self.num_shards = len(self._sizes)
        self._allocate = allocate
        self._keys: dict[int, tuple[torch.Tensor, ...]] = {}
        self._values: dict[int, tuple[torch.Tensor, ...]] = {}
        places, shapes = [], []
        for group in geometry.groups:
            for layer in group.layers:
                for role, dim in ((self._keys, group.head_dim), (self._values, group.value_head_dim)):
                    places.append((role, layer))
                    shapes += [(blocks, block_size, group.num_kv_heads, dim) for blocks in self._sizes]
        with torch.inference_mode(False):  # else nobody could write to it outside that mode
            tensors = iter(self.make_tensors(shapes))
        for role, layer in places:
            role[layer] = tuple(next(tensors) for _ in self._sizes)

    # -- what a device may do differently ------------------------------------------------------------------

    def make_tensors(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Take the memory: a tensor of zeros for each shape, each of an allocation of its own."""
        return [self._allocate(prod(shape)).view(shape) for shape in shapes]

    def put_rows(self, target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` in `target` `[slots, heads, dim]`."""
        target.index_copy_(0, slots, rows)

    def take_rows(self, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copy rows out of `source` `[slots, heads, dim]`."""
        return source.index_select(0, slots)

    # -- views -------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor, `[blocks, block_size, num_kv_heads, dim]`."""
        for shards in (*self._keys.values(), *self._values.values()):
            yield from shards

    @override
    def key(self, layer: int) -> torch.Tensor:
        return self._only(self._keys[layer])

    @override
    def value(self, layer: int) -> torch.Tensor:
        return self._only(self._values[layer])

    def _only(self, shards: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if len(shards) > 1:
            reason = f"its blocks lie in {len(shards)} tensors"
            raise WouldCopy(f"a layer of this pool is no one tensor: {reason}", export="pool", reason=reason)
        return shards[0]

    # -- rows --------------------------------------------------------------------------------------------

    def locate(self, slots: torch.Tensor, upload: Upload) -> RowPlaces:
        """Find out which shards rows lie in; worked out once for all layers.

        Args:
            slots: Their slots, int64 `[rows]` on the host.
            upload: Brings an index tensor to the device.
        """
        if self.num_shards == 1:
            return RowPlaces(((0, upload(slots)),), None)
        size = self.blocks_per_shard * self.block_size
        shards = slots.div(size, rounding_mode="floor")
        by_shard = shards.argsort(stable=True)
        used = sorted(set(shards.tolist()))
        parts = tuple((shard, upload(slots[shards == shard] - shard * size)) for shard in used)
        return RowPlaces(parts, upload(by_shard.argsort()) if len(parts) > 1 else None)

    def take(self, layer: int, places: RowPlaces) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows of one layer, `[rows, num_kv_heads, dim]` K and V."""
        return self._take(self._keys[layer], places), self._take(self._values[layer], places)

    def _take(self, shards: tuple[torch.Tensor, ...], places: RowPlaces) -> torch.Tensor:
        pieces = [self.take_rows(shards[shard].flatten(0, 1), slots) for shard, slots in places.parts]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return rows if places.order is None else self.take_rows(rows, places.order)

    @override
    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for number, (keys, values) in enumerate(zip(self._keys[layer], self._values[layer], strict=True)):
            local = slots
            if self.num_shards > 1:
                trash = (len(keys) - 1) * self.block_size
                local = slots - number * self.blocks_per_shard * self.block_size
                local = torch.where((local >= 0) & (local < trash), local, trash)
            self.put_rows(keys.flatten(0, 1), local, key)
            self.put_rows(values.flatten(0, 1), local, value)

    @override
    def gather(
        self, layer: int, blocks: Sequence[int], num_tokens: int, upload: Upload
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if num_tokens == 0:
            return tuple(  # type: ignore[return-value]
                shards[0].new_empty(0, *shards[0].shape[2:]) for shards in (self._keys[layer], self._values[layer])
            )
        return self.take(layer, self.locate(slots_of(blocks, self.block_size, 0, num_tokens), upload))

    # -- blocks ------------------------------------------------------------------------------------------

    @override
    def copy_rows(self, copies: Iterable[BlockCopy], upload: Upload) -> None:
        rows = [(copy.source, copy.target, row) for copy in copies for row in range(copy.rows)]
        if not rows:
            return
        source, target, row = torch.tensor(rows, dtype=torch.int64).unbind(1)
        places = self.locate(source * self.block_size + row, upload)
        slots = upload(target * self.block_size + row)
        for layer in self._keys:
            self.write(layer, slots, *self.take(layer, places))

    @override
    def zero(self, rows: Iterable[BlockRows], upload: Upload) -> None:
        slots = [block * self.block_size + row for block, start, stop in rows for row in range(start, stop)]
        at_once = _BLOCKS_AT_ONCE * self.block_size
        for first in range(0, len(slots), at_once):
            part = upload(torch.tensor(slots[first : first + at_once], dtype=torch.int64))
            for layer, (key, *_) in self._keys.items():
                value = self._values[layer][0]
                self.write(layer, part, *(blocks.new_zeros(len(part), *blocks.shape[2:]) for blocks in (key, value)))

    @override
    def commit(self, num_blocks: int) -> None:
        device = next(self.tensors).device
        self.zero(
            (BlockRows(block, 0, self.block_size) for block in range(1, num_blocks + 1)), lambda slots: slots.to(device)
        )

    # -- the whole ---------------------------------------------------------------------------------------

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @override
    def nonzero_null_layers(self) -> Iterator[int]:
        for layer in sorted(self._keys):
            if any(shards[layer][0][self.null_block].any() for shards in (self._keys, self._values)):
                yield layer

    @override
    def clear(self) -> None:
        self._keys.clear()
        self._values.clear()


def slots_of(blocks: Sequence[int], block_size: int, start: int, stop: int) -> torch.Tensor:
    """Slots of positions `start` to `stop` of a sequence, int64 `[stop - start]` on the host."""
    first = start // block_size
    used = torch.tensor(blocks[first : -(-stop // block_size)], dtype=torch.int64)
    slots = (used[:, None] * block_size + torch.arange(block_size)).flatten()
    return slots[start - first * block_size : stop - first * block_size]


def _fitting_blocks(geometry: CacheGeometry, block_size: int, max_elements: int) -> int:
    widest = max(
        (group.num_kv_heads * max(group.head_dim, group.value_head_dim) for group in geometry.groups), default=1
    )
    fitting = max_elements // (block_size * widest) - 1  # one more takes unwanted writes
    if fitting < 1:
        raise ShapeError(
            f"blocks of {block_size} tokens with {widest} elements each do not fit tensors of {max_elements} elements; "
            "use a smaller block_size"
        )
    return fitting
