"""What a step does to the books: reserved for all of its sequences or for none, then committed or undone."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from kvcache_core.books import Books
from kvcache_core.events import Aborted, Committed, StepPart
from kvcache_core.observing import EventQueue
from kvcache_core.prefix_cache import PrefixCache
from kvcache_core.reservation import Reservation
from kvcache_core.sequence import CachedSequence
from kvcache_core.storage import Storage

__all__ = ["StepState", "Transaction", "Transactions", "Wanted"]

StepState = Literal["open", "committed", "aborted"]

#: A sequence, how many tokens it adds, and their ids if they are named.
Wanted = tuple[CachedSequence, int, "array[int] | None"]


class Transaction:
    """What it takes to finish or undo a step; survives a step object that was dropped.

    Attributes:
        parts: The sequences' parts in packing order.
        accepted: Index of a part -> how many of its new tokens a commit keeps; all of them where it is missing.
        state: Whether it is open, committed or aborted.
        versions: The sequences' versions right after a commit that kept every token, else None.
    """

    __slots__ = ("accepted", "parts", "state", "versions")

    def __init__(self, parts: tuple[Reservation, ...]) -> None:
        self.parts = parts
        self.accepted: dict[int, int] = {}
        self.state: StepState = "open"
        self.versions: tuple[int, ...] | None = None

    @property
    def stops(self) -> list[int]:
        """Tokens that each sequence holds once the step has been committed."""
        stops = [part.stop for part in self.parts]
        for index, kept in self.accepted.items():
            stops[index] = self.parts[index].start + kept
        return stops

    def current_versions(self) -> tuple[int, ...]:
        """The sequences' versions now."""
        return tuple([part.sequence.version for part in self.parts])

    def end(self, state: StepState) -> None:
        """Give the sequences free for other operations."""
        self.state = state
        for part in self.parts:
            part.sequence.transaction = None


class Transactions:
    """Begins, commits and undoes steps over one cache; all methods run under its lock."""

    def __init__(self, books: Books, storage: Storage, prefixes: PrefixCache, events: EventQueue) -> None:
        self._books = books
        self._storage = storage
        self._prefixes = prefixes
        self._events = events

    def begin(self, wanted: Sequence[Wanted]) -> Transaction:
        """Reserve room for the new tokens of every sequence, or for none; each of them may be changed.

        Raises:
            CacheFullError: There is no room for all of them; nothing changes.
        """
        books, storage = self._books, self._storage
        parts, needed, tokens = [], 0, 0
        for sequence, count, token_ids in wanted:
            self._prefixes.deduplicate(sequence)
            start = sequence.num_tokens
            part = Reservation(books, sequence, start, start + count, token_ids)
            parts.append(part)
            needed += part.needed
            tokens += count
        blocks = books.take(needed, purpose=f"for {tokens} new tokens") if needed else []
        applied = 0
        try:
            for part in parts:
                count = part.needed
                part.apply(books, storage, blocks[:count] if count else ())
                del blocks[:count]
                applied += 1
        except BaseException:
            try:
                self._undo(parts[:applied])
            finally:
                books.release(blocks)
            raise
        transaction = Transaction(tuple(parts))
        for part in parts:
            part.sequence.transaction = transaction
        return transaction

    def commit(self, transaction: Transaction) -> None:
        """Move all lengths together.

        The storage is called first, when nothing has changed yet, and last, when everything has: it may raise.
        """
        parts, size, now = transaction.parts, self._books.block_size, time.time()
        stops = transaction.stops
        shortened = [(part, stop) for part, stop in zip(parts, stops, strict=True) if stop < part.stop]
        for part, stop in shortened:
            self._storage.truncate(part.sequence.slot, stop)
        unneeded: list[int] = []
        for part, stop in zip(parts, stops, strict=True):
            sequence, start, token_ids = part.sequence, part.start, part.token_ids
            if part.needed:
                unneeded += part.settle(size, stop)
            if token_ids is not None and len(sequence.token_ids) == start:
                sequence.token_ids.extend(token_ids if stop == part.stop else token_ids[: stop - start])
            sequence.num_tokens = stop
            sequence.version += 1
            sequence.last_access = now
            if stop // size > start // size:
                self._prefixes.publish(sequence)
        transaction.end("committed")
        if not shortened:
            transaction.versions = transaction.current_versions()
        if Committed in self._events.wanted:
            self._events.note(Committed(parts=_told(parts)))
        self._books.release(unneeded)
        for part, stop in shortened:
            self._books.scrub_tail(part.sequence.blocks, stop)

    def undo(self, transaction: Transaction) -> None:
        """Put the sequences back to before their step, memory included."""
        transaction.end("aborted")
        if Aborted in self._events.wanted:
            self._events.note(Aborted(parts=_told(transaction.parts, kept=False)))
        self._undo(transaction.parts)

    def _undo(self, parts: Sequence[Reservation]) -> None:
        with ExitStack() as stack:  # all of them, even if the storage raises
            for part in parts:
                stack.callback(self._undo_part, part)

    def _undo_part(self, part: Reservation) -> None:
        sequence = part.sequence
        sequence.version += 1
        try:
            part.undo(self._books)
            if part.stop > part.start:
                self._books.scrub_tail(sequence.blocks, part.start)
        finally:
            self._storage.truncate(sequence.slot, part.start)


def _told(parts: Sequence[Reservation], *, kept: bool = True) -> tuple[StepPart, ...]:
    """What observers hear of a step that is over."""
    return tuple(
        StepPart(
            request_id=part.sequence.request_id,
            cache_id=part.sequence.cache_id,
            new_tokens=part.sequence.num_tokens - part.start if kept else 0,
            num_tokens=part.sequence.num_tokens,
        )
        for part in parts
    )
