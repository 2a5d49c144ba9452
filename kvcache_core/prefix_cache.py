"""Keeping finished sequences for reuse: what to keep, what to find again, what to drop when room is needed."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvcache_core.books import Books
from kvcache_core.eviction import CacheEvictionPolicy, EvictionCandidate
from kvcache_core.prefix import PrefixExplanation, PrefixIndex, PrefixKey
from kvcache_core.sequence import CachedSequence
from kvcache_core.storage import Storage

__all__ = ["PrefixCache", "PrefixHit", "PrefixSettings"]


@dataclass(frozen=True, kw_only=True)
class PrefixSettings:
    """How prefixes are kept and found.

    Attributes:
        enabled: Whether prompts reuse what earlier sequences stored.
        max_prefixes: Finished sequences kept at most.
        min_prefix_length: Tokens below which a prefix is neither kept nor found.
        ttl_seconds: Seconds without use after which a kept prefix is dropped, or None for never.
        cross_request_sharing: Whether a prompt finds what sequences with another request id stored.
        namespace: Identity of the model, part of every key.
    """

    enabled: bool = False
    max_prefixes: int = 1000
    min_prefix_length: int = 0
    ttl_seconds: float | None = None
    cross_request_sharing: bool = True
    namespace: str | None = None


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a prompt.

    Attributes:
        home: A sequence that holds all of it.
        digests: Names of its blocks.
        num_tokens: Its length.
    """

    home: CachedSequence
    digests: list[bytes]
    num_tokens: int


