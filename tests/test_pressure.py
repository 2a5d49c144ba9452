"""Memory pressure: levels, and telling an observer in order, outside every lock."""

from __future__ import annotations

import pytest

from kvcache_core import ConfigError, KvCacheManager, KvCacheWarning, MemoryPressure
from kvcache_core.events import PressureChanged
from kvcache_core.observing import EventQueue
from kvcache_core.pressure import PressureMonitor
from tests.caches import NewCache, filled

LOW, MEDIUM, HIGH, CRITICAL = MemoryPressure


@pytest.fixture
def monitor() -> PressureMonitor:
    return PressureMonitor((0.6, 0.8, 0.95))


@pytest.mark.parametrize(
    ("used", "level"),
    [(0, LOW), (59, LOW), (60, MEDIUM), (79, MEDIUM), (80, HIGH), (94, HIGH), (95, CRITICAL), (100, CRITICAL)],
)
def test_a_threshold_belongs_to_the_level_above_it(monitor: PressureMonitor, used: int, level: MemoryPressure) -> None:
    assert monitor.level(used, 100) is level


@pytest.mark.parametrize(
    "thresholds", [(0.8, 0.6, 0.95), (0, 0.5, 0.9), (0.6, 0.8, 1.1), (-0.1, 0.5, 0.9), (0.5, float("nan"), 0.9)]
)
def test_thresholds_that_make_no_sense_are_refused(thresholds: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="three ascending shares above 0 and up to 1") as caught:
        PressureMonitor(thresholds)
    assert caught.value.key == "pressure_thresholds"
    assert str(thresholds) in str(caught.value)


def test_equal_thresholds_skip_a_level() -> None:
    monitor = PressureMonitor((0.5, 0.5, 1.0))
    assert [monitor.level(used, 10) for used in (4, 5, 9, 10)] == [LOW, HIGH, HIGH, CRITICAL]


def test_changes_only_are_noted(monitor: PressureMonitor) -> None:
    heard: list[PressureChanged] = []
    events = EventQueue("cache")
    events.add(heard.append, frozenset({PressureChanged}), label="the test")
    for used in (10, 61, 61, 70, 96, 100, 50, 0):
        monitor.note(used, 100, events)
    events.deliver()
    assert [(event.previous, event.level, event.used_blocks, event.total_blocks) for event in heard] == [
        (LOW, MEDIUM, 61, 100),
        (MEDIUM, CRITICAL, 96, 100),
        (CRITICAL, LOW, 50, 100),
    ]


# -- through a cache -----------------------------------------------------------------------------------------


def test_a_cache_tells_levels_as_blocks_come_and_go(cache: KvCacheManager) -> None:
    heard: list[MemoryPressure] = []
    cache.set_pressure_callback(heard.append)
    handles = [filled(cache, 8) for _ in range(8)]
    assert heard == [MEDIUM, HIGH, CRITICAL]
    for handle in handles:
        handle.free()
    assert heard == [MEDIUM, HIGH, CRITICAL, HIGH, MEDIUM, LOW]
    cache.set_pressure_callback(None)
    filled(cache, 40)
    assert len(heard) == 6


def test_a_change_that_nobody_wanted_to_hear_is_not_told_later(cache: KvCacheManager) -> None:
    handle = filled(cache, 48)
    heard: list[MemoryPressure] = []
    cache.set_pressure_callback(heard.append)
    assert heard == []
    handle.free()
    assert heard == [LOW]


def test_a_callback_takes_the_place_of_the_one_before(cache: KvCacheManager) -> None:
    heard: list[MemoryPressure] = []
    cache.set_pressure_callback(lambda level: pytest.fail("was replaced"))
    cache.set_pressure_callback(heard.append)
    filled(cache, 48)
    assert heard == [MEDIUM]


def test_a_callback_that_raises_is_reported_once_and_disturbs_nobody(cache: KvCacheManager) -> None:
    def broken(level: MemoryPressure) -> None:
        raise ZeroDivisionError("mine")

    cache.set_pressure_callback(broken)
    with pytest.warns(KvCacheWarning, match=r"the memory-pressure callback raised ZeroDivisionError\('mine'\)"):
        handle = filled(cache, 48)
    handle.free()


def test_an_observer_may_use_the_cache(cache: KvCacheManager) -> None:
    handles = [filled(cache, 8) for _ in range(4)]
    heard: list[MemoryPressure] = []

    def make_room(level: MemoryPressure) -> None:
        heard.append(level)
        if level is HIGH:
            handles.pop().free()
            handles.pop().free()
        assert cache.stats().pressure is not CRITICAL

    cache.set_pressure_callback(make_room)
    cache.allocate(num_tokens=20)
    assert heard == [HIGH, MEDIUM, LOW]
    assert cache.stats().pressure is LOW


def test_a_shared_block_presses_once(new_cache: NewCache) -> None:
    cache = new_cache()
    handle = filled(cache, 36)
    heard: list[MemoryPressure] = []
    cache.set_pressure_callback(heard.append)
    for _ in range(5):
        handle.fork()
    assert heard == []
    assert cache.stats().used_blocks == 9


def test_reset_and_close_let_the_pressure_off(new_cache: NewCache) -> None:
    for end in ("reset", "close"):
        cache = new_cache()
        heard: list[MemoryPressure] = []
        cache.set_pressure_callback(heard.append)
        filled(cache, 48)
        getattr(cache, end)()
        assert heard == [MEDIUM, LOW]


def test_thresholds_are_the_caches_own(new_cache: NewCache) -> None:
    cache = new_cache(settings={"pressure_thresholds": (0.05, 0.1, 0.15)})
    filled(cache, 4)
    assert cache.stats().pressure is MEDIUM
    with pytest.raises(ConfigError, match="pressure_thresholds"):
        new_cache(settings={"pressure_thresholds": (0.5, 0.4, 0.3)})
