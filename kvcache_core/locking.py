"""The lock over one cache's books, and how to tell a forked child from its parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["Guard", "process_generation"]

#: A number that differs between a process and the children it forks; to be read here, where it changes.
process_generation = 0


def _count_fork() -> None:
    global process_generation  # noqa: PLW0603 - one number per process is the point
    process_generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Guard:
    """A lock that settles what could not be done while it was held.

    Handles may be dropped at any moment, on any thread, even in the middle of an operation that holds the lock
    of the very cache they belong to, since the garbage collector runs where it likes. Their memory must then be
    given back later. So the lock is not re-entrant: dropping code puts its request into a queue and uses
    `try_enter`; if that fails, whoever holds the lock finds the request in `after`, or the next one in `settle`.

    Args:
        check: Raises if the cache cannot be used. It is asked before the lock is taken, since a forked child may
            find the lock held for ever, and again under the lock, since another thread may have closed the cache.
        settle: Settles the queue; called under the lock on every entry.
        leaving: Called under the lock on every exit.
        after: Called outside the lock on every exit.

    Attributes:
        to_be_continued: The same lock, for the first half of an operation: unless that raises, `after` is not called
            on its exit, but by whoever does the second half.
    """

    __slots__ = ("_after", "_check", "_leaving", "_lock", "_settle", "to_be_continued")

    def __init__(
        self,
        check: Callable[[], None],
        settle: Callable[[], None],
        leaving: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self._check = check
        self._settle = settle
        self._leaving = leaving
        self._after = after
        self.to_be_continued = _FirstHalf(self)

    def __enter__(self) -> None:
        self._check()
        self._lock.acquire()
        try:
            self._check()
            self._settle()
        except BaseException:
            self._lock.release()
            raise

    def try_enter(self, *, wait: bool = False) -> bool:
        """Enter without a check, if the lock is free right now or `wait` is set; the caller must then `leave`."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            self._settle()
        except BaseException:
            self._lock.release()
            raise
        return True

    def leave(self, *, quietly: bool = False) -> None:
        """Leave the lock, then do what waits for its release, unless `quietly`."""
        try:
            self._leaving()
        finally:
            self._lock.release()
        if not quietly:
            self._after()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class _FirstHalf:
    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.leave(quietly=error_type is None)
