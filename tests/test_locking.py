"""The lock over a cache's books: what happens on the way in and out, and what a dropped handle does meanwhile."""

from __future__ import annotations

import os
import threading

import pytest

from kvcache_core import locking
from kvcache_core.locking import Guard


class Recorder:
    """A guard whose callbacks write down that they were called, and whether the lock was held."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_in: str | None = None
        self.guard = Guard(*(lambda name=name: self._note(name) for name in ("check", "settle", "leaving", "after")))

    def _note(self, name: str) -> None:
        held = self.guard._lock.locked()
        self.calls.append(f"{name} {'inside' if held else 'outside'}")
        if self.fail_in == self.calls[-1]:
            raise KeyError(name)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_usability_is_checked_before_and_under_the_lock(recorder: Recorder) -> None:
    with recorder.guard:
        recorder.calls.append("body")
    assert recorder.calls == [
        "check outside",
        "check inside",
        "settle inside",
        "body",
        "leaving inside",
        "after outside",
    ]


@pytest.mark.parametrize("where", ["check outside", "check inside", "settle inside"])
def test_an_error_on_the_way_in_releases_the_lock(recorder: Recorder, where: str) -> None:
    recorder.fail_in = where
    with pytest.raises(KeyError), recorder.guard:
        raise AssertionError("not reached")
    recorder.fail_in = None
    assert recorder.guard.try_enter()
    recorder.guard.leave()


@pytest.mark.parametrize("where", ["leaving inside", "after outside"])
def test_an_error_on_the_way_out_releases_the_lock(recorder: Recorder, where: str) -> None:
    recorder.fail_in = where
    with pytest.raises(KeyError), recorder.guard:
        pass
    assert recorder.guard.try_enter()


def test_an_error_in_the_body_passes_and_releases_the_lock(recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), recorder.guard:
        raise ZeroDivisionError
    assert recorder.calls[-2:] == ["leaving inside", "after outside"]


def test_entering_without_waiting_fails_while_somebody_is_inside(recorder: Recorder) -> None:
    with recorder.guard:
        assert not recorder.guard.try_enter()
    assert recorder.guard.try_enter()
    assert not recorder.guard.try_enter()
    recorder.guard.leave()


def test_entering_without_a_check_still_settles(recorder: Recorder) -> None:
    recorder.fail_in = "check outside"
    assert recorder.guard.try_enter(wait=True)
    assert recorder.calls == ["settle inside"]
    recorder.guard.leave()


def test_a_failed_settling_does_not_keep_the_lock_when_entered_without_a_check(recorder: Recorder) -> None:
    recorder.fail_in = "settle inside"
    with pytest.raises(KeyError):
        recorder.guard.try_enter()
    recorder.fail_in = None
    assert recorder.guard.try_enter()


def test_leaving_quietly_calls_nothing_outside_the_lock(recorder: Recorder) -> None:
    assert recorder.guard.try_enter()
    recorder.guard.leave(quietly=True)
    assert recorder.calls == ["settle inside", "leaving inside"]
    assert recorder.guard.try_enter()


def test_only_one_thread_is_inside() -> None:
    inside, most = 0, 0
    guard = Guard(*[lambda: None] * 4)

    def work() -> None:
        nonlocal inside, most
        for _ in range(300):
            with guard:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_another_generation() -> None:
    before = locking.process_generation
    child = os.fork()
    if child == 0:
        os._exit(0 if locking.process_generation == before + 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locking.process_generation == before
