"""Cached blocks that had to leave the device and wait in the backend's host tier until a prompt finds them again."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from kvcache_core.prefix_index import PrefixNode, name_after
from kvcache_core.storage import Storage

__all__ = ["DemotedBlock", "DemotedBlocks"]

#: The name of the block before it and its own token ids, in full: what a demoted block is found by.
_Place = tuple[bytes, bytes]


class DemotedBlock(NamedTuple):
    """A block in the host tier.

    Attributes:
        place: What it is found by.
        ticket: What the storage returned for it.
        since: `time.time()` when it was demoted, or last used in vain.
    """

    place: _Place
    ticket: Any
    since: float

    @property
    def name(self) -> bytes:
        """Its own name."""
        return name_after(*self.place)


class DemotedBlocks:
    """The blocks of evicted prefixes in the host tier, the oldest first; all methods run under the cache's lock.

    A block's key, salt and adapter are part of the name of the block before it, so that the tier separates tenants as
    the device does. Sequences that the caller swaps out come first: blocks here make room for them.

    Attributes:
        demotions: Blocks that went to the tier so far.
        promotions: Blocks that came back so far.
        dropped: Blocks that were dropped from the tier so far.
    """

    def __init__(self, storage: Storage) -> None:
        self.demotions = 0
        self.promotions = 0
        self.dropped = 0
        self._storage = storage
        self._size = storage.spec.block_size
        self._blocks: OrderedDict[_Place, DemotedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    # -- leaving the device ------------------------------------------------------------------------------

    def add(self, nodes: Sequence[PrefixNode], blocks: Sequence[int]) -> None:
        """Copy blocks to the tier, dropping the oldest there for room; the last ones stay out if there is too little.

        Args:
            nodes: What the blocks are, a later one of a sequence after an earlier one.
            blocks: Where they are on the device.
        """
        now, again = time.time(), 0
        new = []
        for node, block in zip(nodes, blocks, strict=True):
            place = (node.parent.name, node.tokens)
            known = self._blocks.pop(place, None)
            if known is not None:  # it went to the tier before, and was computed again since
                self._blocks[place] = known._replace(since=now)
                again += 1
            else:
                new.append((place, block))
        room = self._storage.tier_free_blocks + len(self._blocks) - again
        del new[room:]  # heads are worth more than the tails that grew from them
        if not new:
            return
        self.make_room(len(new))
        tickets = self._storage.demote([block for _, block in new])
        self.demotions += len(new)
        for (place, _), ticket in zip(reversed(new), reversed(tickets), strict=True):  # tails go first
            self._blocks[place] = DemotedBlock(place, ticket, now)

    def make_room(self, count: int) -> None:
        """Drop the oldest blocks until the tier has room for `count`; none if that cannot be reached."""
        missing = count - self._storage.tier_free_blocks
        if 0 < missing <= len(self._blocks):
            self._drop(missing)

    def _drop(self, count: int) -> None:
        with ExitStack() as stack:  # all of them, even if the storage raises
            for _ in range(count):
                _, block = self._blocks.popitem(last=False)
                self.dropped += 1
                stack.callback(self._storage.drop_swapped, block.ticket)

    def expire(self, oldest: float) -> None:
        """Drop what has been here since before `oldest`."""
        expired = 0
        for block in self._blocks.values():
            if block.since >= oldest:
                break
            expired += 1
        self._drop(expired)

    def clear(self) -> None:
        """Drop everything."""
        self._drop(len(self._blocks))

    # -- coming back -------------------------------------------------------------------------------------

    def find(self, name: bytes, token_ids: array[int], first: int, most: int) -> list[DemotedBlock]:
        """Return the blocks of a prompt that wait here, from block `first` on and at most up to block `most`.

        Args:
            name: The name of the block before `first`.
            token_ids: The prompt.
            first: Number of the first block to look for.
            most: One past the last one.
        """
        found: list[DemotedBlock] = []
        if not self._blocks:
            return found
        for index in range(first, most):
            tokens = token_ids[index * self._size : (index + 1) * self._size].tobytes()
            block = self._blocks.get((name, tokens))
            if block is None:
                break
            found.append(block)
            name = block.name
        return found

    def claim(self, blocks: Sequence[DemotedBlock]) -> None:
        """Take blocks out, so that nobody drops them; the caller promotes them or gives them back."""
        for block in blocks:
            del self._blocks[block.place]

    def give_back(self, blocks: Sequence[DemotedBlock]) -> None:
        """Put claimed blocks back, as the youngest."""
        now = time.time()
        for block in reversed(blocks):
            self._blocks[block.place] = block._replace(since=now)

    def promote(self, claimed: Sequence[DemotedBlock], blocks: Sequence[int]) -> None:
        """Copy claimed blocks to blocks of the device; if that raises, they are still claimed."""
        self._storage.promote([block.ticket for block in claimed], blocks)
        self.promotions += len(claimed)
