"""What a step does to the books: reserved for all of its sequences or for none, then committed or undone."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import sub
from typing import TYPE_CHECKING, Any, Literal

from kvcache_core.books import Books
from kvcache_core.new_tokens import PackedTokens
from kvcache_core.observing import EventQueue
from kvcache_core.prefix_cache import PrefixCache
from kvcache_core.reservation import Reservation
from kvcache_core.sequence import CachedSequence, HandleState
from kvcache_core.storage import Storage

if TYPE_CHECKING:
    from kvcache_core.events import StepPart

__all__ = ["StepState", "Transaction", "Transactions"]

_ACTIVE = HandleState.ACTIVE

StepState = Literal["open", "committed", "aborted"]


class Transaction:
    """What it takes to finish or undo a step; survives a step object that was dropped.

    What there is one of for each sequence stands in columns, in packing order.

    Attributes:
        sequences: The sequences.
        tokens: What they add.
        stops: Tokens that each of them has room for in the step.
        rooms: Index of a sequence -> what had to be reserved for it, where that was not there before.
        filling: The sequences that get to the end of a block or beyond, if every token is kept.
        accepted: Index of a sequence -> how many of its new tokens a commit keeps; all of them where it is missing.
        state: Whether it is open, committed or aborted.
        versions: The sequences' versions right after a commit that kept every token, else None.
    """

    __slots__ = ("accepted", "filling", "rooms", "sequences", "state", "stops", "tokens", "versions")

    def __init__(self, sequences: Sequence[CachedSequence], tokens: PackedTokens) -> None:
        self.sequences = sequences
        self.tokens = tokens
        self.stops: list[int] = []
        self.rooms: dict[int, Reservation] = {}
        self.filling: list[CachedSequence] = []
        self.accepted: dict[int, int] = {}
        self.state: StepState = "open"
        self.versions: list[int] | None = None

    @property
    def starts(self) -> list[int]:
        """Tokens that each sequence holds when the step begins."""
        return list(map(sub, self.stops, self.tokens.counts))

    @property
    def final_stops(self) -> Sequence[int]:
        """Tokens that each sequence holds once the step has been committed."""
        if not self.accepted:
            return self.stops
        stops, counts = list(self.stops), self.tokens.counts
        for index, kept in self.accepted.items():
            stops[index] += kept - counts[index]
        return stops

    def current_versions(self) -> list[int]:
        """The sequences' versions now."""
        return [sequence.version for sequence in self.sequences]


