"""Results of slow foreign calls: each made once however many threads ask, and remembered, failures included.

No lock is held while foreign code runs. Results are published by `dict.setdefault`, which is atomic, so that
every thread gets the first one.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvcache_core.errors import KvCacheError

__all__ = ["BusyError", "Memo"]

Result = TypeVar("Result")


class BusyError(RuntimeError):
    """The call asked for is already running: further up this thread's stack, or for too long in another one."""


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: KvCacheError | None = None

    def get(self) -> Any:
        if self.error is None:
            return self.value
        # A copy, since raising one object in several threads would mix their tracebacks.
        raise copy.copy(self.error) from self.error.__cause__


@dataclass(frozen=True)
class _Turn:
    """A call in progress."""

    thread: int = field(default_factory=threading.get_ident)
    process: int = field(default_factory=os.getpid)
    finished: threading.Event = field(default_factory=threading.Event, compare=False)


class Memo:
    """Outcomes by key.

    Args:
        patience: Seconds to wait for another thread that is making the same call.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._outcomes: dict[Hashable, _Outcome] = {}
        self._running: dict[Hashable, _Turn] = {}
        self._patience = patience

    def copy(self) -> Memo:
        """Return a memo that knows the same outcomes and goes its own way from here."""
        twin = Memo(self._patience)
        twin._outcomes.update(self._outcomes)
        return twin

    def __contains__(self, key: Hashable) -> bool:
        return key in self._outcomes

    def get(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return what `make` returned for `key`, or raise the `KvCacheError` it raised.

        Threads that ask at the same time may each call `make`; all get the outcome that was there first.
        Use it where `make` takes the interpreter's import locks, which nobody may wait for while another waits
        for him. Other exceptions pass and are not remembered.
        """
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._outcomes.setdefault(key, self._call(make))
        return outcome.get()  # type: ignore[no-any-return]

    def get_once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """As `get`, but `make` runs once: threads that ask meanwhile wait for the first one.

        Raises:
            BusyError: This thread is inside that very call, or another one does not come back from it.
        """
        while (outcome := self._outcomes.get(key)) is None:
            mine = _Turn()
            turn = self._running.setdefault(key, mine)
            if turn is mine:
                self._take(key, turn, make)
            elif turn.process != mine.process:
                self._running.pop(key, None)  # its thread stayed behind when this process was forked
            elif turn.thread == mine.thread:
                raise BusyError("it asked for itself while it was being loaded")
            elif not turn.finished.wait(self._patience):
                raise BusyError(f"another thread has been loading it for more than {self._patience:g} seconds")
        return outcome.get()  # type: ignore[no-any-return]

    def _take(self, key: Hashable, turn: _Turn, make: Callable[[], Any]) -> None:
        try:
            if key not in self._outcomes:  # another turn may have ended just before this one began
                self._outcomes[key] = self._call(make)
        finally:
            del self._running[key]
            turn.finished.set()

    @staticmethod
    def _call(make: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(value=make())
        except KvCacheError as error:
            if isinstance(error.__cause__, BusyError):
                raise  # a matter of the moment, not of the plugin
            return _Outcome(error=error)