class PrefixCache:
    """Finds and keeps prefixes; all methods run under the cache's lock.

    A finished sequence is kept whole up to its last findable block: the record, its table and its slot stay
    as they were, and only its handles are gone. Evicting cuts such a sequence from the tail.

    Attributes:
        settings: How prefixes are kept and found; may be replaced at any time.
        retained: Sequences that are kept though no handle refers to them, by cache id.
        looked_up: Prompt tokens that were looked up so far.
        found: Prompt tokens that were found so far.
        evictions: Cached blocks dropped so far to make room.
    """

    def __init__(
        self,
        books: Books,
        storage: Storage,
        live: Mapping[str, CachedSequence],
        settings: PrefixSettings,
        policy: CacheEvictionPolicy,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.retained: dict[str, CachedSequence] = {}
        self.looked_up = 0
        self.found = 0
        self.evictions = 0
        self.index = PrefixIndex(books.block_size)
        self._books = books
        self._storage = storage
        self._live = live

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found."""
        return self.found / self.looked_up if self.looked_up else 0.0

    def enable(self, enabled: bool) -> None:
        """Switch reuse on or off; off drops what is kept."""
        if not enabled:
            self.clear()
        self.settings = replace(self.settings, enabled=enabled)

    # -- finding -----------------------------------------------------------------------------------------

    def lookup(self, key: PrefixKey, token_ids: array[int]) -> PrefixHit | None:
        """Find the longest cached prefix that leaves the last token of the prompt to compute."""
        if not self.settings.enabled or not token_ids:
            return None
        self.expire()
        self.looked_up += len(token_ids)
        digests, entry = self.index.match(key, token_ids, self._most_blocks(token_ids))
        num_tokens = len(digests) * self._books.block_size
        if entry is None or num_tokens < self.settings.min_prefix_length:
            return None
        self.found += num_tokens
        home = entry.home
        if home.cache_id in self.retained:
            home.touch()
            self.policy.record_access(home.cache_id)
        return PrefixHit(home, digests, num_tokens)

    def explain(self, key: PrefixKey, token_ids: array[int], *, across_salts: bool) -> PrefixExplanation:
        """Say what a prompt would find now, and why not more; changes nothing."""
        size, minimum = self._books.block_size, self.settings.min_prefix_length
        most = self._most_blocks(token_ids)
        if not self.settings.enabled:
            return PrefixExplanation(
                num_tokens=0, reason="disabled", diverged_at=None, message="prefix reuse is switched off"
            )
        if most == 0:
            return PrefixExplanation(
                num_tokens=0,
                reason="shorter-than-a-block",
                diverged_at=None,
                message=f"{len(token_ids)} tokens hold no full block of {size} besides the last token",
            )
        blocks, reason, diverged_at = self.index.explain(key, token_ids, most, across_salts=across_salts)
        found = blocks * size
        if 0 < found < minimum:
            message = f"{found} tokens are cached, fewer than min_prefix_length={minimum}"
            return PrefixExplanation(num_tokens=0, reason="below-minimum", diverged_at=None, message=message)
        after = f"{found} of {len(token_ids)} tokens are cached; "
        message = {
            "hit": f"{found} of {len(token_ids)} tokens are cached; the rest of the last block is always computed",
            "evicted": after + f"the block at token {found} was stored and has been dropped since",
            "diverged": after + f"what is cached differs from token {diverged_at} on",
            "salt-differs": after + "the same tokens are cached under another key",
        }.get(reason, after + f"the block at token {found} was never stored")
        return PrefixExplanation(num_tokens=found, reason=reason, diverged_at=diverged_at, message=message)

    def _most_blocks(self, token_ids: array[int]) -> int:
        return max(0, len(token_ids) - 1) // self._books.block_size

    # -- keeping -----------------------------------------------------------------------------------------

    def publish(self, sequence: CachedSequence) -> None:
        """Make the full named blocks of a sequence findable."""
        if self.settings.enabled:
            self.index.publish(sequence)

    def deduplicate(self, sequence: CachedSequence) -> None:
        """Name the blocks that others hold with the same contents, instead of own copies; paged memory only.

        Not done at the commit that completes a block, since attention of that step may still read it.
        """
        if self._storage.placement != "paged":
            return
        digests = sequence.digests
        for position in range(sequence.deduplicated, len(digests)):
            entry = self.index.get(digests[position])
            if entry is None or entry.home is sequence:
                continue
            own, other = sequence.blocks[position], entry.home.blocks[position]
            if own != other:
                self._books.share([other])
                sequence.blocks[position] = other
                sequence.version += 1  # a finished step over it must not read the old block any more
                self._books.release([own])
        sequence.deduplicated = len(digests)

    def retain(self, sequence: CachedSequence) -> bool:
        """Keep a sequence whose last handle is being freed, if it is worth it.

        Returns:
            Whether it was kept; if not, the caller frees it.
        """
        settings, size = self.settings, self._books.block_size
        keep = len(sequence.digests)
        if not settings.enabled or not keep or keep * size < settings.min_prefix_length or not settings.max_prefixes:
            return False
        self.deduplicate(sequence)
        if self._is_covered(sequence):
            return False
        self._storage.truncate(sequence.slot, keep * size)
        dropped = sequence.blocks[keep:]
        del sequence.blocks[keep:]
        self._books.release(dropped)
        self._books.retain(sequence.blocks)
        sequence.num_tokens = keep * size
        del sequence.token_ids[keep * size :]
        sequence.touch()
        self.retained[sequence.cache_id] = sequence
        self.policy.record_access(sequence.cache_id)
        self._drop_covered_by(sequence)
        while len(self.retained) > settings.max_prefixes:
            self._evict_one()
        return sequence.cache_id in self.retained

    def _is_covered(self, sequence: CachedSequence) -> bool:
        """Whether another retained sequence holds everything that this one would be kept for."""
        entry = self.index.get(sequence.digests[-1])
        if entry is None or entry.home.cache_id not in self.retained:
            return False
        entry.home.touch()
        self.policy.record_access(entry.home.cache_id)
        return True

    def _drop_covered_by(self, sequence: CachedSequence) -> None:
        """Drop retained sequences that are a prefix of this one."""
        homes = {entry.home.cache_id: entry.home for digest in sequence.digests if (entry := self.index.get(digest))}
        for home in homes.values():
            depth = len(home.digests)
            covered = home.cache_id in self.retained and home is not sequence
            if covered and sequence.digests[depth - 1 : depth] == home.digests[-1:]:
                self._cut(home, 0)

    # -- dropping ----------------------------------------------------------------------------------------

    def make_room(self, count: int) -> None:
        """Evict until `count` blocks are free or nothing is left to evict."""
        allocator = self._books.allocator
        if count <= allocator.free_block_count or not self.retained:
            return
        for cache_id in self.policy.select_eviction_candidates(_Candidates(self.retained)):
            missing = count - allocator.free_block_count
            if missing <= 0:
                return
            sequence = self.retained[cache_id]
            before = allocator.free_block_count
            self._cut(sequence, self._cut_point(sequence, missing))
            self.evictions += allocator.free_block_count - before

    def expire(self) -> None:
        """Drop what was not used for longer than the time to live."""
        ttl = self.settings.ttl_seconds
        if ttl is None:
            return
        oldest = time.time() - ttl
        for sequence in [kept for kept in self.retained.values() if kept.last_access < oldest]:
            self._cut(sequence, 0)

    def forget(self, sequence: CachedSequence, keep: int) -> None:
        """A sequence no longer holds its blocks from logical index `keep` on."""
        if keep < len(sequence.digests):
            self.index.rehome(sequence, keep, itertools.chain(self.retained.values(), self._live.values()))
            sequence.deduplicated = min(sequence.deduplicated, keep)

    def clear(self) -> int:
        """Drop everything that is kept; what live sequences hold is not findable any more either.

        Returns:
            How many entries were dropped.
        """
        dropped = len(self.index)
        for sequence in self._live.values():
            sequence.digests.clear()
            sequence.prefix_key = None
            sequence.deduplicated = 0
        for sequence in list(self.retained.values()):
            sequence.digests.clear()
            self._cut(sequence, 0)
        self.index.clear()
        return dropped

    def _cut_point(self, sequence: CachedSequence, missing: int) -> int:
        """How many leading blocks to keep so that cutting the rest frees `missing` blocks, or all it can."""
        allocator = self._books.allocator
        for keep in range(len(sequence.blocks) - 1, -1, -1):
            block = sequence.blocks[keep]
            missing -= allocator.references(block) == 0 and allocator.retentions(block) == 1
            if missing <= 0:
                return keep
        return 0

    def _evict_one(self) -> None:
        for cache_id in self.policy.select_eviction_candidates(_Candidates(self.retained)):
            free = self._books.allocator.free_block_count
            self._cut(self.retained[cache_id], 0)
            self.evictions += self._books.allocator.free_block_count - free
            return
        self._cut(next(iter(self.retained.values())), 0)  # the policy spares everything; the limit holds all the same

    def _cut(self, sequence: CachedSequence, keep: int) -> None:
        """Keep the first `keep` blocks of a retained sequence; with none, it is gone."""
        dropped = sequence.blocks[keep:]
        if keep:
            self._storage.truncate(sequence.slot, keep * self._books.block_size)
        else:
            del self.retained[sequence.cache_id]
            self.policy.forget(sequence.cache_id)
        self.forget(sequence, keep)
        del sequence.blocks[keep:]
        sequence.num_tokens = keep * self._books.block_size
        del sequence.token_ids[sequence.num_tokens :]
        self._books.release_retained(dropped)
        if not keep:
            slot, sequence.slot = sequence.slot, None
            self._storage.close(slot)


class _Candidates(Mapping[str, EvictionCandidate]):
    """The retained sequences as a policy sees them, described only when it looks."""

    def __init__(self, retained: Mapping[str, CachedSequence]) -> None:
        self._retained = retained

    def __getitem__(self, cache_id: str) -> EvictionCandidate:
        sequence = self._retained[cache_id]
        return EvictionCandidate(cache_id, len(sequence.blocks), sequence.priority)

    def __iter__(self) -> Iterator[str]:
        return iter(self._retained)

    def __len__(self) -> int:
        return len(self._retained)
