"""The census of a cache: every block accounted for, every count equal to the names it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcache_core.allocator import BlockAllocator
from kvcache_core.block_table import blocks_for
from kvcache_core.sequence import CachedSequence

__all__ = ["audit_books"]


def audit_books(allocator: BlockAllocator, sequences: Iterable[CachedSequence]) -> list[str]:
    """Return a line for each inconsistency between the allocator and the block tables."""
    problems: list[str] = []
    names: Counter[int] = Counter()
    for sequence in sequences:
        problems += _audit_sequence(sequence, allocator.block_size)
        names.update(sequence.blocks)
        names.update(_held_by_step(sequence))
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
    problems += [f"block {block} is free and named" for block in free if names[block]]
    problems += [f"block {block} does not exist but is named" for block in names if not 1 <= block <= total]
    lost = total - len(set(free) | set(names))
    if lost:
        problems.append(f"{lost} blocks are neither free nor named by anybody")
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
