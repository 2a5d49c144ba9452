"""A storage whose memory is a pool of blocks, for backends to build on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from kvcache_core.batch import Batch
from kvcache_core.errors import ShapeError, UnsupportedError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.paged.handle import PagedKvCacheHandle
from kvcache_core.paged.host_tier import HostTier, SwapTicket
from kvcache_core.paged.kernel import AttentionKernel
from kvcache_core.paged.pool import BlockPool, Pool
from kvcache_core.paged.reference import ReferenceKernel
from kvcache_core.storage import BlockCopy, BlockRows, Placement, Storage, StorageSpec

__all__ = ["PagedStorage"]


class PagedStorage(Storage):
    """Keys and values in a pool of blocks.

    A backend has to say how much memory a device has (`device_memory`), and may override what its device does
    differently: `make_pool`, `allocate`, `upload`, `order`, `make_kernel`, `make_tier` with
    `swapping` and `wait_for_swaps`, and what those do not reach.

    Attributes:
        pool: The blocks.
        kernel: What attends.
        tier: Where sequences wait that are swapped out, or None.
        takes_memory_lazily: Whether memory is only taken where blocks have been reserved.
    """

    placement: ClassVar[Placement] = "paged"
    handle_type: ClassVar[type[KvCacheHandle]] = PagedKvCacheHandle
    dense_is_view: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[str]] = frozenset({"unequal_head_dims"})
    takes_memory_lazily: bool = False

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.device = torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        self.pool: Pool = self.make_pool()
        self.kernel = self.make_kernel()
        self.tier = self.make_tier()
        self._highest_block = 0
        if self.takes_memory_lazily and spec.initial_blocks:
            self._highest_block = min(spec.initial_blocks, spec.num_blocks)
            self.pool.commit(self._highest_block)

    # -- what a device may do differently ------------------------------------------------------------------

    def make_pool(self) -> Pool:
        """Take the memory."""
        return BlockPool(self.spec.geometry, self.spec.block_size, self.spec.num_blocks, self.allocate)

    def allocate(self, num_elements: int) -> torch.Tensor:
        """Return so many zeros as a flat tensor on the device."""
        return torch.zeros(num_elements, dtype=self.dtype, device=self.device)

    def make_kernel(self) -> AttentionKernel:
        """Choose what attends."""
        return ReferenceKernel(self.pool, self.upload)

    def order(self) -> None:
        """Order what follows after everything that was asked of the device before.

        Called before every use of the pool. A device with several queues makes the current one wait for the others.
        """

    def make_tier(self) -> HostTier | None:
        """Build the tier that sequences are swapped out to, or none."""
        return None

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Run copies to and from the host tier: after all that was asked before, and before all that is asked later.

        A device with several queues may do so in one of its own.
        """
        self.order()
        yield

    def wait_for_swaps(self) -> None:
        """Have the host wait until all copies to and from the tier are done."""

    # -- sequences ---------------------------------------------------------------------------------------

    @override
    def open(self, max_tokens: int) -> None:
        return None

    @override
    def fork(self, slot: None, num_tokens: int) -> None:
        return None

    @override
    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        if self.takes_memory_lazily and stop > start:
            size = self.spec.block_size
            highest = max(blocks[start // size : -(-stop // size)])
            self._highest_block = max(self._highest_block, highest)
        if copies:
            self.order()
            self.pool.copy_rows(copies, self.upload)

    @override
    def truncate(self, slot: None, num_tokens: int) -> None:
        return None

    @override
    def close(self, slot: None) -> None:
        return None

    @override
    def scrub(self, rows: Iterable[BlockRows]) -> None:
        self.order()
        self.pool.zero(rows, self.upload)

    # -- data --------------------------------------------------------------------------------------------

    @override
    def plan(self, batch: Batch) -> Any:
        return self.kernel.plan(batch)

    @override
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.order()
        self.pool.write(layer, batch.slot_mapping, key, value)

    def write_slots(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows at slots of the caller's own choosing; what he asks for has to be his.

        A slot of -1 (a row of padding) writes nowhere. Other slots outside the pool are refused where the host can
        see them, and write nowhere where it cannot.

        Args:
            layer: A layer that caches K and V of its own.
            slots: `block id * block_size + row` of each row, int64 `[rows]`.
            key: `[rows, num_kv_heads, head_dim]`.
            value: `[rows, num_kv_heads, value_head_dim]`.

        Raises:
            ShapeError: There are more or fewer slots than rows, a shape or dtype does not fit, or a slot is none.
        """
        if slots.dtype is not torch.int64:
            raise ShapeError(f"slots must be int64, not {slots.dtype}")
        stored = self.spec.geometry.layer_spec(layer)
        if stored is None or self.spec.geometry.producer(layer) != layer:
            raise ShapeError(f"layer {layer} caches nothing of its own, so there is nothing to write to")
        for name, rows, dim in (("key", key, stored.head_dim), ("value", value, stored.value_head_dim)):
            wanted = (len(slots), stored.num_kv_heads, dim)
            if slots.ndim != 1 or rows.shape != wanted or rows.dtype is not self.dtype:
                raise ShapeError(
                    f"{len(slots)} slots need a {name} of {list(wanted)} in {self.dtype}, "
                    f"not {list(rows.shape)} in {rows.dtype}"
                )
        size = self.spec.block_size
        last = (self.spec.num_blocks + 1) * size - 1
        if slots.device.type == "cpu" and len(slots):
            lowest, highest = (int(edge) for edge in slots.aminmax())
            if lowest < -1 or highest > last:
                wrong = lowest if lowest < -1 else highest
                raise ShapeError(f"slot {wrong} is none of this pool's, which are {size} to {last}, or -1 for none")
        self.order()
        slots = slots.to(self.device)
        held = (slots >= size) & (slots <= last)
        self.pool.write(layer, torch.where(held, slots, self.pool.trash_slot), key, value)

    @override
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        if batch.num_tokens == 0:
            spec = self.spec.geometry.layer_spec(layer)
            return query.new_empty(0, query.shape[1], spec.value_head_dim if spec else 0)
        self.order()
        return self.kernel.attend(batch, layer, query, scale, window)

    @override
    def gather(
        self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.order()
        return self.pool.gather(layer, blocks, num_tokens, self.upload)

    # -- the host tier -----------------------------------------------------------------------------------

    @override
    def swap_out(self, slot: None, blocks: Sequence[int], num_tokens: int) -> SwapTicket:
        tier = self._tier()
        tier.require(len(blocks))
        with self.swapping():
            return tier.put(blocks, num_tokens)

    @override
    def swap_in(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        highest = max(blocks, default=0)
        self._highest_block = max(self._highest_block, highest)
        with self.swapping():
            self._tier().take(ticket, blocks)
        self.drop_swapped(ticket)

    @override
    def drop_swapped(self, ticket: SwapTicket) -> None:
        if self.spec.scrub:
            self.wait_for_swaps()
            self._tier().zero(ticket)
        self._tier().drop(ticket)

    @override
    def demote(self, blocks: Sequence[int]) -> list[SwapTicket]:
        size = self.spec.block_size
        ticket = self.swap_out(None, blocks, len(blocks) * size)
        return [SwapTicket((place,), size) for place in ticket.blocks]

    @override
    def promote(self, tickets: Sequence[SwapTicket], blocks: Sequence[int]) -> None:
        places = tuple(place for ticket in tickets for place in ticket.blocks)
        self.swap_in(SwapTicket(places, len(places) * self.spec.block_size), blocks)

    @property
    @override
    def tier_blocks(self) -> int:
        return 0 if self.tier is None else self.tier.num_blocks

    @property
    @override
    def tier_free_blocks(self) -> int:
        return 0 if self.tier is None else self.tier.free_block_count

    def _tier(self) -> HostTier:
        if self.tier is None:
            raise UnsupportedError("this cache has no host tier to swap to; configure one", capability="swap")
        return self.tier

    # -- the whole ---------------------------------------------------------------------------------------

    @property
    @override
    def nbytes(self) -> int:
        if self.takes_memory_lazily:
            return self._highest_block * self.bytes_per_block
        return self.pool.nbytes

    @override
    def shutdown(self) -> None:
        self.pool.clear()
        if self.tier is not None:
            self.wait_for_swaps()
            self.tier.clear()
        self._highest_block = 0

    @override
    def audit(self) -> Iterable[str]:
        self.order()
        for layer in self.pool.nonzero_null_layers():
            yield f"layer {layer}: the null block has been written to"
        if self.tier is not None:
            yield from self.tier.audit()
