"""The sequences of one cache: opening, forking, truncating, freeing them, and finishing steps over them.

Everything that changes the books of a cache happens here, under one lock, and all or nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from kvcache_core.allocator import BlockAllocator
from kvcache_core.block_table import blocks_for
from kvcache_core.books import Books
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.errors import CacheFullError, HandleError, ShapeError, StepError
from kvcache_core.eviction import CacheEvictionPolicy
from kvcache_core.locking import Guard
from kvcache_core.new_tokens import PackedTokens
from kvcache_core.observing import EventQueue
from kvcache_core.prefix import PrefixExplanation, PrefixKey
from kvcache_core.prefix_cache import PrefixCache
from kvcache_core.pressure import PressureMonitor
from kvcache_core.request import check_request_id
from kvcache_core.sequence import CachedSequence, HandleState, unique_id
from kvcache_core.storage import Storage
from kvcache_core.transaction import Transaction, Transactions
from kvcache_core.usability import Usability
from kvcache_core.validation import show

if TYPE_CHECKING:
    from kvcache_core.events import FreeReason

__all__ = ["SequenceStore"]

_LOOKUPS = frozenset({"prefix_hit", "prefix_miss"})


class SequenceStore(Usability):
    """The sequences, blocks and lock of one cache.

    Attributes:
        storage: The memory.
        events: What observers are told.
        books: Who names which block.
        prefixes: What is kept for reuse.
        pressure: The watch over the budget.
        live: Request id -> sequence, in order of allocation.
        allocations: Sequences opened or forked so far.
        reclaimed_sequences: Sequences so far that were given back because their handles had been dropped.
        reclaimed_blocks: Blocks that this freed.
    """

    def __init__(
        self,
        storage: Storage,
        pressure: PressureMonitor,
        prefix_settings: PrefixCacheConfig,
        eviction_policy: CacheEvictionPolicy,
        events: EventQueue,
    ) -> None:
        super().__init__()
        spec = storage.spec
        self.storage = storage
        self.events = events
        self.pressure = pressure
        self.live: dict[str, CachedSequence] = {}
        self.allocations = 0
        self.reclaimed_sequences = 0
        self.reclaimed_blocks = 0
        self._abandoned = False
        self._guard = Guard(self.require_usable, self._settle_dropped, self._note_pressure, self.catch_up)
        self.books = Books(
            BlockAllocator(spec.num_blocks, spec.block_size, self._guard), storage, events, scrub=spec.scrub
        )
        self.prefixes = PrefixCache(self.books, storage, self.live, prefix_settings, eviction_policy, events)
        self.books.make_room = self.prefixes.make_room
        self._steps = Transactions(self.books, storage, self.prefixes, events, self._require_growable)
        self._dropped: deque[CachedSequence | Transaction] = deque()

    def locked(self) -> Guard:
        """The lock, for a `with` statement; entering it raises HandleError if the cache cannot be used."""
        return self._guard

    # -- opening and freeing -----------------------------------------------------------------------------

    def open(
        self,
        request_id: str | None,
        token_ids: array[int],
        num_tokens: int,
        max_tokens: int,
        priority: int,
        prefix_key: PrefixKey | None,
    ) -> CachedSequence:
        """Open a sequence with room for `num_tokens`, which starts with the cached prefix of `token_ids`.

        Observers hear of it when the caller has made a handle and calls `catch_up`.
        """
        with self._guard.to_be_continued:
            self._require_length(num_tokens, max_tokens)
            name = self._unused_name(request_id)
            sequence = CachedSequence(unique_id("kv"), name, max_tokens, self.generation, priority, None, [])
            sequence.prefix_key = prefix_key
            self.expire_prefixes()
            found = self._explained_lookup(sequence, token_ids)
            hit = self.prefixes.find(prefix_key, token_ids, max_tokens)
            demoted = () if hit is None else hit.demoted
            if hit is None or hit.home is None or hit.tip is None:
                sequence.capacity = self.prefixes.capacity(max_tokens)
                sequence.slot = self.storage.open(sequence.capacity)
            else:
                slot, sequence.blocks = self.fork_memory(hit.home, hit.num_tokens)
                self.start_with(sequence, hit.home, slot, hit.num_tokens)
                sequence.deduplicated = hit.tip
                self.prefixes.index.hold(sequence, hit.tip)
            self._enter(sequence)  # before room is made: the eviction has to see what it holds
            self.prefixes.demoted.claim(demoted)  # likewise: room in the host tier is made for what is evicted
            purpose = f"for a sequence of {num_tokens} tokens"
            try:
                self.books.require(self._missing_blocks(sequence, num_tokens), purpose=purpose)
                self.prefixes.note_lookup(len(token_ids), hit)  # so that others are evicted before what was found
                if found is not None:
                    self._note_lookup(sequence, len(token_ids), found)
                self._make_room(sequence, num_tokens, purpose)
                if demoted:
                    self.prefixes.bring_back(sequence, demoted, token_ids)
            except BaseException:
                self.prefixes.demoted.give_back(demoted)
                self._retract(sequence)
                raise
            if "allocated" in self.events.wanted:
                self.events.note(
                    "allocated",
                    sequence,
                    prompt_tokens=len(token_ids),
                    num_tokens=sequence.num_tokens,
                    num_blocks=len(sequence.blocks),
                )
            return sequence

    def _explained_lookup(self, sequence: CachedSequence, token_ids: array[int]) -> PrefixExplanation | None:
        """Explain what the prompt of a sequence that is about to be opened will find, if an observer wants to know."""
        if not token_ids or self.events.wanted.isdisjoint(_LOOKUPS):
            return None
        return self.prefixes.explain(sequence.prefix_key, token_ids, sequence.max_tokens, across_salts=False)

    def _note_lookup(self, sequence: CachedSequence, prompt_tokens: int, found: PrefixExplanation) -> None:
        facts = {"prompt_tokens": prompt_tokens, "reason": found.reason, "message": found.message}
        if not found.num_tokens and "prefix_miss" in self.events.wanted:
            self.events.note("prefix_miss", sequence, **facts)
        elif found.num_tokens and "prefix_hit" in self.events.wanted:
            self.events.note(
                "prefix_hit", sequence, num_tokens=found.num_tokens, demoted_tokens=found.demoted_tokens, **facts
            )

    def fork_memory(self, source: CachedSequence, num_tokens: int) -> tuple[Any, list[int]]:
        """Return a slot that starts with the first tokens of `source`, and those of its blocks that it shares.

        Under the lock.
        """
        shared_tokens = self.storage.shared_tokens(source.slot, num_tokens)
        slot = self.storage.fork(source.slot, num_tokens)
        size = self.books.block_size
        blocks = source.blocks[: blocks_for(num_tokens, size) if shared_tokens >= num_tokens else shared_tokens // size]
        self.books.share(blocks)
        return slot, blocks

    @staticmethod
    def start_with(sequence: CachedSequence, source: CachedSequence, slot: Any, num_tokens: int) -> None:
        """Note that an empty sequence now has this slot, which starts with tokens of `source`."""
        sequence.slot = slot
        sequence.capacity = source.capacity
        sequence.num_tokens = num_tokens
        sequence.token_ids = source.token_ids[:num_tokens]

    def _missing_blocks(self, sequence: CachedSequence, num_tokens: int) -> int:
        return max(0, blocks_for(num_tokens, self.books.block_size) - len(sequence.blocks))

    def _make_room(self, sequence: CachedSequence, num_tokens: int, purpose: str) -> None:
        """Take the blocks that a sequence lacks for `num_tokens` tokens."""
        missing = self._missing_blocks(sequence, num_tokens)
        if missing:
            sequence.blocks += self.books.take(missing, purpose=purpose)

    def fork(self, source: CachedSequence, request_id: str | None) -> CachedSequence:
        """Open a sequence that starts with the tokens of `source`; observers hear of it as `open` says."""
        with self._guard.to_be_continued:
            self.require_changeable(source, "fork")
            name = self._unused_name(request_id)
            sequence = CachedSequence(
                unique_id("kv"), name, source.max_tokens, self.generation, source.priority, None, []
            )
            slot, sequence.blocks = self.fork_memory(source, source.num_tokens)
            shared_blocks = len(sequence.blocks)
            self.start_with(sequence, source, slot, source.num_tokens)
            sequence.prefix_key = source.prefix_key
            self.prefixes.index.hold(sequence, source.tip)
            sequence.deduplicated = source.deduplicated
            source.touch()
            self._enter(sequence)
            try:
                self._make_room(sequence, source.num_tokens, f"to fork {source.request_id!r}")
            except BaseException:
                self._retract(sequence)
                raise
            if "forked" in self.events.wanted:
                self.events.note(
                    "forked",
                    sequence,
                    parent_request_id=source.request_id,
                    parent_cache_id=source.cache_id,
                    num_tokens=sequence.num_tokens,
                    num_blocks=len(sequence.blocks),
                    shared_blocks=shared_blocks,
                )
            return sequence

    def add_reference(self, sequence: CachedSequence) -> None:
        """One more handle refers to the sequence."""
        with self.locked():
            problem = self.problem_with(sequence)
            if problem is not None:
                raise problem
            sequence.references += 1

    def drop_reference(self, sequence: CachedSequence, reason: FreeReason = "freed") -> None:
        """One handle less refers to the sequence; the last one frees it. Under the lock."""
        sequence.references -= 1
        if sequence.references == 0:
            self._free(sequence, reason)

    def free(self, request_id: str) -> None:
        """Free a sequence, whatever handles refer to it."""
        with self.locked():
            sequence = self.find(request_id)
            self.require_freeable(sequence, "deallocate")
            self._free(sequence, "freed")

    def free_unchanged(self, sequence: CachedSequence, version: int) -> None:
        """Free a sequence that has been copied, unless it has changed since it had this version."""
        with self.locked():
            self.require_changeable(sequence, "move")
            if sequence.version != version:
                raise HandleError(f"{sequence.request_id!r} changed while it was copied; try again", reason="stale")
            self._free(sequence, "freed")

    def find(self, request_id: str) -> CachedSequence:
        """Return the live sequence of this name, or raise HandleError."""
        sequence = self.live.get(request_id) if isinstance(request_id, str) else None
        if sequence is None:
            raise HandleError(f"no live sequence has the request id {request_id!r}", reason="unknown")
        return sequence

    def drop_all(self) -> None:
        """Free every sequence and undo every open step; their handles become stale."""
        with self.locked():
            self._drop_all("reset")

    def close(self) -> None:
        """Free everything and shut the storage down; a second call, or one in a forked child, does nothing."""
        if self.unusable is not None:
            self.closed = True
            return
        self._guard.try_enter(wait=True)
        try:
            self._shut_down()
        finally:
            self._guard.leave()

    def close_abandoned(self) -> None:
        """As `close`, but from a finalizer: when the lock is free, and without a word to observers."""
        self._abandoned = True
        self._settle_now()

    def _shut_down(self) -> None:
        if not self.closed:
            try:
                self._drop_all("closed")
            finally:
                self.closed = True
                self.storage.shutdown()

    # -- growing and shrinking ---------------------------------------------------------------------------

    def extend(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Reserve room for `num_tokens` beyond those stored."""
        with self.locked():
            self.require_changeable(sequence, "extend")
            stop = sequence.num_tokens + num_tokens
            self._require_length(stop, sequence.max_tokens, held=len(sequence.blocks))
            self._make_room(sequence, stop, f"to extend by {num_tokens} tokens")

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        with self.locked():
            self.require_changeable(sequence, "truncate")
            if type(num_tokens) is not int or not 0 <= num_tokens <= sequence.num_tokens:
                raise ShapeError(
                    f"truncate takes an int from 0 to {sequence.num_tokens}, the tokens stored, not {show(num_tokens)}"
                )
            self.storage.truncate(sequence.slot, num_tokens)
            self._cut(sequence, num_tokens)

    def _cut(self, sequence: CachedSequence, num_tokens: int) -> None:
        size = self.books.block_size
        kept = blocks_for(num_tokens, size)
        self.prefixes.forget(sequence, num_tokens // size)
        dropped = sequence.blocks[kept:]
        del sequence.blocks[kept:]
        del sequence.token_ids[num_tokens:]
        dropped_tokens = sequence.num_tokens - num_tokens
        sequence.num_tokens = num_tokens
        sequence.version += 1
        sequence.touch()
        if dropped_tokens and "truncated" in self.events.wanted:
            self.events.note("truncated", sequence, num_tokens=num_tokens, dropped_tokens=dropped_tokens)
        self.books.release(dropped)
        if dropped_tokens:
            self.books.scrub_tail(sequence.blocks, num_tokens)

    def expire_prefixes(self) -> None:
        """Drop prefixes that have outlived their time, and count what that gave back. Under the lock."""
        free_before = self.books.allocator.free_block_count
        self.prefixes.expire()
        self.reclaimed_blocks += self.books.allocator.free_block_count - free_before

    # -- steps -------------------------------------------------------------------------------------------

    def reserve(self, sequences: Sequence[CachedSequence], tokens: PackedTokens) -> Transaction:
        """Reserve room for the new tokens of every sequence, or for none."""
        with self._guard:
            return self._steps.begin(sequences, tokens)

    def _require_growable(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Raise unless a step may bring the sequence to so many tokens."""
        self.require_changeable(sequence, "begin a step with")
        self._require_length(num_tokens, sequence.max_tokens, held=len(sequence.blocks))

    def finish(self, transaction: Transaction, *, keep: bool) -> None:
        """Commit a step, or undo it."""
        with self._guard:
            if transaction.state == "open":
                if keep:
                    self._steps.commit(transaction)
                else:
                    self._steps.undo(transaction)
            elif keep:
                raise StepError(f"commit needs an open step; this one is {transaction.state}")

    # -- dropped without being freed ---------------------------------------------------------------------

    def release_dropped(self, dropped: CachedSequence | Transaction) -> None:
        """Give back what a handle or step held that was dropped; at once if possible, else by the next operation.

        May be called by the garbage collector: on any thread, and while this thread holds the lock.
        """
        self._dropped.append(dropped)
        self._settle_now()

    def _settle_now(self) -> None:
        while (self._dropped or self._abandoned) and self.unusable is None and self._guard.try_enter():
            try:
                if self._abandoned:
                    self._shut_down()
            finally:
                # A finalizer runs anywhere, also where the caller holds locks of his own: it calls nothing of his.
                self._guard.leave(quietly=True)

    def _settle_dropped(self) -> None:
        while self._dropped and not self.closed:
            dropped = self._dropped.popleft()
            if not isinstance(dropped, Transaction):
                self._reclaim(dropped)
            elif dropped.state == "open":
                self._steps.undo(dropped)

    def _reclaim(self, sequence: CachedSequence) -> None:
        """Drop the reference of a handle that nobody can reach any more."""
        if sequence.state is HandleState.FREED or sequence.generation != self.generation:
            return
        free_before = self.books.allocator.free_block_count
        try:
            if sequence.references == 1 and sequence.transaction is not None:  # the step was dropped with the handle
                self._steps.undo(sequence.transaction)
        finally:
            self.drop_reference(sequence, "dropped")
            self.reclaimed_sequences += sequence.references == 0
            self.reclaimed_blocks += self.books.allocator.free_block_count - free_before

    def _note_pressure(self) -> None:
        allocator = self.books.allocator
        used = allocator.used_block_count
        if used != self.pressure.used:
            self.pressure.note(used, allocator.total_block_count, self.events)

    def catch_up(self) -> None:
        """Do what waits until the lock is free: give back what was dropped meanwhile, and tell observers."""
        if self._dropped or self._abandoned:
            self._settle_now()
        self.events.deliver()

    # -- helpers -----------------------------------------------------------------------------------------

    def _enter(self, sequence: CachedSequence) -> CachedSequence:
        self.live[sequence.request_id] = sequence
        self.allocations += 1
        sequence.references = 1
        return sequence

    def _free(self, sequence: CachedSequence, reason: FreeReason) -> None:
        """Keep a sequence for reuse if that is worth it, else give its memory back."""
        held = sequence.num_tokens, len(sequence.blocks)
        try:
            self.prefixes.retain(sequence)
        finally:
            self._note_freed(sequence, *held, reason)
            if sequence.is_kept:
                self._end(sequence)
            else:
                self._leave(sequence)

    def _note_freed(self, sequence: CachedSequence, num_tokens: int, num_blocks: int, reason: FreeReason) -> None:
        if "freed" in self.events.wanted:
            self.events.note(
                "freed",
                sequence,
                num_tokens=num_tokens,
                num_blocks=num_blocks,
                kept_tokens=sequence.num_tokens if sequence.is_kept else 0,
                reason=reason,
            )

    def _end(self, sequence: CachedSequence) -> None:
        """No handle can use the sequence any more."""
        sequence.state = HandleState.FREED
        sequence.version += 1
        del self.live[sequence.request_id]

    def _leave(self, sequence: CachedSequence) -> None:
        """End a sequence and give its memory back."""
        self._end(sequence)
        self.prefixes.forget(sequence, 0)
        blocks, sequence.blocks = sequence.blocks, []
        slot, sequence.slot = sequence.slot, None
        ticket, sequence.swapped = sequence.swapped, None
        if ticket is not None:  # it has neither blocks nor a slot
            self.storage.drop_swapped(ticket)
        else:
            self.give_back(slot, blocks)

    def give_back(self, slot: Any, blocks: list[int]) -> None:
        """Release blocks and close a slot, the one even if the other fails. Under the lock."""
        try:
            self.books.release(blocks)
        finally:
            self.storage.close(slot)

    def _retract(self, sequence: CachedSequence) -> None:
        """Undo the opening of a sequence for which there is no room."""
        self.allocations -= 1
        self._leave(sequence)

    def _drop_all(self, reason: Literal["reset", "closed"]) -> None:
        self.generation += 1
        transactions = {id(s.transaction): s.transaction for s in self.live.values() if s.transaction is not None}
        with ExitStack() as stack:  # last in, first out; all of it, even if the storage raises
            stack.callback(self._note_end, reason, len(self.live))
            for sequence in self.live.values():
                stack.callback(self._end_live, sequence, reason)
            stack.callback(self.prefixes.clear)
            for transaction in transactions.values():
                stack.callback(self._steps.undo, transaction)

    def _end_live(self, sequence: CachedSequence, reason: FreeReason) -> None:
        self._note_freed(sequence, sequence.num_tokens, len(sequence.blocks), reason)
        self._leave(sequence)

    def _note_end(self, reason: Literal["reset", "closed"], num_sequences: int) -> None:
        self._note_pressure()  # before, so that nothing follows the end
        if reason in self.events.wanted:
            self.events.note(reason, num_sequences=num_sequences)

    def _unused_name(self, request_id: str | None) -> str:
        check_request_id(request_id)
        if request_id is None:
            return unique_id("request")
        if request_id in self.live:
            raise HandleError(
                f"the request id {request_id!r} belongs to a live sequence; free it first, or choose another",
                reason="in-use",
            )
        return request_id

    def _require_length(self, num_tokens: int, max_tokens: int, *, held: int = 0) -> None:
        if num_tokens > max_tokens:
            free = self.books.allocator.free_block_count
            raise CacheFullError(
                f"{num_tokens} tokens are more than the {max_tokens} that this sequence may hold",
                needed=max(0, blocks_for(num_tokens, self.books.block_size) - held),
                free=free,
                hint="raise max_sequence_length (and the budget, if it is less), or shorten the prompt",
            )
