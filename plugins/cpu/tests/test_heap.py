from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from kvcache_core.errors import CacheFullError
from plugins.cpu.tests.driver import Driver, MakeDriver, assert_same_bits


@pytest.fixture
def driver(heap_driver: MakeDriver) -> Driver:
    return heap_driver()


def test_room_grows_by_doubling_up_to_the_capacity(driver: Driver) -> None:
    sequence = driver.open(max_tokens=100)
    rooms = []
    for _ in range(100):
        driver.append(sequence, 1)
        rooms.append(sequence.slot.room)
    assert sorted(set(rooms)) == [16, 32, 64, 100]
    driver.check(sequence)


def test_views_survive_the_growth_of_their_sequence(driver: Driver) -> None:
    sequence = driver.open()
    driver.append(sequence, 16)
    key, value = driver.storage.gather(sequence.slot, (), 16, 0)
    driver.append(sequence, 100)
    assert_same_bits(key, sequence.rows[0][0][:16])
    assert_same_bits(value, sequence.rows[0][1][:16])


def test_a_fork_is_charged_in_full_and_copies(driver: Driver) -> None:
    source = driver.open()
    driver.append(source, 100)
    assert driver.storage.shared_tokens(source.slot, 100) == 0
    before = driver.storage.nbytes
    fork = driver.fork(source)
    assert driver.storage.nbytes > before
    driver.check(source, fork)


def test_a_truncate_to_little_gives_memory_back(driver: Driver) -> None:
    sequence = driver.open()
    driver.append(sequence, 800)
    before = driver.storage.nbytes
    driver.truncate(sequence, 100)
    assert driver.storage.nbytes < before / 4
    driver.check(sequence)


def test_refused_memory_is_a_cache_full_error_and_changes_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = driver.open()
    driver.append(sequence, 16)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(CacheFullError, match="no memory for 32 tokens"):
            driver.begin({sequence: 1})
        with pytest.raises(CacheFullError):
            driver.fork(sequence)
        with pytest.raises(CacheFullError):
            driver.open()
    driver.append(sequence, 1)
    driver.check(sequence)


def test_memory_goes_back_with_the_last_view(driver: Driver) -> None:
    sequence = driver.open()
    driver.append(sequence, 50)
    view = driver.storage.gather(sequence.slot, (), 50, 3)[0]
    driver.close(sequence)
    assert driver.storage.nbytes == 0
    assert torch.equal(view, sequence.rows[3][0])
