"""Several threads on one cache.

Faults of other caches that these tests are named after: `LMCache#1858` (release goes round the lock), `kvcached#262`
(capacity is checked and taken in separate steps). `TensorRT-LLM#15018` (publication races teardown) is met here as
far as commit and free race; what is published for reuse is tested with prefix reuse.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.errors import CacheFullError, HandleError, StepError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.storage import Storage
from kvcache_core.testing.conformance import Conformance

__all__ = ["ThreadConformance"]


def run_in_threads(*bodies: Callable[[], None], timeout: float = 60.0) -> None:
    """Start all bodies at once, and raise what the first of them raised; a thread that hangs is an error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout)
            body()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can, so that a race shows
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
    finally:
        sys.setswitchinterval(interval)
    if any(thread.is_alive() for thread in threads):
        raise AssertionError("a thread hangs")
    if errors:
        raise errors[0]


class SerialCalls:
    """Wraps a storage, and notes if two of the calls overlap that core makes one at a time.

    Each call lets other threads run before it does its work, so that books without a lock would show.
    """

    calls = frozenset({"open", "fork", "reserve", "truncate", "close", "scrub"})

    def __init__(self, storage: Storage) -> None:
        self.overlaps: list[str] = []
        self._storage = storage
        self._running: list[str] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if name not in self.calls:
            return attribute

        def call(*arguments: Any) -> Any:
            self.overlaps += [f"{name} during {other}" for other in self._running]
            self._running.append(name)
            time.sleep(1e-6)
            try:
                return attribute(*arguments)
            finally:
                self._running.remove(name)

        return call


