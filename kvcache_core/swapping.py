"""Moving sequences between the device and the host tier of a backend that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_core.block_table import blocks_for
from kvcache_core.sequence import CachedSequence, HandleState

if TYPE_CHECKING:
    from kvcache_core.sequence_store import SequenceStore

__all__ = ["swap_in", "swap_out"]


def swap_out(store: SequenceStore, sequence: CachedSequence) -> None:
    """Copy a sequence to the host tier, then free its blocks; a full tier leaves it where it is."""
    with store.locked():
        store.require_changeable(sequence, "swap out")
        used = blocks_for(sequence.num_tokens, store.books.block_size)
        store.prefixes.demoted.make_room(used)
        sequence.swapped = store.storage.swap_out(sequence.slot, sequence.blocks[:used], sequence.num_tokens)
        sequence.state = HandleState.SWAPPED
        sequence.version += 1
        sequence.touch()
        store.prefixes.forget(sequence, 0)
        blocks, sequence.blocks = sequence.blocks, []
        slot, sequence.slot = sequence.slot, None
        if "swapped_out" in store.events.wanted:
            store.events.note("swapped_out", sequence, num_tokens=sequence.num_tokens, num_blocks=len(blocks))
        try:
            store.books.release(blocks)
        finally:
            store.storage.close(slot)


def swap_in(store: SequenceStore, sequence: CachedSequence) -> None:
    """Bring a sequence back into blocks of its own; without room it stays swapped out."""
    with store.locked():
        problem = store.problem_with(sequence)
        if problem is None:
            return  # another thread was faster
        if problem.reason != "swapped":
            raise problem
        needed = blocks_for(sequence.num_tokens, store.books.block_size)
        blocks = store.books.take(needed, purpose=f"to swap {sequence.request_id!r} in")
        try:
            sequence.slot = store.storage.swap_in(sequence.swapped, blocks)
        except BaseException:
            store.books.release(blocks)
            raise
        sequence.blocks = blocks
        sequence.swapped = None
        sequence.state = HandleState.ACTIVE
        sequence.version += 1
        sequence.touch()
        if "swapped_in" in store.events.wanted:
            store.events.note("swapped_in", sequence, num_tokens=sequence.num_tokens, num_blocks=len(blocks))
        store.prefixes.publish([sequence])
