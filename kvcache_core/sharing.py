"""Making an empty sequence start with tokens of another, exact to the token."""

from __future__ import annotations

from kvcache_core.block_table import blocks_for
from kvcache_core.errors import ShapeError
from kvcache_core.sequence import CachedSequence
from kvcache_core.sequence_store import SequenceStore
from kvcache_core.validation import show

__all__ = ["share_prefix"]


def share_prefix(store: SequenceStore, source: CachedSequence, target: CachedSequence, num_tokens: int) -> None:
    """Make an empty sequence start with the first `num_tokens` tokens of another.

    Raises:
        ShapeError: `target` is not empty, or `num_tokens` is more than there are or than it may hold.
        StepError: One of them is part of an open step.
        CacheFullError: Something has to be copied and there is no room; nothing changes.
    """
    with store.locked():
        _require_shareable(store, source, target, num_tokens)
        size = store.books.block_size
        slot, shared = store.fork_memory(source, num_tokens)
        room = max(blocks_for(num_tokens, size), len(target.blocks))  # what was reserved stays reserved
        missing = room - len(shared) - len(target.blocks)
        try:
            taken = store.books.take(max(0, missing), purpose=f"to share {num_tokens} tokens")
        except BaseException:
            store.give_back(slot, shared)
            raise
        blocks = [*shared, *target.blocks, *taken]
        replaced, target.blocks = target.slot, blocks[:room]
        store.start_with(target, source, slot, num_tokens)
        target.version += 1
        target.touch()
        _take_over_names(store, source, target, num_tokens // size)
        if "prefix_shared" in store.events.wanted:
            store.events.note(
                "prefix_shared",
                target,
                source_request_id=source.request_id,
                source_cache_id=source.cache_id,
                num_tokens=num_tokens,
            )
        store.give_back(replaced, blocks[room:])


def _require_shareable(store: SequenceStore, source: CachedSequence, target: CachedSequence, num_tokens: int) -> None:
    """Raise unless `target` can start with so many tokens of `source`."""
    store.require_changeable(source, "share a prefix of")
    store.require_changeable(target, "share a prefix with")
    most = min(source.num_tokens, target.max_tokens)
    if target.num_tokens or target is source:
        raise ShapeError(f"{target.request_id!r} must be another sequence, and empty, to take over a prefix")
    if type(num_tokens) is not int or not 0 <= num_tokens <= most:
        raise ShapeError(f"share_prefix takes an int from 0 to {most} tokens, not {show(num_tokens)}")
    if source.capacity < target.max_tokens and store.storage.placement == "contiguous":
        raise ShapeError(
            f"{target.request_id!r} may hold {target.max_tokens} tokens and memory like that of "
            f"{source.request_id!r} only {source.capacity}; allocate both with the same max_sequence_length"
        )


def _take_over_names(store: SequenceStore, source: CachedSequence, target: CachedSequence, num_blocks: int) -> None:
    """Let prompts find the shared prefix through `target` too, if those that may find one may find the other."""
    if not target.num_tokens:
        return
    if source.prefix_key != target.prefix_key:
        target.prefix_key = None  # what it holds was computed under one key, and what follows under another
    elif source.tip is not None:
        store.prefixes.index.hold(target, source.tip.ancestor(num_blocks))
        target.deduplicated = source.deduplicated and source.deduplicated.ancestor(num_blocks)
