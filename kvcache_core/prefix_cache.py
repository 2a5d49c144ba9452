"""Keeping finished sequences for reuse: what to keep, what to find again, what to drop when room is needed."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_core.books import Books
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.demotion import DemotedBlock, DemotedBlocks
from kvcache_core.eviction import CacheEvictionPolicy, EvictionCandidate
from kvcache_core.observing import EventQueue
from kvcache_core.prefix import PrefixExplanation, PrefixKey
from kvcache_core.prefix_index import PrefixIndex, PrefixNode
from kvcache_core.sequence import CachedSequence
from kvcache_core.storage import Storage

if TYPE_CHECKING:
    from kvcache_core.events import EvictionReason

__all__ = ["PrefixCache", "PrefixHit"]


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a prompt.

    Attributes:
        home: A sequence that holds all of it that is on the device, or None if nothing is.
        tip: The last block of that, or None.
        num_tokens: Its tokens on the device.
        demoted: The blocks that follow, and wait in the host tier.
    """

    home: CachedSequence | None
    tip: PrefixNode | None
    num_tokens: int
    demoted: Sequence[DemotedBlock] = ()


class PrefixCache:
    """Finds and keeps prefixes; all methods run under the cache's lock.

    A finished sequence is kept whole up to its last findable block: the record, its table and its slot stay
    as they were, and only its handles are gone. Evicting cuts such a sequence from the tail. No kept sequence is
    a prefix of another.

    Attributes:
        settings: How prefixes are kept and found; may be replaced at any time.
        retained: Sequences that are kept though no handle refers to them, by cache id, least recently used first.
        looked_up: Prompt tokens that were looked up so far.
        found: Prompt tokens that were found so far.
        evictions: Cached blocks that have left the device so far to make room.
        demoted: Those of them that the host tier holds.
    """

    def __init__(
        self,
        books: Books,
        storage: Storage,
        live: Mapping[str, CachedSequence],
        settings: PrefixCacheConfig,
        policy: CacheEvictionPolicy,
        events: EventQueue,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.retained: OrderedDict[str, CachedSequence] = OrderedDict()
        self.looked_up = 0
        self.found = 0
        self.evictions = 0
        self.index = PrefixIndex(books.block_size)
        self.demoted = DemotedBlocks(storage)
        self._books = books
        self._storage = storage
        self._paged = storage.placement == "paged"
        self._reusable = storage.spec.geometry.prefix_reusable
        self._live = live
        self._events = events

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found."""
        return self.found / self.looked_up if self.looked_up else 0.0

    @property
    def enabled(self) -> bool:
        """Whether prompts reuse what earlier sequences stored: if it is switched on, and the model's keys allow it."""
        return self.settings.enabled and self._reusable

    def enable(self, enabled: bool) -> None:
        """Switch reuse on or off; off drops what is kept."""
        if not enabled:
            self.clear()
        self.settings = self.settings.model_copy(update={"enabled": enabled})

    # -- finding -----------------------------------------------------------------------------------------

    def capacity(self, max_tokens: int) -> int:
        """How many tokens to open a slot for that is to hold `max_tokens`.

        In contiguous memory a later prompt that finds its prefix there may want to grow further.
        """
        return max(max_tokens, self._storage.spec.max_sequence_length) if self.enabled else max_tokens

    def find(self, key: PrefixKey | None, token_ids: array[int], max_tokens: int) -> PrefixHit | None:
        """Find the longest cached prefix that leaves the last token of the prompt to compute.

        Args:
            key: What the prompt's K and V depend on besides its tokens; None finds nothing.
            token_ids: The prompt.
            max_tokens: Tokens that the sequence is to hold at most.
        """
        if key is None or not self.enabled:
            return None
        size = self._books.block_size
        least = max(1, self.settings.min_prefix_length)
        most = self._most_blocks(token_ids)
        node = self.index.find(key, token_ids, most)
        depth = 0 if node is None else node.depth
        demoted = self._find_demoted(key, node, token_ids, most)
        if demoted and (depth + len(demoted)) * size >= least:
            return PrefixHit(None if node is None else node.home, node, depth * size, demoted)
        while node is not None and node.depth * size >= least:
            home = self._forkable(node, max_tokens)
            if home is not None:
                return PrefixHit(home, node, node.depth * size)
            node = node.parent
        return None

    def _find_demoted(
        self, key: PrefixKey, node: PrefixNode | None, token_ids: array[int], most: int
    ) -> Sequence[DemotedBlock]:
        """What of a prompt waits in the host tier, from the block after `node` on; paged memory only."""
        if not self.demoted:
            return ()
        node = node or PrefixNode.root(key)
        return self.demoted.find(node.name, token_ids, node.depth, most)

    def _forkable(self, node: PrefixNode, max_tokens: int) -> CachedSequence | None:
        """A sequence that holds the block and whose memory a longer one can share now."""
        if self._paged:
            return node.home
        # In contiguous memory nobody else may touch a slot that an open step is writing to.
        candidates = itertools.chain([node.home], node.holders())
        return next((held for held in candidates if held.transaction is None and held.capacity >= max_tokens), None)

    def note_lookup(self, num_tokens: int, hit: PrefixHit | None) -> None:
        """Count a prompt that was looked up, and note that what it found was used."""
        if not self.enabled:
            return
        if hit is not None:
            if hit.home is not None and hit.home.is_kept:
                self._use(hit.home)
            self.found += hit.num_tokens + len(hit.demoted) * self._books.block_size
        self.looked_up += num_tokens

    def explain(
        self, key: PrefixKey | None, token_ids: array[int], max_tokens: int, *, across_salts: bool
    ) -> PrefixExplanation:
        """Say what a prompt would find now, and why not more."""
        size, minimum, length = self._books.block_size, self.settings.min_prefix_length, len(token_ids)
        most = self._most_blocks(token_ids)
        if key is None or not self.enabled:
            message = _why_disabled(is_named=key is not None, reusable=self._reusable)
            return PrefixExplanation(num_tokens=0, reason="disabled", message=message)
        if most == 0:
            message = f"{length} tokens hold no full block of {size} besides the last token"
            return PrefixExplanation(num_tokens=0, reason="shorter-than-a-block", message=message)
        blocks, reason, diverged_at = self.index.explain(key, token_ids, most, across_salts=across_salts)
        demoted = self._find_demoted(key, self.index.find(key, token_ids, blocks), token_ids, most)
        if demoted:
            blocks, diverged_at = blocks + len(demoted), None
            reason = "hit" if blocks == most else self.index.why_nothing_follows(demoted[-1].name, token_ids, blocks)
        cached = blocks * size
        if 0 < cached < minimum:
            message = f"{cached} tokens are cached, fewer than min_prefix_length={minimum}"
            return PrefixExplanation(num_tokens=0, reason="below-minimum", message=message)
        hit = self.find(key, token_ids, max_tokens)
        waiting = len(demoted) * size
        found = hit.num_tokens + waiting if hit is not None else 0
        if found < cached:
            message = f"{cached} tokens are cached, but only {found} can be shared while steps over them are open"
            return PrefixExplanation(num_tokens=found, reason="busy", message=message)
        why = {
            "hit": "the rest is always computed",
            "evicted": f"the block at token {found} was stored and has been dropped since",
            "diverged": f"what is cached differs from token {diverged_at} on",
            "salt-differs": "the same tokens are cached under another salt, adapter or namespace",
            "never-stored": f"the block at token {found} was never stored",
        }
        where = f", {waiting} of them in the host tier" if waiting else ""
        message = f"{found} of {length} tokens are cached{where}; {why[reason]}"
        return PrefixExplanation(
            num_tokens=found, demoted_tokens=waiting, reason=reason, diverged_at=diverged_at, message=message
        )

    def _most_blocks(self, token_ids: array[int]) -> int:
        return max(0, len(token_ids) - 1) // self._books.block_size

    def bring_back(self, sequence: CachedSequence, demoted: Sequence[DemotedBlock], token_ids: array[int]) -> None:
        """Fill the blocks after a new sequence's tokens with claimed ones of the host tier, and find them there again.

        If the storage raises, they are still claimed and nothing has changed.
        """
        first = sequence.num_tokens // self._books.block_size
        self.demoted.promote(demoted, sequence.blocks[first : first + len(demoted)])
        sequence.num_tokens += len(demoted) * self._books.block_size
        sequence.token_ids = token_ids[: sequence.num_tokens]
        self.publish([sequence])

    # -- keeping -----------------------------------------------------------------------------------------

    def publish(self, sequences: Iterable[CachedSequence]) -> None:
        """Make the full named blocks of sequences findable."""
        if not self.enabled:
            return
        publish = self.index.publish
        for sequence in sequences:
            before = sequence.tip
            is_first = publish(sequence)
            if is_first and sequence.deduplicated is before:
                sequence.deduplicated = sequence.tip  # nobody else has them

    def deduplicate(self, sequence: CachedSequence) -> None:
        """Name the blocks that others hold with the same contents, instead of own copies; paged memory only.

        Not done at the commit that completes a block, since attention of that step may still read it.
        """
        node, done = sequence.tip, sequence.deduplicated
        if node is None or node is done:
            return
        sequence.deduplicated = node
        if not self._paged:
            return
        replaced = []
        least = 0 if done is None else done.depth
        while node.depth > least:
            home, position = node.home, node.depth - 1
            if home is not sequence:
                own, other = sequence.blocks[position], home.blocks[position]
                if own != other:
                    self._books.share([other])
                    sequence.blocks[position] = other
                    replaced.append(own)
            node = node.parent
        if replaced:
            sequence.version += 1  # a finished step over it must not read the old blocks any more
            self._books.release(replaced)

    def retain(self, sequence: CachedSequence) -> None:
        """Take over a sequence whose last handle is being freed, if it is worth it; `is_kept` then tells so."""
        settings, size, tip = self.settings, self._books.block_size, sequence.tip
        if tip is None or not self.enabled or not settings.max_prefixes:
            return
        keep = tip.depth
        if keep * size < settings.min_prefix_length:
            return
        if tip.home.is_kept:  # another one holds all that this one would be kept for
            tip.home.priority = max(tip.home.priority, sequence.priority)
            self._use(tip.home)
            return
        self._storage.truncate(sequence.slot, keep * size)  # first, since it may raise
        self.deduplicate(sequence)
        dropped = self._shorten(sequence, keep)
        self._books.retain(sequence.blocks)
        sequence.is_kept = True
        self.retained[sequence.cache_id] = sequence
        surplus = self.index.prefer(sequence)
        if surplus:
            sequence.priority = max([sequence.priority, *(prefix.priority for prefix in surplus)])
        try:  # all of it, even if the storage or the policy raises
            self._books.release(dropped)
        finally:
            try:
                sequence.touch()
                self.policy.record_access(sequence.cache_id)
            finally:
                self._drop_surplus(surplus)

    def _drop_surplus(self, surplus: Iterable[CachedSequence]) -> None:
        """Drop these, and what is more than may be kept."""
        for prefix in surplus:
            self._drop(prefix, None)  # all that it holds stays findable
        most = self.settings.max_prefixes
        while len(self.retained) > most:
            self._evict_one()

    def _use(self, kept: CachedSequence) -> None:
        kept.touch()
        self.retained.move_to_end(kept.cache_id)
        self.policy.record_access(kept.cache_id)

    # -- dropping ----------------------------------------------------------------------------------------

    def make_room(self, count: int) -> None:
        """Evict until `count` blocks are free or nothing is left to evict."""
        allocator = self._books.allocator
        tried: set[str] = set()
        while (free := allocator.free_block_count) < count:
            sequence = self._next_victim(tried)
            if sequence is None:
                return
            tried.add(sequence.cache_id)
            self._evict(sequence, count - free)
            self.evictions += allocator.free_block_count - free

    def _next_victim(self, tried: Container[str] = ()) -> CachedSequence | None:
        """The kept sequence that the policy gives up first, or None if it spares all that were not tried."""
        chosen = self.policy.select_eviction_candidates(_Candidates(self.retained))
        known = (cache_id for cache_id in chosen if cache_id not in tried and cache_id in self.retained)
        cache_id = next(known, None)
        return None if cache_id is None else self.retained[cache_id]

    def _evict(self, sequence: CachedSequence, missing: int) -> None:
        """Cut a kept sequence from the tail until `missing` blocks are freed, or all that can be."""
        free = self._books.allocator.free_block_count
        keep = self._books.allocator.cut_point(sequence.blocks, missing)
        if keep == len(sequence.blocks):
            self._use(sequence)  # live sequences hold all of it, so it is in use right now
            return
        self._demote(sequence, keep)  # first, since it may raise
        if keep:
            self._storage.truncate(sequence.slot, keep * self._books.block_size)  # which may raise too
            self.forget(sequence, keep)
        tip = sequence.tip
        if not keep or tip is None or any(held.is_kept and held is not sequence for held in tip.holders()):
            self._drop(sequence, "room")  # what is left of it is kept by another one, if at all
        else:
            try:
                self._books.release_retained(self._shorten(sequence, keep))
            finally:
                self._note_evicted(sequence, "room", free)

    def _evict_one(self) -> None:
        """Drop one kept sequence whole."""
        free = self._books.allocator.free_block_count
        oldest = next(iter(self.retained.values()))
        victim = self._next_victim() or oldest  # where the policy spares everything, the limit holds all the same
        self._demote(victim, 0)
        self._drop(victim, "limit")
        self.evictions += self._books.allocator.free_block_count - free

    def _demote(self, sequence: CachedSequence, keep: int) -> None:
        """Copy the blocks from `keep` on, which a kept sequence will lose, to the host tier, if that is wanted."""
        if not self.settings.demote:
            return
        lost = []
        node = sequence.tip
        while node is not None and node.depth > keep:
            block = sequence.blocks[node.depth - 1]
            if not self._books.is_shared(block):
                lost.append((node, block))
            node = node.parent
        if lost:
            nodes, blocks = zip(*reversed(lost), strict=True)
            self.demoted.add(nodes, blocks)

    def expire(self) -> None:
        """Drop what was not used for longer than the time to live."""
        ttl = self.settings.prefix_ttl_seconds
        if ttl is None:
            return
        oldest = time.time() - ttl
        self.demoted.expire(oldest)
        while self.retained:
            kept = next(iter(self.retained.values()))
            if kept.last_access >= oldest:
                return
            self._drop(kept, "expired")

    def forget(self, sequence: CachedSequence, keep: int) -> None:
        """A sequence no longer holds its blocks from logical index `keep` on."""
        self.index.leave(sequence, keep)
        if sequence.deduplicated is not None and sequence.deduplicated.depth > keep:
            sequence.deduplicated = sequence.tip

    def clear(self) -> int:
        """Drop everything that is kept; what live sequences hold is not findable any more either.

        Returns:
            How many blocks could be found before.
        """
        dropped = len(self.index) + len(self.demoted)
        self.index.clear()
        for sequence in (*self._live.values(), *self.retained.values()):
            sequence.tip = sequence.deduplicated = sequence.prefix_key = None
        with ExitStack() as stack:  # all of them, even if the storage raises
            stack.callback(self.demoted.clear)
            for sequence in self.retained.values():
                stack.callback(self._drop, sequence, "cleared")
        return dropped

    def _drop(self, sequence: CachedSequence, reason: EvictionReason | None) -> None:
        """Keep a sequence no longer: all of it goes, even if the storage or the policy raises."""
        free = self._books.allocator.free_block_count
        del self.retained[sequence.cache_id]
        self.forget(sequence, 0)
        slot, sequence.slot = sequence.slot, None
        with ExitStack() as stack:
            stack.callback(self.policy.forget, sequence.cache_id)
            stack.callback(self._storage.close, slot)
            if reason is not None:
                stack.callback(self._note_evicted, sequence, reason, free)
            self._books.release_retained(self._shorten(sequence, 0))

    def _note_evicted(self, sequence: CachedSequence, reason: EvictionReason, free_before: int) -> None:
        if "evicted" in self._events.wanted:
            freed = self._books.allocator.free_block_count - free_before
            self._events.note("evicted", sequence, num_blocks=freed, kept_tokens=sequence.num_tokens, reason=reason)

    def _shorten(self, sequence: CachedSequence, keep: int) -> list[int]:
        """Bring a sequence's books down to its first `keep` blocks; return the others."""
        dropped = sequence.blocks[keep:]
        del sequence.blocks[keep:]
        sequence.num_tokens = keep * self._books.block_size
        del sequence.token_ids[sequence.num_tokens :]
        return dropped


def _why_disabled(*, is_named: bool, reusable: bool) -> str:
    if not reusable:
        return "this model's keys depend on how long the prompt is, so they cannot be reused"
    if not is_named:
        return "requests do not share, and this one has no id of its own that could ask again"
    return "prefix reuse is switched off"


class _Candidates(Mapping[str, EvictionCandidate]):
    """The kept sequences as a policy sees them, described only when it looks."""

    def __init__(self, retained: Mapping[str, CachedSequence]) -> None:
        self._retained = retained

    def __getitem__(self, cache_id: str) -> EvictionCandidate:
        sequence = self._retained[cache_id]
        return EvictionCandidate(cache_id, len(sequence.blocks), sequence.priority)

    def __iter__(self) -> Iterator[str]:
        return iter(self._retained)

    def __len__(self) -> int:
        return len(self._retained)
