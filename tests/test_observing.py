"""Observers: told in order, outside every lock, and unable to do harm."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any, get_args

import pytest

from kvcache_core import CacheFullError, HandleError, KvCacheManager, KvCacheWarning, observing
from kvcache_core.events import (
    EVENT_TYPES,
    Allocated,
    Attached,
    CacheEvent,
    Closed,
    Committed,
    Forked,
    Freed,
    Refused,
    Reset,
    SequenceEvent,
    Truncated,
)
from kvcache_core.observing import EventQueue
from tests.caches import NewCache, filled, grow, raising

Heard = list[Any]


def kinds_of(heard: Heard) -> list[type[CacheEvent]]:
    return [type(event) for event in heard]


# -- who hears what --------------------------------------------------------------------------------------


def test_an_observer_hears_the_kinds_it_asked_for_and_base_classes_mean_all_of_theirs(cache: KvCacheManager) -> None:
    few: Heard = []
    of_sequences: Heard = []
    cache.subscribe(few.append, Freed, Attached)
    cache.subscribe(of_sequences.append, SequenceEvent)
    filled(cache, 3).free()
    assert kinds_of(few) == [Attached, Freed]
    assert kinds_of(of_sequences) == [Allocated, Freed]


@pytest.mark.parametrize("kinds", [("freed",), (int,), (Freed, None)])
def test_what_is_no_kind_of_event_is_refused(kinds: Any, cache: KvCacheManager) -> None:
    with pytest.raises(TypeError, match=r"classes of kvcache_core\.events"):
        cache.subscribe(print, *kinds)


def test_what_cannot_be_called_is_no_observer(cache: KvCacheManager) -> None:
    with pytest.raises(TypeError, match="must be callable with an event, and None is not"):
        cache.subscribe(None)  # type: ignore[arg-type]


def test_the_names_that_core_notes_are_those_of_the_classes() -> None:
    assert get_args(observing.EventName) == tuple(kind.name for kind in EVENT_TYPES)


def test_nobody_subscribes_to_a_closed_cache(new_cache: NewCache) -> None:
    cache = new_cache()
    cache.close()
    with raising(HandleError, "closed", reason="closed"):
        cache.subscribe(print)


def test_events_that_nobody_wants_are_not_made(cache: KvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = EventQueue.note

    def note(queue: EventQueue, name: Any, *rest: Any, **facts: Any) -> None:
        made.append(name)
        original(queue, name, *rest, **facts)

    monkeypatch.setattr(EventQueue, "note", note)
    filled(cache, 24).fork().truncate(1)
    cache.reset()
    assert made == []
    subscription = cache.subscribe(lambda event: None, Reset)
    made.clear()
    filled(cache, 24).fork().truncate(1)
    assert made == []
    cache.reset()
    assert made == ["reset"]
    subscription.cancel()
    cache.reset()
    assert len(made) == 1


def test_a_late_observer_hears_nothing_of_the_past_and_a_cancelled_one_nothing_of_the_future(
    cache: KvCacheManager,
) -> None:
    early: Heard = []
    late: Heard = []
    first = cache.subscribe(early.append, SequenceEvent)
    handle = filled(cache, 3)
    with cache.subscribe(late.append, SequenceEvent):
        handle.truncate(2)
        first.cancel()
        first.cancel()
        handle.truncate(1)
    handle.free()
    assert kinds_of(early) == [Allocated, Truncated]
    assert kinds_of(late) == [Truncated, Truncated]


def test_one_observer_may_be_subscribed_twice_and_cancelled_once(cache: KvCacheManager) -> None:
    heard: Heard = []
    first = cache.subscribe(heard.append, Allocated)
    cache.subscribe(heard.append, Allocated)
    cache.allocate()
    first.cancel()
    cache.allocate()
    assert len(heard) == 3


def test_each_cache_tells_its_own_observers_only(new_cache: NewCache) -> None:
    first, second = new_cache(), new_cache()
    heard: Heard = []
    first.subscribe(heard.append)
    second.allocate()
    assert kinds_of(heard) == [Attached]
    assert heard[0].manager_id == first.manager_id != second.manager_id


# -- when and where --------------------------------------------------------------------------------------


def test_an_observer_may_use_the_cache_and_the_handle_is_there_already(cache: KvCacheManager) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(event: Any) -> None:
        handle = cache.get_handle(event.request_id)
        assert handle is not None
        seen.append((event.name, handle.cache_id == event.cache_id, handle.num_tokens, cache.audit()))

    cache.subscribe(look, Allocated, Forked)
    filled(cache, 3, request_id="a").fork(request_id="b")
    assert seen == [("allocated", True, 0, ()), ("forked", True, 3, ())]


def test_what_an_observer_causes_is_told_after_what_it_hears(cache: KvCacheManager) -> None:
    heard: Heard = []

    def answer(event: Any) -> None:
        heard.append(("begin", event.name))
        if type(event) is Allocated and event.request_id == "a":
            cache.allocate(request_id="b").free()
        heard.append(("end", event.name))

    cache.subscribe(answer, SequenceEvent)
    cache.allocate(request_id="a")
    assert heard == [(moment, name) for name in ("allocated", "allocated", "freed") for moment in ("begin", "end")]


def test_an_observer_may_subscribe_and_cancel_observers_itself_included(cache: KvCacheManager) -> None:
    heard: Heard = []
    others: Heard = []

    def once(event: Any) -> None:
        heard.append(event)
        subscription.cancel()
        cache.subscribe(others.append, Allocated)

    subscription = cache.subscribe(once, Allocated)
    cache.allocate()
    cache.allocate()
    assert len(heard) == 1
    assert len(others) == 1


def test_an_observer_may_close_the_cache(new_cache: NewCache) -> None:
    cache = new_cache(manager=KvCacheManager)
    heard: Heard = []
    cache.subscribe(heard.append)
    cache.subscribe(lambda event: cache.close(), Committed)
    handle = filled(cache, 3)
    assert kinds_of(heard) == [Attached, Allocated, Committed, Freed, Closed]
    assert not handle.is_valid


def test_events_come_in_order_from_many_threads(new_cache: NewCache) -> None:
    cache = new_cache(num_blocks=64)
    heard: Heard = []
    cache.subscribe(heard.append)
    barrier = threading.Barrier(8)
    errors: list[AssertionError] = []

    def work(name: str) -> None:
        try:
            barrier.wait(10)
            for _ in range(25):
                with cache.allocate(request_id=name) as handle:
                    grow(handle, 3)
                    handle.truncate(1)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    cache.close()
    assert [event.number for event in heard] == list(range(1, len(heard) + 1))
    for name in map(str, range(8)):
        kinds = [type(event) for event in heard if getattr(event, "request_id", None) == name]
        assert kinds == [Allocated, Truncated, Freed] * 25


def test_a_slow_observer_keeps_nobody_from_using_the_cache(cache: KvCacheManager) -> None:
    hearing, go_on = threading.Event(), threading.Event()

    def slow(event: Any) -> None:
        hearing.set()
        assert go_on.wait(10)

    cache.subscribe(slow, Allocated)
    thread = threading.Thread(target=cache.allocate)
    thread.start()
    assert hearing.wait(10)
    handle = filled(cache, 3)
    assert handle.num_tokens == 3
    go_on.set()
    thread.join(10)


def test_when_observers_are_too_slow_the_newest_events_are_lost_and_that_is_told(
    cache: KvCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "_MOST_WAITING", 4)
    heard: Heard = []
    hearing, go_on = threading.Event(), threading.Event()

    def slow(event: Any) -> None:
        heard.append(event)
        hearing.set()
        assert go_on.wait(10)

    go_on.set()
    cache.subscribe(slow, CacheEvent)
    go_on.clear()
    hearing.clear()
    thread = threading.Thread(target=cache.allocate)
    thread.start()
    assert hearing.wait(10)
    for _ in range(7):
        cache.allocate()
    go_on.set()
    thread.join(10)
    cache.allocate()
    assert [event.name for event in heard] == ["attached", *["allocated"] * 5, "events_lost", "allocated"]
    assert heard[-2].count == 3
    assert heard[-2].number == heard[-3].number + 4


# -- harm ------------------------------------------------------------------------------------------------


def test_an_observer_that_raises_is_reported_once_and_disturbs_nobody(cache: KvCacheManager) -> None:
    heard: Heard = []

    def broken(event: Any) -> None:
        raise ZeroDivisionError("mine")

    cache.subscribe(broken, SequenceEvent)
    cache.subscribe(heard.append, SequenceEvent)
    with pytest.warns(KvCacheWarning, match=r"broken.* raised ZeroDivisionError\('mine'\) at 'allocated'") as caught:
        filled(cache, 3).free()
    assert len(caught) == 1
    assert kinds_of(heard) == [Allocated, Freed]


def test_each_observer_that_raises_is_reported(cache: KvCacheManager) -> None:
    def first(event: Any) -> None:
        raise ZeroDivisionError

    def second(event: Any) -> None:
        raise KeyError

    cache.subscribe(first, Allocated)
    cache.subscribe(second, Allocated)
    with pytest.warns(KvCacheWarning) as caught:
        cache.allocate()
    assert len(caught) == 2


def test_an_interrupt_in_an_observer_passes_and_later_events_are_still_told(cache: KvCacheManager) -> None:
    heard: Heard = []

    def interrupted(event: Any) -> None:
        heard.append(event)
        if type(event) is Truncated:
            raise KeyboardInterrupt

    handle = filled(cache, 3)
    others: Heard = []
    cache.subscribe(interrupted, SequenceEvent)
    cache.subscribe(others.append, SequenceEvent)
    with pytest.raises(KeyboardInterrupt):
        handle.truncate(1)
    assert handle.num_tokens == 1
    handle.free()
    assert kinds_of(heard) == kinds_of(others) == [Truncated, Freed]


def test_a_refusal_is_raised_as_ever_when_the_observer_raises_too(cache: KvCacheManager) -> None:
    def broken(event: Any) -> None:
        raise CacheFullError("not this one", needed=0, free=0)

    filled(cache, 48)
    cache.subscribe(broken, Refused)
    with pytest.warns(KvCacheWarning), pytest.raises(CacheFullError, match="no room for a sequence of 40 tokens"):
        cache.allocate(num_tokens=40)


# -- finalizers ------------------------------------------------------------------------------------------


def test_a_finalizer_tells_nobody_and_the_next_operation_does(new_cache: NewCache) -> None:
    cache = new_cache(manager=KvCacheManager)
    heard: Heard = []
    cache.subscribe(heard.append, Freed)
    handle = filled(cache, 3, request_id="a")
    with pytest.warns(ResourceWarning):
        del handle
    assert heard == []
    cache.stats()
    assert [(event.request_id, event.num_tokens, event.reason) for event in heard] == [("a", 3, "dropped")]


def test_collecting_garbage_anywhere_in_an_operation_or_an_observer_does_no_harm(new_cache: NewCache) -> None:
    cache = new_cache(manager=KvCacheManager)
    heard: Heard = []

    def collecting(event: Any) -> None:
        heard.append(event)
        litter()
        gc.collect()

    def litter() -> None:
        cycle: list[Any] = [cache.allocate()]
        cycle.append(cycle)

    cache.subscribe(collecting, Committed)
    threshold = gc.get_threshold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.freeze()  # so that collecting takes no time
        gc.set_threshold(1, 1, 1)
        try:
            for _ in range(10):
                litter()
                filled(cache, 5).free()
        finally:
            gc.set_threshold(*threshold)
            gc.unfreeze()
        gc.collect()
    assert len(heard) == 10
    assert cache.stats().active_caches == 0
    assert cache.audit() == ()


def test_an_observer_cancelled_by_a_finalizer_hears_no_more(cache: KvCacheManager) -> None:
    heard: Heard = []

    class Holder:
        def __init__(self) -> None:
            self.subscription = cache.subscribe(heard.append, Allocated)
            self.cycle = self

        def __del__(self) -> None:
            self.subscription.cancel()

    Holder()
    gc.collect()
    cache.allocate()
    assert heard == []
    assert cache.store.events.wanted == set()