class Transactions:
    """Begins, commits and undoes steps over one cache; all methods run under its lock.

    Args:
        books: Who names which block.
        storage: The memory.
        prefixes: What is kept for reuse.
        events: What observers are told.
        require_growable: Raises unless a step may bring a sequence to so many tokens.
    """

    def __init__(
        self,
        books: Books,
        storage: Storage,
        prefixes: PrefixCache,
        events: EventQueue,
        require_growable: Callable[[CachedSequence, int], None],
    ) -> None:
        self._books = books
        self._storage = storage
        self._prefixes = prefixes
        self._events = events
        self._require_growable = require_growable
        self._paged = storage.placement == "paged"

    def begin(self, sequences: Sequence[CachedSequence], tokens: PackedTokens) -> Transaction:
        """Reserve room for the new tokens of every sequence, or for none.

        Raises:
            CacheFullError: There is no room for all of them, or one gets too long; nothing changes.
            HandleError: A sequence cannot be used.
            StepError: A sequence is part of an open step; of this one, if it is named twice.
        """
        transaction = Transaction(sequences, tokens)
        try:
            self._enter(transaction)
            if transaction.rooms:
                self._reserve(transaction)
        except BaseException:
            for sequence in sequences:
                if sequence.transaction is transaction:
                    sequence.transaction = None
            raise
        return transaction

    def _enter(self, transaction: Transaction) -> None:
        """Make every sequence part of the step, and see what it takes."""
        sequences, counts = transaction.sequences, transaction.tokens.counts
        stops, rooms, filling = transaction.stops, transaction.rooms, transaction.filling
        size, names, paged = self._books.block_size, self._books.allocator.names, self._paged
        undeduplicated = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.num_tokens
            stop, end = start + count, start % size + count
            if sequence.transaction is not None or sequence.state is not _ACTIVE or stop > sequence.max_tokens:
                self._require_growable(sequence, stop)
            sequence.transaction = transaction
            if sequence.tip is not sequence.deduplicated:
                undeduplicated.append(sequence)
            # The memory of a sequence's own last block is there since its first row was reserved.
            if not (paged and count < end <= size and names[sequence.blocks[start // size]] == 1):
                rooms[len(stops)] = Reservation(self._books, sequence, start, stop)
            if end >= size:
                filling.append(sequence)
            stops.append(stop)
        for sequence in undeduplicated:
            self._prefixes.deduplicate(sequence)

    def _reserve(self, transaction: Transaction) -> None:
        books, storage, rooms = self._books, self._storage, list(transaction.rooms.values())
        needed = sum([room.needed for room in rooms])
        blocks = books.take(needed, purpose=f"for {transaction.tokens.total} new tokens") if needed else []
        applied = given = 0
        try:
            for room in rooms:
                count = room.needed
                room.apply(books, storage, blocks[given : given + count])
                given += count
                applied += 1
        except BaseException:
            try:
                with ExitStack() as stack:  # all of them, even if the storage raises
                    for room in rooms[:applied]:
                        stack.callback(self._undo_one, room.sequence, room.start, room.stop, room)
            finally:
                books.release(blocks[given:])
            raise

    def commit(self, transaction: Transaction) -> None:
        """Move all lengths together.

        The storage is called first, when nothing has changed yet, and last, when everything has: it may raise.
        """
        sequences, size, now = transaction.sequences, self._books.block_size, time.time()
        stops = transaction.final_stops
        shortened = []
        if transaction.accepted:
            shortened = [
                (sequence, stop)
                for sequence, stop, most in zip(sequences, stops, transaction.stops, strict=True)
                if stop < most
            ]
        for sequence, stop in shortened:
            self._storage.truncate(sequence.slot, stop)
        unneeded: list[int] = []
        for index, room in transaction.rooms.items():
            if room.copies or index in transaction.accepted:
                unneeded += room.settle(size, stops[index])
        one_each = transaction.tokens.one_each and not shortened
        new_ids = transaction.tokens.ids if one_each else _ids_by_sequence(transaction, stops)
        transaction.state = "committed"
        add = array.append if one_each else array.extend
        versions = []
        for sequence, stop, new in zip(sequences, stops, new_ids, strict=True):
            known = sequence.token_ids
            if len(known) == sequence.num_tokens:  # else tokens before them were not named
                add(known, new)
            sequence.num_tokens = stop
            sequence.version = version = sequence.version + 1
            versions.append(version)
            sequence.last_access = now
            sequence.transaction = None
        if not shortened:
            transaction.versions = versions
        if transaction.filling:
            self._prefixes.publish(transaction.filling)
        if "committed" in self._events.wanted:
            self._events.note("committed", parts=_told(transaction))
        if unneeded:
            self._books.release(unneeded)
        for sequence, stop in shortened:
            self._books.scrub_tail(sequence.blocks, stop)

    def undo(self, transaction: Transaction) -> None:
        """Put the sequences back to before their step, memory included."""
        transaction.state = "aborted"
        for sequence in transaction.sequences:
            sequence.transaction = None
        if "aborted" in self._events.wanted:
            self._events.note("aborted", parts=_told(transaction, kept=False))
        with ExitStack() as stack:  # all of them, even if the storage raises
            columns = zip(transaction.sequences, transaction.starts, transaction.stops, strict=True)
            for index, (sequence, start, stop) in enumerate(columns):
                stack.callback(self._undo_one, sequence, start, stop, transaction.rooms.get(index))

    def _undo_one(self, sequence: CachedSequence, start: int, stop: int, room: Reservation | None) -> None:
        sequence.version += 1
        try:
            if room is not None:
                room.undo(self._books)
            if stop > start:
                self._books.scrub_tail(sequence.blocks, start)
        finally:
            self._storage.truncate(sequence.slot, start)


def _ids_by_sequence(transaction: Transaction, stops: Sequence[int]) -> list[Any]:
    """The ids of the tokens that each sequence keeps; none where they are not named."""
    tokens, kept, at = transaction.tokens, [], 0
    columns = zip(transaction.starts, stops, tokens.counts, tokens.named, strict=True)
    for start, stop, count, is_named in columns:
        kept.append(tokens.ids[at : at + stop - start] if is_named else ())
        at += count if is_named else 0
    return kept


def _told(transaction: Transaction, *, kept: bool = True) -> tuple[StepPart, ...]:
    """What observers hear of a step that is over."""
    from kvcache_core.events import StepPart  # noqa: PLC0415 - loaded with the first observer

    return tuple(
        StepPart(
            request_id=sequence.request_id,
            cache_id=sequence.cache_id,
            new_tokens=sequence.num_tokens - start if kept else 0,
            num_tokens=sequence.num_tokens,
        )
        for sequence, start in zip(transaction.sequences, transaction.starts, strict=True)
    )
