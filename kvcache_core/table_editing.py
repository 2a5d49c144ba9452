"""Extending a block table by hand: what the caller adds is taken over whole, or given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcache_core.block_table import MutableBlockTable, blocks_for
from kvcache_core.errors import HandleError, ShapeError
from kvcache_core.sequence import CachedSequence
from kvcache_core.sequence_store import SequenceStore

__all__ = ["edited_table"]


@contextmanager
def edited_table(store: SequenceStore, sequence: CachedSequence) -> Iterator[MutableBlockTable]:
    """Yield a table to extend; adopt its blocks on a normal exit, give them back otherwise.

    Raises:
        StepError: The sequence is part of an open step.
        ShapeError: On exit: a block is missing, moved or named twice, or there are more than the sequence can fill.
        HandleError: On exit: a block is not one the caller has got from the allocator; or the sequence changed.
    """
    allocator, taken = store.books.allocator, list[int]()

    def allocate(count: int) -> Sequence[int]:
        blocks = allocator.allocate_blocks(count)
        taken.extend(blocks)
        return blocks

    with store.locked():
        store.require_changeable(sequence, "edit the block table of")
        before, version = list(sequence.blocks), sequence.version
        table = MutableBlockTable(before, sequence.num_tokens, allocator.block_size, allocate)
    adopted: list[int] = []
    try:
        yield table
        with store.locked():
            store.require_changeable(sequence, "edit the block table of")
            if sequence.version != version or sequence.blocks != before:
                raise HandleError(
                    f"{sequence.request_id!r} changed while its block table was being edited; edit it again",
                    reason="stale",
                )
            adopted = _added(table, sequence, allocator.loose)
            for block in adopted:
                allocator.adopt(block)
            sequence.blocks += adopted
    finally:
        table.freeze()
        if store.unusable is None:  # else there is nothing to give anything back to
            loose = set(taken).difference(adopted) & allocator.loose  # the caller may have given some back himself
            allocator.free_blocks(loose)


def _added(table: MutableBlockTable, sequence: CachedSequence, loose: frozenset[int]) -> list[int]:
    """Return the blocks that an edited table adds, if it is sound."""
    before, edited = sequence.blocks, list(table.physical_blocks)
    added = edited[len(before) :]
    if edited[: len(before)] != before:
        raise ShapeError("a block table may only grow: its first blocks must stay as they were")
    if len(set(added)) != len(added):
        raise ShapeError("a block is named twice in the block table")
    foreign = [block for block in added if block not in loose]
    if foreign:
        raise HandleError(
            f"blocks {foreign} do not belong to the caller; get blocks from allocate_blocks", reason="foreign"
        )
    if table.sequence_length != sequence.num_tokens:
        raise ShapeError("the sequence length moves only when a step commits or by truncate")
    most = blocks_for(sequence.max_tokens, table.block_size)
    if added and len(edited) > most:
        raise ShapeError(f"{len(edited)} blocks are more than the {most} that {sequence.max_tokens} tokens fill")
    return added
