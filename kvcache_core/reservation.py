"""Room for the next tokens of a sequence: further blocks, and private copies of blocks that others see."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_core.block_table import blocks_for
from kvcache_core.books import Books
from kvcache_core.sequence import CachedSequence
from kvcache_core.storage import BlockCopy, Storage

__all__ = ["Reservation"]


class Reservation:
    """Makes positions `start` to `stop` of one sequence writable, and can take it all back.

    Only the block that holds `start` can be both partly filled and shared: blocks before it are not written,
    and blocks after it hold no committed token of this sequence.

    Attributes:
        sequence: Whose room it is.
        start: First position that will be written.
        stop: One past the last one.
        needed: Free blocks that `apply` takes.
        copies: Whether one of them takes the place of a shared block.
    """

    __slots__ = ("_copied", "_had_blocks", "copies", "needed", "sequence", "start", "stop")

    def __init__(self, books: Books, sequence: CachedSequence, start: int, stop: int) -> None:
        self.sequence = sequence
        self.start = start
        self.stop = stop
        #: (logical index, block named before, private block) of the copied block, once there is one.
        self._copied: tuple[int, int, int] | None = None
        size, blocks = books.block_size, sequence.blocks
        row = start % size
        self._had_blocks = held = len(blocks)
        missing = -(-stop // size) - held
        self.needed = missing if missing > 0 else 0
        self.copies = row > 0 and stop > start and books.is_shared(blocks[start // size])
        if self.copies:
            self.needed += 1

    def apply(self, books: Books, storage: Storage, taken: Sequence[int]) -> None:
        """Enter the `needed` blocks in the table and have the storage prepare them.

        If the storage raises, the table is as before and `taken` belongs to the caller again.
        """
        sequence = self.sequence
        blocks = sequence.blocks
        copies: Sequence[BlockCopy] = ()
        if self.copies:
            *taken, new = taken
            copies = [self._copy_to(new, books.block_size)]
        blocks += taken
        try:
            storage.reserve(sequence.slot, blocks, self.start, self.stop, copies)
        except BaseException:
            self._restore_table()
            raise

    def _copy_to(self, new: int, size: int) -> BlockCopy:
        """Enter a private block for the shared one; return the copy that is needed."""
        index, row = divmod(self.start, size)
        old = self.sequence.blocks[index]
        self._copied = (index, old, new)
        self.sequence.blocks[index] = new
        return BlockCopy(old, new, row)

    def _restore_table(self) -> None:
        del self.sequence.blocks[self._had_blocks :]
        if self._copied is not None:
            index, old, _ = self._copied
            self.sequence.blocks[index] = old

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """The shared block that was copied and that `undo` would return to; still counted as named."""
        return () if self._copied is None else (self._copied[1],)

    def undo(self, books: Books) -> None:
        """Put the table back as it was before `apply` and free the blocks that it took."""
        taken = self.sequence.blocks[self._had_blocks :]
        if self._copied is not None:
            taken.append(self._copied[2])
        self._restore_table()
        books.release(taken)

    def settle(self, block_size: int, num_tokens: int) -> list[int]:
        """Keep what the first `num_tokens` tokens need and what was there before; return the rest, to be released."""
        keep = max(blocks_for(num_tokens, block_size), self._had_blocks)
        excess = self.sequence.blocks[keep:]
        del self.sequence.blocks[keep:]
        if self._copied is not None:
            excess.append(self._copied[1])  # held until now so that `undo` could return to it
        return excess
