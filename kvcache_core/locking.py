"""The lock over one cache's books, and how to tell a forked child from its parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["Guard", "process_generation"]

_generation = 0


def _count_fork() -> None:
    global _generation  # noqa: PLW0603 - one number per process is the point
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def process_generation() -> int:
    """A number that differs between a process and the children it forks."""
    return _generation


class Guard:
    """A lock that settles what could not be done while it was held.

    Handles may be dropped at any moment, on any thread, even in the middle of an operation that holds the lock
    of the very cache they belong to, since the garbage collector runs where it likes. Their memory must then be
    given back later. So the lock is not re-entrant: dropping code uses `try_enter` and leaves its request in
    a queue if that fails; `before` settles the queue on every entry, and `after` runs outside the lock on
    every exit, to deliver callbacks and to settle what came in meanwhile.
    """

    __slots__ = ("_after", "_before", "_leaving", "_lock")

    def __init__(self, before: Callable[[], None], leaving: Callable[[], None], after: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._before = before
        self._leaving = leaving
        self._after = after

    def __enter__(self) -> None:
        self._lock.acquire()
        self._settle()

    def try_enter(self) -> bool:
        """Enter if the lock is free right now; the caller must then call `leave`."""
        if not self._lock.acquire(blocking=False):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        try:
            self._before()
        except BaseException:
            self._lock.release()
            raise

    def leave(self) -> None:
        """Leave the lock, then do what waits for its release."""
        try:
            self._leaving()
        finally:
            self._lock.release()
        self._after()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
