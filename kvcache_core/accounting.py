"""A cache and its sequences in numbers, and whether its books are right; each taken at one moment, under its lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_core.audit import audit_books, audit_prefixes, audit_tier
from kvcache_core.sequence import CachedSequence
from kvcache_core.stats import CacheHandleStats, CacheManagerStats, utilization

if TYPE_CHECKING:
    from kvcache_core.sequence_store import SequenceStore

__all__ = ["audit_cache", "cache_statistics", "sequence_statistics"]


def cache_statistics(store: SequenceStore) -> CacheManagerStats:
    """The whole cache in numbers."""
    storage = store.storage
    with store.locked():
        books, allocator, prefixes = store.books, store.books.allocator, store.prefixes
        block_bytes = storage.bytes_per_block
        return CacheManagerStats(
            total_bytes=allocator.total_block_count * block_bytes,
            used_bytes=books.used_blocks * block_bytes,
            storage_bytes=storage.nbytes,
            active_caches=len(store.live),
            tokens_stored=sum(sequence.num_tokens for sequence in store.live.values()),
            utilization=utilization(store.live.values(), allocator),
            total_blocks=allocator.total_block_count,
            used_blocks=books.used_blocks,
            cached_blocks=allocator.cached_block_count,
            loose_blocks=allocator.loose_block_count,
            free_blocks=allocator.free_block_count,
            cached_prefixes=len(prefixes.retained),
            hit_rate=prefixes.hit_rate,
            evictions=prefixes.evictions,
            tier_blocks=storage.tier_blocks,
            tier_free_blocks=storage.tier_free_blocks,
            demoted_blocks=len(prefixes.demoted),
            demotions=prefixes.demoted.demotions,
            promotions=prefixes.demoted.promotions,
            demoted_evictions=prefixes.demoted.dropped,
            allocations=store.allocations,
            failures=books.failures,
            pressure=store.pressure.level(books.used_blocks, allocator.total_block_count),
        )


def sequence_statistics(store: SequenceStore, sequence: CachedSequence) -> CacheHandleStats:
    """One sequence in numbers."""
    with store.locked():
        allocator, block_bytes = store.books.allocator, store.storage.bytes_per_block
        references = [allocator.references(block) for block in sequence.blocks]
        room = len(references) * allocator.block_size
        return CacheHandleStats(
            memory_bytes=round(sum(block_bytes / count for count in references)),
            total_memory_bytes=block_bytes * len(references),
            blocks_allocated=len(references),
            shared_blocks=sum(count > 1 for count in references),
            tokens_stored=sequence.num_tokens,
            utilization=sequence.num_tokens / room if room else 0.0,
            last_access=sequence.last_access,
        )


def audit_cache(store: SequenceStore) -> tuple[str, ...]:
    """Every inconsistency in the books and in the storage's own."""
    with store.locked():
        live, retained = store.live.values(), store.prefixes.retained.values()
        return (
            *audit_books(store.books.allocator, live, retained),
            *audit_prefixes(store.prefixes.index, live, retained),
            *audit_tier(store.storage, live, store.prefixes.demoted),
            *store.storage.audit(),
        )
