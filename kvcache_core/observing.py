"""Telling observers what happens in a cache: recorded under its lock, delivered in order outside of it."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvcache_core.errors import KvCacheWarning

if TYPE_CHECKING:
    from kvcache_core.events import CacheEvent
    from kvcache_core.sequence import CachedSequence

__all__ = ["EventName", "EventQueue", "Observer", "Subscription", "kinds_among"]

#: The names of the classes in `kvcache_core.events`, which is imported with the first observer and not before.
EventName = Literal[
    "attached",
    "prefix_hit",
    "prefix_miss",
    "allocated",
    "forked",
    "prefix_shared",
    "committed",
    "aborted",
    "truncated",
    "swapped_out",
    "swapped_in",
    "freed",
    "evicted",
    "pressure_changed",
    "refused",
    "reset",
    "closed",
    "events_lost",
]

#: Called with each event.
Observer = Callable[[Any], object]

#: Undelivered events above which further ones are thrown away.
_MOST_WAITING = 100_000


def kinds_among(observer: object, kinds: tuple[type[CacheEvent], ...]) -> frozenset[type[CacheEvent]]:
    """The concrete kinds of events that an observer asks for.

    Raises:
        TypeError: `observer` cannot be called, or a kind is no class of events.
    """
    from kvcache_core.events import EVENT_TYPES, CacheEvent  # noqa: PLC0415 - see EventName

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
        wanted: The names of the events that somebody listens to; no other need be noted.
    """

    __slots__ = ("_delivering", "_kinds", "_lost", "_number", "_subscriptions", "_waiting", "manager_id", "wanted")

    def __init__(self, manager_id: str) -> None:
        self.manager_id = manager_id
        self.wanted: frozenset[str] = frozenset()
        self._kinds: dict[str, type[CacheEvent]] = {}
        self._waiting: deque[tuple[CacheEvent, Subscription | None]] = deque()
        self._number = 0
        self._lost = 0
        self._subscriptions: list[Subscription] = []
        self._delivering = threading.Lock()

    # -- under the cache's lock --------------------------------------------------------------------------

    def add(
        self, observer: Observer, kinds: frozenset[type[CacheEvent]], *, label: str, **attached: Any
    ) -> Subscription:
        """Tell `observer` of what happens from now on.

        Args:
            observer: Called with each event.
            kinds: The kinds it wants.
            label: Who it is, for the warning when it raises.
            **attached: What the cache is, to be told to this observer alone and before all else.
        """
        from kvcache_core.events import EVENT_TYPES, Attached  # noqa: PLC0415 - see EventName

        self._kinds = {kind.name: kind for kind in EVENT_TYPES}
        subscription = Subscription(self, observer, kinds, label, self._number)
        self._subscriptions.append(subscription)
        self._see_what_is_wanted()
        if Attached in kinds:
            self._put("attached", attached, subscription)
        return subscription

    def note(self, name: EventName, sequence: CachedSequence | None = None, **facts: Any) -> None:
        """Take an event in, to be delivered when the lock is released.

        Args:
            name: Which.
            sequence: The sequence that it is about, if it is about one.
            **facts: What else the event says.
        """
        if sequence is not None:
            facts["request_id"] = sequence.request_id
            facts["cache_id"] = sequence.cache_id
        self._put(name, facts)

    def _put(self, name: EventName, facts: dict[str, Any], audience: Subscription | None = None) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._lost += 1
            self._number += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._put("events_lost", {"count": lost})
        self._number += 1
        event = self._kinds[name](number=self._number, time=time.time(), manager_id=self.manager_id, **facts)
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
            self.wanted = frozenset(kind.name for subscription in seen for kind in subscription.kinds)

    def deliver(self) -> None:
        """Tell the observers; called outside the cache's lock.

        One thread delivers at a time, so that all hear of everything in the order in which it happened. What comes
        meanwhile, also what an observer itself causes, is left to that thread.
        """
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    event, audience = self._waiting.popleft()
                    with ExitStack() as stack:  # all of them, even if an interrupt comes in the midst of one
                        for subscription in reversed((audience,) if audience else tuple(self._subscriptions)):
                            stack.callback(subscription.tell, event)
            finally:
                self._delivering.release()
