"""Results remembered, made once, without a lock."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcache_core.errors import BackendLoadError
from kvcache_core.memo import BusyError, Memo


class Counter:
    def __init__(self, delay: float = 0.0, error: Exception | None = None) -> None:
        self.calls = 0
        self.delay = delay
        self.error = error

    def __call__(self) -> object:
        self.calls += 1
        time.sleep(self.delay)
        if self.error:
            raise self.error
        return object()


def test_a_result_is_made_once() -> None:
    memo, make = Memo(), Counter()
    assert memo.get_once("key", make) is memo.get_once("key", make) is memo.get("key", make)
    assert make.calls == 1
    assert "key" in memo
    assert "other" not in memo


def test_keys_do_not_mix() -> None:
    memo = Memo()
    assert memo.get("one", lambda: 1) == 1
    assert memo.get("two", lambda: 2) == 2


@pytest.mark.parametrize("method", ["get", "get_once"])
def test_sixteen_threads_get_one_object(method: str) -> None:
    memo, make = Memo(), Counter(delay=0.1)
    barrier = threading.Barrier(16)

    def ask(_: int) -> object:
        barrier.wait()
        return getattr(memo, method)("key", make)

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(16)))) == 1
    if method == "get_once":
        assert make.calls == 1


@pytest.mark.parametrize("method", ["get", "get_once"])
def test_an_error_of_ours_is_remembered_and_raised_anew(method: str) -> None:
    memo, make = Memo(), Counter(error=BackendLoadError("no", backend="acme"))
    raised = []
    for _ in range(2):
        with pytest.raises(BackendLoadError, match="no") as caught:
            getattr(memo, method)("key", make)
        raised.append(caught.value)
    assert make.calls == 1
    assert raised[0] is not raised[1]
    assert raised[1].backend == "acme"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a fault of ours")])
def test_other_errors_pass_and_are_tried_again(error: Exception) -> None:
    memo, make = Memo(), Counter(error=error)
    for _ in range(2):
        with pytest.raises(type(error)):
            memo.get_once("key", make)
    assert make.calls == 2


def test_asking_for_a_result_while_making_it_is_an_error_that_is_not_remembered() -> None:
    memo = Memo()
    inner: list[BusyError] = []

    def make() -> int:
        try:
            return memo.get_once("key", make)
        except BusyError as error:
            inner.append(error)
            return 5

    assert memo.get_once("key", make) == 5
    assert "asked for itself" in str(inner[0])


def test_waiting_for_another_thread_has_an_end() -> None:
    memo, release, started = Memo(patience=0.05), threading.Event(), threading.Event()

    def slow() -> int:
        started.set()
        release.wait(10)
        return 1

    thread = threading.Thread(target=memo.get_once, args=("key", slow))
    thread.start()
    started.wait(10)
    with pytest.raises(BusyError, match=r"more than 0\.05 seconds"):
        memo.get_once("key", slow)
    release.set()
    thread.join()
    assert memo.get_once("key", slow) == 1


def test_a_copy_knows_the_same_and_goes_its_own_way() -> None:
    memo = Memo()
    memo.get("old", lambda: 1)
    twin = memo.copy()
    twin.get("new", lambda: 2)
    assert twin.get("old", lambda: 3) == 1
    assert "new" not in memo
