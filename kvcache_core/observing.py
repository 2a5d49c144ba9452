"""Telling observers what happens in a cache: recorded under its lock, delivered in order outside of it."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from kvcache_core.errors import KvCacheWarning
from kvcache_core.events import EVENT_TYPES, CacheEvent, EventsLost

__all__ = ["EventQueue", "Observer", "Subscription", "kinds_among"]

#: Called with each event.
Observer = Callable[[Any], object]

#: Undelivered events above which further ones are thrown away.
_MOST_WAITING = 100_000


def kinds_among(observer: object, kinds: tuple[type[CacheEvent], ...]) -> frozenset[type[CacheEvent]]:
    """The concrete kinds of events that an observer asks for.

    Raises:
        TypeError: `observer` cannot be called, or a kind is no class of events.
    """
    if not callable(observer):
        raise TypeError(f"an observer must be callable with an event, and {observer!r} is not")
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, CacheEvent)):
            raise TypeError(f"subscribe takes classes of kvcache_core.events after the observer, not {kind!r}")
    return frozenset(known for known in EVENT_TYPES if issubclass(known, kinds or CacheEvent))


class Subscription:
    """An observer that hears of a cache; `cancel` it, or leave its `with` block, to end that.

    Attributes:
        kinds: The kinds of events that the observer hears of.
        cancelled: Whether it hears of none any more.
    """

    __slots__ = ("_label", "_observer", "_queue", "_since", "_warned", "cancelled", "kinds")

    def __init__(
        self, queue: EventQueue, observer: Observer, kinds: frozenset[type[CacheEvent]], label: str, since: int
    ) -> None:
        self.kinds = kinds
        self.cancelled = False
        self._queue = queue
        self._observer = observer
        self._label = label
        self._since = since
        self._warned = False

    def cancel(self) -> None:
        """Call the observer no more, also not for what has happened already. Cancelling twice is harmless.

        A call that another thread is making at this moment is not waited for.
        """
        self.cancelled = True
        self._queue.remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def tell(self, event: CacheEvent) -> None:
        """Call the observer if the event is for it; an error in it is reported once and goes no further."""
        if self.cancelled or event.number <= self._since or type(event) not in self.kinds:
            return
        try:
            self._observer(event)
        except Exception as error:  # noqa: BLE001 - an observer must not break the cache; it is reported instead
            if self._warned:
                return
            self._warned = True
            warnings.warn(
                f"{self._label} raised {error!r} at {event.name!r}; its further failures are not reported",
                KvCacheWarning,
                stacklevel=2,
            )


class EventQueue:
    """The events of one cache that observers have not heard of yet.

    Args:
        manager_id: The cache's name, which each event carries.

    Attributes:
        wanted: The kinds of events that somebody listens to; no other need be made.
    """

    __slots__ = ("_delivering", "_lost", "_number", "_subscriptions", "_waiting", "manager_id", "wanted")

    def __init__(self, manager_id: str) -> None:
        self.manager_id = manager_id
        self.wanted: frozenset[type[CacheEvent]] = frozenset()
        self._waiting: deque[tuple[CacheEvent, Subscription | None]] = deque()
        self._number = 0
        self._lost = 0
        self._subscriptions: list[Subscription] = []
        self._delivering = threading.Lock()

    # -- under the cache's lock --------------------------------------------------------------------------

    def add(
        self, observer: Observer, kinds: frozenset[type[CacheEvent]], *, label: str, first: CacheEvent
    ) -> Subscription:
        """Tell `observer` of what happens from now on.

        Args:
            observer: Called with each event.
            kinds: The kinds it wants.
            label: Who it is, for the warning when it raises.
            first: An event for this observer alone, before all others.
        """
        subscription = Subscription(self, observer, kinds, label, self._number)
        self._subscriptions.append(subscription)
        self._see_what_is_wanted()
        self.note(first, subscription)
        return subscription

    def note(self, event: CacheEvent, audience: Subscription | None = None) -> None:
        """Take an event in, to be delivered when the lock is released, to all observers or to a single one."""
        if len(self._waiting) >= _MOST_WAITING:
            self._lost += 1
            self._number += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self.note(EventsLost(count=lost))
        self._number += 1
        event.stamp(self.manager_id, self._number, time.time())
        self._waiting.append((event, audience))

    # -- outside it --------------------------------------------------------------------------------------

    def remove(self, subscription: Subscription) -> None:
        """Forget an observer, if it is there. Takes no lock, so that a finalizer may do it."""
        with suppress(ValueError):
            self._subscriptions.remove(subscription)
        self._see_what_is_wanted()

    def _see_what_is_wanted(self) -> None:
        seen: tuple[Subscription, ...] | None = None
        while seen != (now := tuple(self._subscriptions)):  # again, if another thread has changed it meanwhile
            seen = now
            self.wanted = frozenset().union(*(subscription.kinds for subscription in seen))

    def deliver(self) -> None:
        """Tell the observers; called outside the cache's lock.

        One thread delivers at a time, so that all hear of everything in the order in which it happened. What comes
        meanwhile, also what an observer itself causes, is left to that thread.
        """
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    event, audience = self._waiting.popleft()
                    for subscription in (audience,) if audience else tuple(self._subscriptions):
                        subscription.tell(event)
            finally:
                self._delivering.release()