class ThreadConformance(Conformance):
    """Managers are shared between threads; sequences are not."""

    thread_rounds = 60

    @pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
    def test_lmcache_1858_threads_that_work_and_drop_handles_leave_the_books_right(self, reuse: bool) -> None:
        made: list[SerialCalls] = []

        def wrap(storage: Storage) -> Storage:
            made.append(SerialCalls(storage))
            return cast("Storage", made[0])

        prefix = PrefixCacheConfig(enabled=reuse, namespace="model", max_prefixes=6)
        with self.cache(num_blocks=48, wrap=wrap, prefix=prefix) as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # dropping handles is part of the test
            run_in_threads(*(lambda seed=seed: self._work(cache, seed) for seed in range(6)))
            gc.collect()
            cache.gc()
            assert made[0].overlaps == []
            assert cache.audit() == ()
            stats = cache.stats()
            assert (stats.free_blocks + stats.cached_blocks, stats.active_caches) == (stats.total_blocks, 0)
            assert bool(stats.hit_rate) == reuse

    def _work(self, cache: KvCacheManager, seed: int) -> None:
        dice, numbers = random.Random(seed), itertools.count(100_000 * seed)
        held: list[tuple[KvCacheHandle, list[int]]] = []
        for _ in range(self.thread_rounds):
            choice = dice.random()
            try:
                if not held or choice < 0.15:
                    prompt = list(range(9000, 9000 + dice.randint(1, 4 * self.block_size)))
                    handle = cache.allocate(token_ids=prompt)
                    tokens = prompt[: handle.num_tokens]
                    held.append((handle, tokens))
                    self._feed_or_give_up(cache, handle, prompt[len(tokens) :], abort=False, tokens=tokens)
                elif choice < 0.6:
                    index = dice.randrange(len(held))
                    handle, tokens = held[index]
                    new = [next(numbers) for _ in range(dice.randint(1, 5))]
                    self._feed_or_give_up(cache, handle, new, abort=dice.random() < 0.2, tokens=tokens)
                elif choice < 0.75:
                    handle, tokens = dice.choice(held)
                    held.append((handle.fork(), list(tokens)))
                elif choice < 0.85:
                    handle, tokens = dice.choice(held)
                    kept = dice.randint(0, len(tokens))
                    handle.truncate(kept)
                    del tokens[kept:]
                else:
                    handle, tokens = held.pop(dice.randrange(len(held)))
                    self.assert_holds(handle, tokens)
                    if choice < 0.95:
                        handle.free()
                    del handle
            except CacheFullError:
                for handle, _ in held[1:]:
                    handle.free()
                del held[1:]
        for handle, tokens in held:
            self.assert_holds(handle, tokens)

    def _feed_or_give_up(
        self, cache: KvCacheManager, handle: KvCacheHandle, new: list[int], *, abort: bool, tokens: list[int]
    ) -> None:
        step = cache.begin({handle: new})
        self.write(step, {handle: new})
        if abort:
            step.abort()
        else:
            step.commit()
            tokens += new

    def test_kvcached_262_checking_for_room_and_taking_it_may_race(self) -> None:
        size = self.block_size
        with self.cache(num_blocks=6) as cache:

            def body() -> None:
                for _ in range(4 * self.thread_rounds):
                    if not cache.can_allocate(num_tokens=4 * size):
                        continue
                    try:
                        handle = cache.allocate(num_tokens=4 * size)
                    except CacheFullError as error:
                        assert error.needed > error.free
                        continue
                    assert handle.block_table.num_blocks == 4
                    handle.free()

            run_in_threads(*[body] * 3)
            assert cache.stats().free_blocks == 6

    def test_kvcached_262_what_the_numbers_promise_can_be_had(self) -> None:
        with self.cache(num_blocks=6) as cache:
            handle, tokens = self.filled(cache, 2 * self.block_size)
            fork = handle.fork()
            free = cache.stats().free_blocks
            assert cache.can_allocate(num_tokens=free * self.block_size)
            assert not cache.can_allocate(num_tokens=free * self.block_size + 1)
            last = cache.allocate()
            self.feed(cache, {last: self.tokens(free * self.block_size)})
            assert cache.stats().free_blocks == 0
            self.assert_holds(fork, tokens)

    def test_tensorrt_llm_15018_one_free_of_many_wins_and_the_others_are_told(self) -> None:
        with self.cache() as cache:
            for _ in range(self.thread_rounds):
                handle, _ = self.filled(cache, self.block_size)
                refused: list[HandleError] = []

                def free(handle: KvCacheHandle = handle, refused: list[HandleError] = refused) -> None:
                    try:
                        handle.free()
                    except HandleError as told:
                        refused.append(told)

                run_in_threads(*[free] * 3)
                assert [error.reason for error in refused] == ["freed"] * 2
                assert cache.stats().free_blocks == cache.stats().total_blocks

    def test_tensorrt_llm_15018_a_commit_and_a_free_of_one_sequence_exclude_each_other(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            for _ in range(self.thread_rounds):
                handle, _ = self.filled(cache, 1)
                clone, new = handle.clone_handle(), self.tokens(self.block_size)

                def commit(clone: KvCacheHandle = clone, new: list[int] = new) -> None:
                    try:
                        self.feed(cache, {clone: new})
                    except (HandleError, StepError):
                        assert not clone.is_valid

                def end(handle: KvCacheHandle = handle) -> None:
                    with suppress(StepError):
                        cache.deallocate(handle.request_id)

                run_in_threads(commit, end)
                assert cache.audit() == ()
                if handle.is_valid:
                    assert handle.num_tokens in (1, 1 + self.block_size)
                    cache.deallocate(handle.request_id)
                assert cache.stats().free_blocks == cache.stats().total_blocks

    def test_steps_of_different_threads_on_distinct_forks_do_not_meet(self) -> None:
        with self.cache(num_blocks=64) as cache:
            parent, tokens = self.filled(cache, self.block_size + 1)
            forks = [parent.fork() for _ in range(4)]
            new = [self.tokens(2 * self.block_size) for _ in forks]

            def body(index: int) -> None:
                for token in new[index]:
                    self.feed(cache, {forks[index]: [token]})

            run_in_threads(*(lambda index=index: body(index) for index in range(4)))
            for fork, more in zip(forks, new, strict=True):
                self.assert_holds(fork, tokens + more)
            self.assert_holds(parent, tokens)

    def test_pressure_is_told_outside_the_lock(self) -> None:
        with self.cache(num_blocks=10) as cache:
            levels: list[str] = []

            def callback(level: object) -> None:
                levels.append(str(getattr(level, "value", level)))
                cache.stats()  # would hang if the lock were held

            cache.set_pressure_callback(callback)
            handle, _ = self.filled(cache, 10 * self.block_size)
            handle.truncate(0)
            assert levels == ["critical", "low"]
            cache.set_pressure_callback(None)

            def broken(level: object) -> None:
                raise KeyError(level)

            tokens = self.tokens(9 * self.block_size)
            with pytest.warns(UserWarning, match="callback raised"):
                cache.set_pressure_callback(broken)
                self.feed(cache, {handle: tokens})
            self.assert_holds(handle, tokens)
