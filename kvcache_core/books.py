"""The block books of one cache: taking, sharing and releasing blocks, whatever the placement of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcache_core.allocator import BlockAllocator
from kvcache_core.errors import CacheFullError
from kvcache_core.observing import EventQueue
from kvcache_core.storage import BlockRows, Storage

__all__ = ["Books"]


class Books:
    """Who names which block. All methods run under the manager's lock.

    Attributes:
        allocator: The block ids and their reference counts.
        block_size: Tokens per block.
        is_shared: Whether somebody besides one sequence relies on a block's contents.
        failures: Requests refused for want of room, so far.
        make_room: Evicts until so many blocks are free; called only when that is possible.
    """

    def __init__(self, allocator: BlockAllocator, storage: Storage, events: EventQueue, *, scrub: bool) -> None:
        self.allocator = allocator
        self.block_size = allocator.block_size
        self.is_shared: Callable[[int], bool] = allocator.is_shared
        self.failures = 0
        self.make_room: Callable[[int], None] = _evict_nothing
        self._storage = storage
        self._events = events
        self._scrub = scrub

    @property
    def used_blocks(self) -> int:
        """Blocks that live sequences name."""
        return self.allocator.used_block_count

    @property
    def available_blocks(self) -> int:
        """Blocks that `take` could hand out now, by evicting if it has to."""
        return self.allocator.free_block_count + self.allocator.cached_block_count

    def take(self, count: int, *, purpose: str) -> list[int]:
        """Take `count` blocks.

        Args:
            count: How many.
            purpose: What for, as a phrase that can follow "no room ", such as `"for 12 new tokens"`.

        Raises:
            CacheFullError: So many cannot be had; nothing was changed.
        """
        if count > self.allocator.free_block_count:
            self.require(count, purpose=purpose)
            self.make_room(count)
            if count > self.allocator.free_block_count:  # the eviction policy spares something
                raise self._no_room(count, purpose)
        return self.allocator.take(count)

    def require(self, count: int, *, purpose: str) -> None:
        """Raise CacheFullError unless `count` blocks can be had."""
        if count > self.available_blocks:
            raise self._no_room(count, purpose)

    def _no_room(self, count: int, purpose: str) -> CacheFullError:
        self.failures += 1
        size, total = self.block_size, self.allocator.total_block_count
        free, evictable = self.allocator.free_block_count, self.allocator.cached_block_count
        if "refused" in self._events.wanted:
            self._events.note("refused", purpose=purpose, needed=count, free=free, evictable=evictable)
        return CacheFullError(
            f"no room {purpose}: {count} more blocks of {size} tokens are needed, {free} of {total} are free"
            + (f" and {evictable} can be evicted" if evictable else ""),
            needed=count,
            free=free,
            evictable=evictable,
            hint="free or truncate a handle, or raise the budget"
            if count <= total
            else f"raise the budget: the whole cache holds {total * size} tokens",
        )

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence names these blocks."""
        self.allocator.share(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence no longer names these blocks; those that nobody needs become free."""
        self._free(self.allocator.unreference(blocks))

    def retain(self, blocks: Sequence[int]) -> None:
        """A sequence that named these blocks is kept for reuse and no longer live."""
        self.allocator.retain(blocks)

    def release_retained(self, blocks: Sequence[int]) -> None:
        """A sequence that was kept for reuse no longer names these blocks."""
        self._free(self.allocator.unretain(blocks))

    def _free(self, blocks: Sequence[int]) -> None:
        try:
            if blocks and self._scrub:
                self._storage.scrub([BlockRows(block, 0, self.block_size) for block in blocks])
        finally:  # nobody names them any more, whatever the storage says
            self.allocator.give_back(blocks)

    def scrub_tail(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Zero the rows after a sequence's last token in its last block, unless somebody else sees them."""
        index, kept_rows = divmod(num_tokens, self.block_size)
        if self._scrub and kept_rows and not self.is_shared(blocks[index]):
            self._storage.scrub([BlockRows(blocks[index], kept_rows, self.block_size)])


def _evict_nothing(count: int) -> None:
    """Evict nothing: without a prefix cache no block is ever merely cached."""
