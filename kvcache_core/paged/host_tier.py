"""Blocks in host memory, where sequences wait that are swapped out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache_core.errors import CacheFullError
from kvcache_core.paged.pool import BlockPool

__all__ = ["HostTier", "SwapTicket"]

#: Blocks that are copied at once; bounds the memory that a copy takes on the device for a moment.
_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class SwapTicket:
    """A sequence in the host tier.

    Attributes:
        blocks: Where its blocks are in the tier, in logical order.
        num_tokens: Its tokens.
    """

    blocks: tuple[int, ...]
    num_tokens: int


class HostTier:
    """As many blocks in host memory as are configured, each contiguous with all its layers.

    Copies are only asked for here; the storage says on which stream, and what waits for them.

    Args:
        pool: The blocks on the device.
        num_blocks: Blocks of the tier.
        allocate: Returns so many elements of host memory.
        upload: Brings an index tensor to the device.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_blocks: int,
        allocate: Callable[[int], torch.Tensor],
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._upload = upload
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()
        with torch.inference_mode(False):
            self._memory = [
                allocate(num_blocks * section[:, 0].numel()).view(num_blocks, *section[:, 0].shape)
                for section in pool.sections
            ]

    @property
    def free_block_count(self) -> int:
        """Blocks that nothing lies in."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(memory.nbytes for memory in self._memory)

    def require(self, num_blocks: int) -> None:
        """Raise CacheFullError unless so many blocks are free."""
        if num_blocks > len(self._free):
            raise CacheFullError(
                f"the host tier is full: {num_blocks} blocks are needed, "
                f"{len(self._free)} of {self.num_blocks} are free",
                needed=num_blocks,
                free=len(self._free),
                hint="free or swap in a sequence that is swapped out, or give the tier more memory",
            )

    def put(self, blocks: Sequence[int], num_tokens: int) -> SwapTicket:
        """Copy blocks from the device into free ones of the tier.

        Raises:
            CacheFullError: Too few are free; nothing has changed.
        """
        self.require(len(blocks))
        places = [self._free.pop() for _ in blocks]
        self._taken.update(places)
        try:
            for part, at in _parts(blocks, places):
                ids = self._upload(torch.tensor(part, dtype=torch.int64))
                for section, memory in zip(self._pool.sections, self._memory, strict=True):
                    rows = section.index_select(1, ids).transpose(0, 1).contiguous()
                    for row, place in enumerate(at):
                        memory[place].copy_(rows[row], non_blocking=True)
        except BaseException:
            self.drop(SwapTicket(tuple(places), num_tokens))
            raise
        return SwapTicket(tuple(places), num_tokens)

    def take(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        """Copy what lies behind a ticket to blocks on the device; the ticket stays valid until it is dropped."""
        for part, at in _parts(blocks, ticket.blocks):
            ids = self._upload(torch.tensor(part, dtype=torch.int64))
            for section, memory in zip(self._pool.sections, self._memory, strict=True):
                rows = section.new_empty(len(part), *memory.shape[1:])
                for row, place in enumerate(at):
                    rows[row].copy_(memory[place], non_blocking=True)
                section.index_copy_(1, ids, rows.transpose(0, 1))

    def zero(self, ticket: SwapTicket) -> None:
        """Zero the places of a ticket; the caller has waited for every copy from them."""
        for memory in self._memory:
            for place in ticket.blocks:
                memory[place].zero_()

    def drop(self, ticket: SwapTicket) -> None:
        """Make the places of a ticket free."""
        self._taken.difference_update(ticket.blocks)
        self._free.extend(reversed(ticket.blocks))

    def audit(self) -> Iterator[str]:
        """Yield a line for each inconsistency."""
        free = set(self._free)
        if len(free) != len(self._free):
            yield "host tier: a block is free twice"
        if free & self._taken:
            yield f"host tier: blocks {sorted(free & self._taken)} are both free and taken"
        if len(free) + len(self._taken) != self.num_blocks:
            yield f"host tier: {len(free)} blocks are free and {len(self._taken)} taken, of {self.num_blocks}"

    def clear(self) -> None:
        """Give up the memory."""
        self._memory = []


def _parts(blocks: Sequence[int], places: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        yield blocks[part], places[part]
