"""The block books of one cache: taking, sharing and releasing blocks, whatever the placement of their memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache_core.allocator import BlockAllocator
from kvcache_core.errors import CacheFullError
from kvcache_core.storage import BlockRows, Storage

__all__ = ["Books"]


class Books:
    """Who names which block. All methods run under the manager's lock.

    Attributes:
        allocator: The block ids and their reference counts.
        block_size: Tokens per block.
        failures: Requests refused for want of room, so far.
    """

    def __init__(self, allocator: BlockAllocator, storage: Storage, *, scrub: bool) -> None:
        self.allocator = allocator
        self.block_size = allocator.block_size
        self.failures = 0
        self._storage = storage
        self._scrub = scrub

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences name."""
        allocator = self.allocator
        return allocator.total_block_count - allocator.free_block_count - len(allocator.loose)

    @property
    def available_blocks(self) -> int:
        """Blocks that `take` could hand out now."""
        return self.allocator.free_block_count

    def take(self, count: int, *, purpose: str) -> list[int]:
        """Take `count` blocks.

        Args:
            count: How many.
            purpose: What for, as a phrase that can follow "no room ", such as `"for 12 new tokens"`.

        Raises:
            CacheFullError: So many cannot be had; nothing was changed.
        """
        self.require(count, purpose=purpose)
        return self.allocator.take(count)

    def require(self, count: int, *, purpose: str) -> None:
        """Raise CacheFullError unless `count` blocks can be had."""
        free = self.allocator.free_block_count
        if count <= free:
            return
        self.failures += 1
        size, total = self.block_size, self.allocator.total_block_count
        raise CacheFullError(
            f"no room {purpose}: {count} more blocks of {size} tokens are needed, {free} of {total} are free",
            needed=count,
            free=free,
            hint="free or truncate a handle, or raise the budget"
            if count <= total
            else f"raise the budget: the whole cache holds {total * size} tokens",
        )

    def is_shared(self, block: int) -> bool:
        """Whether somebody besides one sequence relies on the block's contents."""
        return self.allocator.references(block) > 1

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence names these blocks."""
        self.allocator.share(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence no longer names these blocks; those that nobody needs become free."""
        freed = self.allocator.unreference(blocks)
        if freed and self._scrub:
            self._storage.scrub([BlockRows(block, 0, self.block_size) for block in freed])
        self.allocator.give_back(freed)

    def scrub_tail(self, block: int, kept_rows: int) -> None:
        """Zero the rows of a sequence's last block that a truncate dropped, unless somebody else sees them."""
        if self._scrub and kept_rows and not self.is_shared(block):
            self._storage.scrub([BlockRows(block, kept_rows, self.block_size)])
