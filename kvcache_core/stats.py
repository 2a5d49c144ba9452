"""What a cache says about itself: immutable numbers, taken at one moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_core.allocator import BlockAllocator
    from kvcache_core.sequence import CachedSequence

__all__ = ["CacheGcStats", "CacheHandleStats", "CacheManagerStats", "MemoryPressure", "utilization"]


class MemoryPressure(Enum):
    """How much of the budget is referenced by sequences, against the configured thresholds."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True, kw_only=True)
class CacheHandleStats:
    """One sequence in numbers.

    Attributes:
        memory_bytes: Bytes of K and V blocks this sequence holds, each shared block divided by the number of
            sequences that name it.
        total_memory_bytes: The same with shared blocks counted whole.
        blocks_allocated: Blocks in the table, reserved ones included.
        shared_blocks: Of these, blocks that other sequences name too.
        tokens_stored: Committed tokens.
        utilization: `tokens_stored` divided by the tokens the blocks have room for; 0.0 without blocks.
        last_access: `time.time()` of the last step, truncate or read.
    """

    memory_bytes: int
    total_memory_bytes: int
    blocks_allocated: int
    shared_blocks: int
    tokens_stored: int
    utilization: float
    last_access: float


@dataclass(frozen=True, kw_only=True)
class CacheManagerStats:
    """One cache in numbers.

    Attributes:
        total_bytes: The budget in bytes.
        used_bytes: Bytes of the blocks that sequences name, each block counted once.
        storage_bytes: Bytes of device memory the storage holds at the moment, as it reports them.
        active_caches: Live sequences.
        tokens_stored: Committed tokens of all live sequences, shared ones counted for each.
        utilization: Share of the token slots in `used_blocks` that hold a committed token, each slot counted once; the
            rest is waste: reserved room, and the ends of last blocks. 0.0 without used blocks.
        total_blocks: Blocks of the budget; the sum of the next four.
        used_blocks: Blocks that sequences name.
        cached_blocks: Blocks kept for reuse that no live sequence names; they can be evicted.
        loose_blocks: Blocks taken from the allocator by hand and not adopted by a table.
        free_blocks: Blocks that are free.
        cached_prefixes: Finished sequences kept for reuse.
        hit_rate: Share of the looked-up prompt tokens that were found cached; 0.0 before the first look-up.
        evictions: Cached blocks that had to leave the device to make room, so far.
        tier_blocks: Blocks of the backend's host tier; 0 without one.
        tier_free_blocks: Of these, blocks that nothing lies in.
        demoted_blocks: Of these, blocks of evicted prefixes, which prompts can find.
        demotions: Evicted blocks that went to the host tier instead of being dropped, so far.
        promotions: Blocks that came back from there because a prompt found them, so far.
        demoted_evictions: Blocks that were dropped from there, for room or by age, so far.
        allocations: Sequences allocated or forked, so far.
        failures: Operations refused for want of room, so far.
        pressure: Share of the budget in use, as a level.
    """

    total_bytes: int
    used_bytes: int
    storage_bytes: int
    active_caches: int
    tokens_stored: int
    utilization: float
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    loose_blocks: int
    free_blocks: int
    cached_prefixes: int
    hit_rate: float
    evictions: int
    tier_blocks: int
    tier_free_blocks: int
    demoted_blocks: int
    demotions: int
    promotions: int
    demoted_evictions: int
    allocations: int
    failures: int
    pressure: MemoryPressure


@dataclass(frozen=True, kw_only=True)
class CacheGcStats:
    """What one `gc()` gave back.

    Attributes:
        freed_bytes: Bytes of the blocks that became free.
        freed_caches: Sequences whose handles had been dropped without `free()`.
    """

    freed_bytes: int
    freed_caches: int


def utilization(sequences: Collection[CachedSequence], allocator: BlockAllocator) -> float:
    """Share of the token slots in the blocks of live sequences that hold a committed token; 0.0 without blocks."""
    size, used_blocks = allocator.block_size, allocator.used_block_count
    if not used_blocks:
        return 0.0
    unfilled: dict[int, int] = {}  # rows without a token in each block that some sequence does not fill
    for sequence in sequences:
        full = sequence.num_tokens // size
        for index, block in enumerate(sequence.blocks[full:], start=full):
            empty = min(size, (index + 1) * size - sequence.num_tokens)
            unfilled[block] = min(empty, unfilled.get(block, size))
    shared = {block for block in unfilled if allocator.references(block) > 1}
    for sequence in sequences if shared else ():
        for block in shared.intersection(sequence.blocks[: sequence.num_tokens // size]):
            unfilled.pop(block, None)  # another sequence fills it
    return 1 - sum(unfilled.values()) / (used_blocks * size)
