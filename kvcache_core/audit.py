"""The census of a cache: every block accounted for, every count equal to the names it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcache_core.allocator import BlockAllocator
from kvcache_core.block_table import blocks_for
from kvcache_core.prefix import PrefixEntry, PrefixIndex
from kvcache_core.sequence import CachedSequence, HandleState

__all__ = ["audit_books", "audit_prefixes"]


def audit_books(
    allocator: BlockAllocator, sequences: Iterable[CachedSequence], retained: Iterable[CachedSequence] = ()
) -> list[str]:
    """Return a line for each inconsistency between the allocator and the block tables.

    Args:
        allocator: The block ids and their counts.
        sequences: Every live sequence.
        retained: Every sequence that is kept for reuse.
    """
    problems: list[str] = []
    names: Counter[int] = Counter()
    for sequence in sequences:
        problems += _audit_sequence(sequence, allocator.block_size)
        names.update(sequence.blocks)
        names.update(_held_by_step(sequence))
    keeps: Counter[int] = Counter()
    for sequence in retained:
        keeps.update(sequence.blocks)
    free = allocator.free_ids()
    loose = allocator.loose
    names.update(loose)
    total = allocator.total_block_count
    problems += [f"block {block} is free twice" for block, count in Counter(free).items() if count > 1]
    for block in range(1, total + 1):
        if allocator.references(block) != names[block]:
            problems.append(
                f"block {block} counts {allocator.references(block)} references and {names[block]} tables name it"
            )
        if allocator.retentions(block) != keeps[block]:
            problems.append(
                f"block {block} counts {allocator.retentions(block)} retentions and {keeps[block]} kept tables name it"
            )
    cached = sum(not names[block] for block in keeps)
    if allocator.cached_block_count != cached:
        problems.append(f"cached count is {allocator.cached_block_count} but {cached} blocks are only kept")
    named = {block for counts in (names, keeps) for block, count in counts.items() if count}
    problems += [f"block {block} is free and named" for block in free if block in named]
    exist = set(range(1, total + 1))
    problems += [f"block {block} does not exist but is named" for block in sorted(named - exist)]
    problems += [f"block {block} does not exist but is free" for block in sorted(set(free) - exist)]
    lost = sorted(exist - named - set(free))
    if lost:
        problems.append(f"blocks {lost} are neither free nor named by anybody")
    if len(free) != allocator.free_block_count:
        problems.append(f"free count is {allocator.free_block_count} but {len(free)} blocks are free")
    return problems


def _audit_sequence(sequence: CachedSequence, block_size: int) -> list[str]:
    problems = []
    name = sequence.request_id
    if blocks_for(sequence.num_tokens, block_size) > len(sequence.blocks):
        problems.append(f"{name}: {sequence.num_tokens} tokens do not fit {len(sequence.blocks)} blocks")
    if sequence.num_tokens > sequence.max_tokens:
        problems.append(f"{name}: {sequence.num_tokens} tokens exceed its maximum of {sequence.max_tokens}")
    if len(sequence.token_ids) > sequence.num_tokens:
        problems.append(f"{name}: {len(sequence.token_ids)} token ids are known of {sequence.num_tokens} tokens")
    if len(set(sequence.blocks)) != len(sequence.blocks):
        problems.append(f"{name}: its table names a block twice")
    if sequence.references < 1:
        problems.append(f"{name}: is live with {sequence.references} references")
    if sequence.state is HandleState.FREED:
        problems.append(f"{name}: is live though it was freed")
    if sequence.transaction is not None and sequence.transaction.state != "open":
        problems.append(f"{name}: is held by a step that was {sequence.transaction.state}")
    return problems


def _held_by_step(sequence: CachedSequence) -> list[int]:
    """Blocks that the open step of this sequence keeps so that it can go back to them."""
    if sequence.transaction is None:
        return []
    return [
        block
        for part in sequence.transaction.parts
        if part.sequence is sequence
        for block in part.reservation.held_blocks
    ]


def audit_prefixes(
    index: PrefixIndex, sequences: Iterable[CachedSequence], retained: Iterable[CachedSequence]
) -> list[str]:
    """Return a line for each entry of the index that does not lead to what it promises."""
    problems = []
    holders = {id(sequence): sequence for sequence in (*sequences, *retained)}
    entries = {id(entry) for _, entry in index}
    for digest, entry in index:
        name, position = f"prefix entry {digest.hex()[:8]}", entry.position
        home = entry.home
        if id(home) not in holders:
            problems.append(f"{name}: its home {home.request_id} is gone")
        elif position >= len(home.digests) or home.digests[position] != digest or position >= len(home.blocks):
            problems.append(f"{name}: its home {home.request_id} does not hold it")
        elif home.token_ids[position * index.block_size : (position + 1) * index.block_size].tobytes() != entry.tokens:
            problems.append(f"{name}: its home {home.request_id} holds other tokens")
        if isinstance(entry.parent, PrefixEntry) and id(entry.parent) not in entries:
            problems.append(f"{name}: the block before it cannot be found")
    for sequence in holders.values():
        missing = [digest for digest in sequence.digests if index.get(digest) is None]
        if missing:
            problems.append(f"{sequence.request_id}: {len(missing)} of its named blocks are not in the index")
    return problems
