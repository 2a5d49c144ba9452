"""What a cache says about itself: immutable numbers, taken at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["CacheGcStats", "CacheHandleStats", "CacheManagerStats", "MemoryPressure"]


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
        total_blocks: Blocks of the budget; the sum of the next four.
        used_blocks: Blocks that sequences name.
        cached_blocks: Blocks kept for reuse that no live sequence names; they can be evicted.
        loose_blocks: Blocks taken from the allocator by hand and not adopted by a table.
        free_blocks: Blocks that are free.
        cached_prefixes: Finished sequences kept for reuse.
        hit_rate: Share of the looked-up prompt tokens that were found cached; 0.0 before the first look-up.
        evictions: Cached blocks dropped to make room, so far.
        allocations: Sequences allocated or forked, so far.
        failures: Operations refused for want of room, so far.
        pressure: Share of the budget in use, as a level.
    """

    total_bytes: int
    used_bytes: int
    storage_bytes: int
    active_caches: int
    tokens_stored: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    loose_blocks: int
    free_blocks: int
    cached_prefixes: int
    hit_rate: float
    evictions: int
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
