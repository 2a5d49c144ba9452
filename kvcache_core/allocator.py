"""Physical block ids: which are free, and how many sequences name each of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvcache_core.counts import check_count
from kvcache_core.errors import CacheFullError, HandleError, UnsupportedError

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """Hands out block ids `1` to `total_block_count` and counts the references to each.

    Id 0 is the null block: padding in index tensors, never written and never handed out. A block is in exactly
    one of four states: free, referenced by one or more sequences, cached (named only by sequences that are kept
    for reuse and have no handle any more), or loose (taken by `allocate_blocks` and not yet handed to a
    sequence).

    `allocate_blocks` and `free_blocks` are for callers who extend a block table by hand; the methods from `take` on
    are for core alone.

    Attributes:
        names: How many sequences name each block, live or retained; for core to read.
    """

    def __init__(self, num_blocks: int, block_size: int, lock: AbstractContextManager[Any] | None = None) -> None:
        self._total = num_blocks
        self._block_size = block_size
        self._lock: AbstractContextManager[Any] = lock or threading.Lock()
        self._never_used = 1  # ids from here on have not been handed out yet
        self._returned: list[int] = []
        self.names = self._names = [0] * (num_blocks + 1)  # tables that name a block
        self._retentions = [0] * (num_blocks + 1)  # of these, tables of retained sequences
        self._cached = 0
        self._loose: set[int] = set()

    # -- for callers -------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def total_block_count(self) -> int:
        """Blocks of the cache, in whatever state."""
        return self._total

    @property
    def free_block_count(self) -> int:
        """Blocks that can be taken at once."""
        return len(self._returned) + self._total + 1 - self._never_used

    def allocate_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks; they stay the caller's until a block table adopts them or they are freed.

        Raises:
            CacheFullError: Fewer are free; none is taken.
            ShapeError: `count` is negative or not an int.
        """
        check_count("count", count)
        with self._lock:
            if count > self.free_block_count:
                raise CacheFullError(
                    f"{count} blocks were asked for and {self.free_block_count} of {self._total} are free",
                    needed=count,
                    free=self.free_block_count,
                    hint="free a handle, or ask for fewer blocks",
                )
            blocks = self.take(count)
            self._loose.update(blocks)
            return blocks

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Give back blocks that `allocate_blocks` handed out and no table has adopted.

        Raises:
            HandleError: One of them is not such a block, or is named twice; none is freed.
            ShapeError: One of them is no block id at all; none is freed.
        """
        blocks = [check_count("a block id", block, least=1) for block in blocks]
        with self._lock:
            if len(set(blocks)) != len(blocks) or not self._loose.issuperset(blocks):
                foreign = [block for block in blocks if block not in self._loose] or blocks
                raise HandleError(
                    f"blocks {foreign} cannot be freed here: they were not got from allocate_blocks, belong to a "
                    "sequence, or are named twice",
                    reason="foreign",
                )
            self._loose.difference_update(blocks)
            self.drop(blocks)

    def defragment(self) -> None:
        """Refuse: blocks are found through tables, so there is nothing to compact.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "defragment has nothing to do: any free block serves any sequence, so block memory cannot fragment",
            capability="defragment",
        )

    # -- for core, under the manager's lock --------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks with one reference each; the caller has checked that so many are free."""
        names, blocks = self._names, []
        if count and self._returned:
            blocks = self._returned[-count:]
            del self._returned[-count:]
        if len(blocks) < count:
            first = self._never_used
            self._never_used = first + count - len(blocks)
            blocks += range(first, self._never_used)
        for block in blocks:
            names[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more reference to each block."""
        names = self._names
        if not self._cached:  # a fork names hundreds of blocks, so what is not needed is left out
            for block in blocks:
                names[block] = names[block] + 1  # `+=` takes a quarter more time
            return
        retentions = self._retentions
        cached = 0
        for block in blocks:
            count = names[block]
            names[block] = count + 1
            if retentions[block] == count:
                cached += 1  # so far it was named by retained sequences only
        self._cached -= cached

    def unreference(self, blocks: Sequence[int]) -> list[int]:
        """Count one reference less to each block; return those that nobody names any more, in order."""
        names, retentions = self._names, self._retentions
        unnamed = []
        cached = 0
        for block in blocks:
            names[block] = left = names[block] - 1
            if retentions[block] == left:  # no live sequence names it any more
                if left:
                    cached += 1
                else:
                    unnamed.append(block)
        self._cached += cached
        return unnamed

    def retain(self, blocks: Iterable[int]) -> None:
        """Turn one reference to each block into a retention: a name that does not keep it from eviction."""
        names, retentions = self._names, self._retentions
        cached = 0
        for block in blocks:
            retentions[block] = count = retentions[block] + 1
            if count == names[block]:
                cached += 1
        self._cached += cached

    def unretain(self, blocks: Sequence[int]) -> list[int]:
        """Count one retention less of each block; return those that nobody names any more, in order."""
        names, retentions = self._names, self._retentions
        unnamed = []
        for block in blocks:
            retentions[block] -= 1
            names[block] = left = names[block] - 1
            if not left:
                unnamed.append(block)
        self._cached -= len(unnamed)
        return unnamed

    def give_back(self, blocks: Sequence[int]) -> None:
        """Make unreferenced blocks free; the last one given back is the first one taken again."""
        self._returned.extend(blocks)

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """Unreference blocks and free those that nobody references any more; return the freed ones."""
        freed = self.unreference(blocks)
        self.give_back(freed)
        return freed

    def references(self, block: int) -> int:
        """How many live sequences name `block` (1 for a loose block)."""
        return self._names[block] - self._retentions[block]

    def retentions(self, block: int) -> int:
        """How many retained sequences name `block`."""
        return self._retentions[block]

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence names `block`, live or retained."""
        return self._names[block] > 1

    def cut_point(self, blocks: Sequence[int], count: int) -> int:
        """How many of a retained sequence's blocks to keep so that unretaining the others frees `count`, or all it can.

        All of them if no block would be freed.
        """
        names = self._names
        keep = len(blocks)
        for position in range(len(blocks) - 1, -1, -1):
            if names[blocks[position]] == 1:  # that one name is the sequence's own
                keep = position
                count -= 1
                if not count:
                    break
        return keep

    @property
    def used_block_count(self) -> int:
        """Blocks that live sequences name."""
        return self._never_used - 1 - len(self._returned) - self._cached - len(self._loose)

    @property
    def cached_block_count(self) -> int:
        """Blocks that only retained sequences name."""
        return self._cached

    def adopt(self, block: int) -> None:
        """A block table has taken over a loose block."""
        self._loose.discard(block)

    @property
    def loose(self) -> frozenset[int]:
        """Blocks that a caller has taken and no table has adopted."""
        return frozenset(self._loose)

    @property
    def loose_block_count(self) -> int:
        """How many blocks a caller has taken and no table has adopted."""
        return len(self._loose)

    def free_ids(self) -> list[int]:
        """Every free block id, for audits."""
        return [*self._returned, *range(self._never_used, self._total + 1)]
