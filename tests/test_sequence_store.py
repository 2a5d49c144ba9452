"""Handles and steps that are dropped, threads, the garbage collector at its worst moments, and forked processes."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvcache_core import (
    CacheFullError,
    HandleError,
    KvCacheHandle,
    KvCacheManager,
    MemoryPressure,
    Step,
    StepError,
)
from kvcache_core.plugin import Storage
from tests.caches import (
    STORAGES,
    StorageFailed,
    assert_holds,
    failing,
    filled,
    grow,
    layers_of,
    make_cache,
    raising,
    rows,
    unchanged,
)
from tests.storages.paged import PagedStorage


@pytest.fixture(params=STORAGES, ids=lambda storage: storage.__name__)
def cache(request: pytest.FixtureRequest) -> Iterator[KvCacheManager]:
    """A cache that keeps no handle alive."""
    with make_cache(request.param, manager=KvCacheManager) as made:
        yield made
        if not made.closed:
            assert made.audit() == ()


@contextmanager
def dropping(what: str) -> Iterator[None]:
    with pytest.warns(ResourceWarning, match=what):
        yield


# -- dropped handles -----------------------------------------------------------------------------------------


def test_a_dropped_handle_gives_its_memory_back_and_says_so(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    with dropping(r"^handle of 'chat' was dropped without free\(\); its memory has been given back$"):
        del handle
    assert (cache.stats().free_blocks, cache.stats().active_caches) == (16, 0)
    report = cache.gc()
    assert (report.freed_caches, report.freed_bytes) == (1, 2 * cache.bytes_per_block)
    assert cache.gc().freed_caches == 0


def test_a_handle_that_was_freed_is_dropped_quietly(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    handle.free()
    del handle
    for end in (cache.reset, cache.close):
        handle = filled(cache, 6)
        end()
        del handle


def test_a_dropped_clone_leaves_the_sequence_to_the_others(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    clone = handle.clone_handle()
    with dropping("was dropped without free"):
        del clone
    assert_holds(handle, a=6)
    assert handle.sequence.references == 1
    assert cache.gc().freed_caches == 0
    handle.free()
    assert cache.stats().free_blocks == 16


def test_a_dropped_clone_does_not_undo_a_step_of_the_sequence(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    clone = handle.clone_handle()
    with cache.step({handle: 1}) as step:
        with dropping("was dropped without free"):
            del clone
        assert step.state == "open"
        for layer in range(3):
            step.write(layer, *rows(cache, layer, 6, 7))
    assert_holds(handle, a=7)
    handle.free()


def test_a_dropped_fork_leaves_its_source_whole(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    fork = handle.fork()
    grow(fork, 3, "b")
    with dropping("was dropped without free"):
        del fork
    assert_holds(handle, a=6)
    assert cache.stats().used_blocks == 2
    handle.free()


def test_handles_in_a_reference_cycle_are_given_back_by_gc(cache: KvCacheManager) -> None:
    cycle: dict[str, Any] = {"handle": filled(cache, 6)}
    cycle["self"] = cycle
    gc.disable()
    try:
        del cycle
        assert cache.stats().active_caches == 1
        with pytest.warns(ResourceWarning, match="dropped"):
            report = cache.gc()
    finally:
        gc.enable()
    assert (report.freed_caches, report.freed_bytes) == (1, 2 * cache.bytes_per_block)
    assert cache.stats().free_blocks == 16


def test_a_handle_that_could_not_be_made_is_dropped_quietly() -> None:
    with pytest.raises(TypeError):
        KvCacheHandle()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Step()  # type: ignore[call-arg]


# -- dropped steps -------------------------------------------------------------------------------------------


def test_a_dropped_step_is_rolled_back_and_says_so(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache):
        step = cache.begin({handle: 5})
        step.write(0, *rows(cache, 0, 6, 11))
        with dropping(r"^a step was dropped without commit\(\) or abort\(\); it has been rolled back$"):
            del step
    grow(handle, 5)
    assert_holds(handle, a=11)
    handle.free()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_that_ended_is_dropped_quietly(cache: KvCacheManager, end: str) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 0})
    getattr(step, end)()
    del step
    for finish in (cache.reset, cache.close):
        step = cache.begin({cache.allocate(): 5})
        finish()
        del step


def test_a_step_dropped_together_with_its_handles_gives_everything_back(cache: KvCacheManager) -> None:
    other = filled(cache, 4, "b")
    for in_a_cycle in (True, False):
        holder: dict[str, Any] = {"handle": filled(cache, 6)}
        holder["step"] = cache.begin({holder["handle"]: 5, other: 3})
        if in_a_cycle:
            holder["self"] = holder
        with dropping("dropped"):
            del holder
            gc.collect()
        assert (cache.stats().active_caches, cache.stats().used_blocks) == (1, 1)
        assert cache.audit() == ()
    assert_holds(other, b=4)
    other.free()


def test_a_step_keeps_its_handles_alive(cache: KvCacheManager) -> None:
    step = cache.begin({cache.allocate(): 5})
    assert step.handles[0].is_valid
    step.abort()
    with dropping("dropped"):
        del step


def test_a_dropped_handle_whose_storage_fails_harms_only_the_report(
    cache: KvCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, other = filled(cache, 6), filled(cache, 4, "b")
    seen: list[type | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: seen.append(problem.exc_type))
    with failing(cache.storage, "close"):
        del handle
    assert seen == [StorageFailed]
    assert (cache.stats().active_caches, cache.stats().free_blocks) == (1, 15)
    assert_holds(other, b=4)
    other.free()


# -- the collector inside the lock ---------------------------------------------------------------------------


class CollectingStorage(PagedStorage):
    """A storage in whose every method under the lock something is dropped."""

    drop: Callable[[], None] | None = None

    def _drop_something(self) -> None:
        drop, self.drop = self.drop, None
        if drop is not None:
            drop()

    def open(self, *arguments: Any) -> None:
        self._drop_something()
        return super().open(*arguments)

    def fork(self, *arguments: Any) -> None:
        self._drop_something()
        return super().fork(*arguments)

    def reserve(self, *arguments: Any) -> None:
        self._drop_something()
        super().reserve(*arguments)

    def truncate(self, *arguments: Any) -> None:
        self._drop_something()
        super().truncate(*arguments)

    def close(self, *arguments: Any) -> None:
        self._drop_something()
        super().close(*arguments)


OPERATIONS: dict[str, Callable[[KvCacheManager, KvCacheHandle], Any]] = {
    "open": lambda cache, handle: cache.allocate(num_tokens=5),
    "fork": lambda cache, handle: handle.fork(),
    "begin": lambda cache, handle: grow(handle, 5),
    "truncate": lambda cache, handle: handle.truncate(2),
    "abort": lambda cache, handle: cache.begin({handle: 1}).abort(),
    "free": lambda cache, handle: handle.fork().free(),
}


@pytest.mark.parametrize("dropped", ["a handle", "a step", "both"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_dropped_while_the_lock_is_held_is_settled_before_the_operation_returns(
    operation: str, dropped: str
) -> None:
    with make_cache(CollectingStorage, manager=KvCacheManager) as cache:
        handle = filled(cache, 6)
        victims: list[Any] = []
        if dropped != "a step":
            victims.append(filled(cache, 6, "v"))
        if dropped != "a handle":
            victims.append(cache.begin({cache.allocate(request_id="w"): 5}))
        kept = [each.handles for each in victims if isinstance(each, Step)]
        cache.storage.drop = victims.clear
        with pytest.warns(ResourceWarning, match="dropped"):
            made = OPERATIONS[operation](cache, handle)
        assert cache.storage.drop is None
        assert not cache.store._dropped
        assert cache.audit() == ()
        if isinstance(made, KvCacheHandle):
            made.free()
        for each in [each for handles in kept for each in handles]:
            each.free()
        assert cache.stats().used_blocks == handle.block_table.num_blocks
        handle.free()


@pytest.mark.parametrize("end", ["reset", "close"])
def test_what_is_dropped_while_everything_ends_is_gone_quietly(end: str) -> None:
    with make_cache(CollectingStorage, manager=KvCacheManager) as cache:
        victims: list[Any] = [filled(cache, 6), cache.begin({cache.allocate(): 5})]
        cache.storage.drop = victims.clear
        getattr(cache, end)()
        assert cache.storage.drop is None
        assert cache.block_allocator.free_block_count == 16
        assert end == "close" or cache.audit() == ()


def test_a_finalizer_may_call_the_cache_from_inside_its_own_lock_without_waiting() -> None:
    """As the collector may run it: on the thread that holds the lock, in the middle of an operation."""
    with make_cache(CollectingStorage, manager=KvCacheManager) as cache:
        handle = filled(cache, 6)
        finished: list[bool] = []
        cache.storage.drop = lambda: finished.append(cache.store._guard.try_enter())
        handle.truncate(3)
        assert finished == [False]
        handle.free()


def test_an_error_of_the_operation_does_not_lose_what_was_dropped_meanwhile() -> None:
    class Failing(CollectingStorage):
        def reserve(self, *arguments: Any) -> None:
            super().reserve(*arguments)
            raise StorageFailed("reserve")

    with make_cache(Failing, manager=KvCacheManager) as cache:
        handle, victims = cache.allocate(), [cache.allocate(num_tokens=20)]
        cache.storage.drop = victims.clear
        with pytest.warns(ResourceWarning, match="dropped"), pytest.raises(StorageFailed):
            cache.begin({handle: 3})
        assert (cache.stats().used_blocks, cache.stats().active_caches, cache.audit()) == (0, 1, ())
        handle.free()


def test_a_finalizer_calls_nothing_of_the_callers_and_the_next_operation_tells_the_pressure() -> None:
    with make_cache(manager=KvCacheManager) as cache:
        heard: list[MemoryPressure] = []
        cache.set_pressure_callback(heard.append)
        handle = cache.allocate(num_tokens=48)
        with dropping("dropped"):
            del handle
        assert cache.block_allocator.free_block_count == 16
        assert heard == [MemoryPressure.MEDIUM]
        cache.stats()
        assert heard == [MemoryPressure.MEDIUM, MemoryPressure.LOW]


def test_the_pressure_after_an_operation_counts_what_was_dropped_during_it() -> None:
    with make_cache(CollectingStorage, manager=KvCacheManager) as cache:
        heard: list[MemoryPressure] = []
        cache.set_pressure_callback(heard.append)
        handle, victims = cache.allocate(), [cache.allocate(num_tokens=48)]
        cache.storage.drop = victims.clear
        with dropping("dropped"):
            handle.truncate(0)
        assert heard == [MemoryPressure.MEDIUM, MemoryPressure.LOW]
        handle.free()


def test_a_cache_that_is_dropped_whole_lets_its_storage_go() -> None:
    cache = make_cache(manager=KvCacheManager)
    handle = filled(cache, 6)
    storage = weakref.ref(cache.storage)
    handle.free()
    del cache, handle
    gc.collect()
    assert storage() is None


# -- threads -------------------------------------------------------------------------------------------------


def run_threads(work: Callable[[int], None], count: int = 4) -> None:
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result(timeout=60)


@pytest.mark.parametrize("storage", STORAGES)
def test_threads_with_handles_of_their_own_do_not_disturb_each_other(storage: type[Storage]) -> None:
    with make_cache(storage, manager=KvCacheManager, num_blocks=64) as cache:

        def work(number: int) -> None:
            name, choose = f"t{number}", random.Random(number)
            for _ in range(15):
                handle = filled(cache, choose.randint(1, 9), name)
                length = handle.num_tokens
                fork = handle.fork()
                grow(fork, choose.randint(1, 6), name)
                kept = choose.randint(0, length)
                handle.truncate(kept)
                if kept:
                    assert_holds(handle, **{name: kept})
                assert_holds(fork, **{name: fork.num_tokens})
                cache.begin({handle: 3}).abort()
                clone = fork.clone_handle()
                for each in (handle, fork, clone):
                    each.free()

        run_threads(work)
        stats = cache.stats()
        assert (stats.free_blocks, stats.active_caches, cache.audit()) == (64, 0, ())


def test_threads_that_fill_the_cache_never_take_more_than_there_is() -> None:
    with make_cache(manager=KvCacheManager, num_blocks=8) as cache:
        refused = []

        def work(number: int) -> None:
            for _ in range(100):
                try:
                    handle = cache.allocate(num_tokens=12)
                except CacheFullError:
                    refused.append(number)
                    continue
                assert cache.stats().used_blocks <= 8
                handle.free()

        run_threads(work)
        assert (cache.stats().free_blocks, cache.stats().failures, cache.audit()) == (8, len(refused), ())


def test_of_threads_that_change_the_same_sequence_one_wins_and_the_others_hear_why(cache: KvCacheManager) -> None:
    for attempt in range(20):
        handle = filled(cache, 6)
        outcomes: list[str] = []
        start = threading.Barrier(4)

        def work(
            number: int,
            handle: KvCacheHandle = handle,
            outcomes: list[str] = outcomes,
            start: threading.Barrier = start,
        ) -> None:
            start.wait(10)
            try:
                handle.free()
            except HandleError as error:
                outcomes.append(error.reason)
            else:
                outcomes.append("won")

        run_threads(work)
        assert sorted(outcomes) == ["freed", "freed", "freed", "won"], attempt
        assert cache.stats().free_blocks == 16


def test_of_threads_that_begin_a_step_with_the_same_handle_one_wins(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    steps: list[Step] = []
    refusals: list[StepError] = []

    def work(number: int) -> None:
        try:
            steps.append(cache.begin({handle: 1}))
        except StepError as error:
            refusals.append(error)

    run_threads(work)
    assert (len(steps), len(refusals)) == (1, 3)
    steps[0].abort()
    handle.free()


def test_of_threads_that_end_the_same_step_one_wins(cache: KvCacheManager) -> None:
    for _ in range(20):
        handle = filled(cache, 6)
        step = cache.begin({handle: 1})
        for layer in range(3):
            step.write(layer, *rows(cache, layer, 6, 7))
        won: list[str] = []
        start = threading.Barrier(4)

        def work(number: int, step: Step = step, start: threading.Barrier = start, won: list[str] = won) -> None:
            start.wait(10)
            name = ("commit", "abort")[number % 2]
            try:
                getattr(step, name)()
            except StepError:
                return
            won.append(name)

        run_threads(work)
        assert "commit" in won or "abort" in won
        assert step.state in {"committed", "aborted"}
        assert handle.num_tokens == (7 if step.state == "committed" else 6)
        assert cache.audit() == ()
        handle.free()


def test_handles_cloned_in_many_threads_are_all_known(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    clones: list[KvCacheHandle] = []
    run_threads(lambda number: clones.extend(handle.clone_handle() for _ in range(50)))
    assert handle.sequence.references == 201
    known = {id(reference()) for reference in handle.sequence._handles}
    assert known == {id(each) for each in (handle, *clones)}
    handle.free()
    while clones:
        assert cache.get_handle("chat") is not None
        clones.pop().free()
    assert cache.get_handle("chat") is None


def test_handles_dropped_on_other_threads_are_given_back(cache: KvCacheManager) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)

        def work(number: int) -> None:
            for _ in range(40):
                try:
                    handle = cache.allocate(num_tokens=4)
                    cache.begin({handle: 3})
                except CacheFullError:
                    time.sleep(0)
                del handle

        run_threads(work)
        gc.collect()
    assert (cache.stats().free_blocks, cache.stats().active_caches, cache.audit()) == (16, 0, ())


def test_closing_while_others_work_leaves_them_with_typed_errors_only() -> None:
    for _ in range(5):
        cache = make_cache(manager=KvCacheManager, num_blocks=64)
        problems: list[BaseException] = []
        start = threading.Barrier(4)

        def work(number: int, cache: Any = cache, start: Any = start, problems: Any = problems) -> None:
            start.wait(10)
            try:
                for _ in range(100):
                    with cache.allocate(num_tokens=8) as handle:
                        cache.begin({handle: 2}).abort()
                        handle.fork().free()
            except HandleError as error:
                if error.reason != "closed":
                    problems.append(error)
            except BaseException as error:  # noqa: BLE001 - it fails the test in the main thread
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        start.wait(10)
        cache.close()
        for thread in threads:
            thread.join(30)
        assert problems == []


# -- forked processes ----------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
quiet_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child and raise here what it raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        message = b""
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - it is raised in the parent
            message = repr(error).encode() or b"failed"
        finally:
            os.write(writing, message)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert message == b""


@forks
@quiet_fork
def test_in_a_forked_child_every_use_is_refused_and_the_parent_goes_on(cache: KvCacheManager) -> None:
    handle, other = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({other: 1})
    loose = cache.block_allocator.allocate_blocks(1)

    def check() -> None:
        assert not handle.is_valid
        assert handle.state.value == "freed"
        assert "forked-process" in repr(handle)
        uses: list[Callable[[], Any]] = [
            lambda: handle.num_tokens,
            lambda: handle.kv_cache(0),
            handle.free,
            handle.fork,
            handle.clone_handle,
            lambda: handle.truncate(1),
            lambda: step.write(0, *rows(cache, 0, 4, 5)),
            lambda: step.attend(0, rows(cache, 0, 4, 5)[0]),
            step.commit,
            step.abort,
            cache.allocate,
            cache.stats,
            cache.audit,
            cache.reset,
            cache.list_handles,
            lambda: cache.block_allocator.allocate_blocks(1),
            lambda: cache.block_allocator.free_blocks(loose),
        ]
        for use in uses:
            with raising(HandleError, reason="forked-process"):
                use()

    in_child(check)
    for layer in range(3):
        step.write(layer, *rows(cache, layer, 4, 5, "b"))
    step.commit()
    assert_holds(handle, a=6)
    assert_holds(other, b=5)
    cache.block_allocator.free_blocks(loose)
    handle.free()
    other.free()


@forks
@quiet_fork
def test_a_forked_child_drops_and_closes_quietly_and_frees_nothing(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    steps = [cache.begin({handle: 1})]

    def check() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps.clear()
            gc.collect()
            cache.__exit__(None, None, None)  # as a child does that leaves the block its parent has entered
            cache.close()
            assert cache.closed
        assert caught == []
        assert cache.block_allocator.free_block_count == 14

    in_child(check)
    steps.pop().abort()
    assert_holds(handle, a=6)
    handle.free()


@forks
@quiet_fork
def test_a_child_forked_while_the_lock_was_held_does_not_hang(cache: KvCacheManager) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.store.locked():
            held.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)

    def check() -> None:
        for use in (cache.allocate, cache.stats, lambda: cache.block_allocator.allocate_blocks(1)):
            with raising(HandleError, reason="forked-process"):
                use()
        cache.close()
        with make_cache(manager=KvCacheManager) as own:
            handle = filled(own, 6)
            assert_holds(handle, a=6)
            handle.free()

    try:
        in_child(check)
    finally:
        go_on.set()
        thread.join()


@forks
@quiet_fork
def test_an_error_inside_a_step_in_a_forked_child_is_the_callers_own(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)

    def check() -> None:
        with raising(KeyError, "mine"), step:
            raise KeyError("mine")

    with cache.step({handle: 1}) as step:
        in_child(check)
        for layer, (key, value) in enumerate(layers_of(cache, 6, 7)):
            step.write(layer, key, value)
    assert_holds(handle, a=7)
    handle.free()
