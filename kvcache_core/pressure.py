"""Memory pressure: how full the budget is, as a level, and telling somebody when the level changes."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

from kvcache_core.errors import ConfigError, KvCacheWarning
from kvcache_core.stats import MemoryPressure

__all__ = ["PressureCallback", "PressureMonitor"]

PressureCallback = Callable[[MemoryPressure], None]


class PressureMonitor:
    """Watches the share of the budget that sequences use.

    Args:
        thresholds: Shares from which pressure is medium, high and critical.

    Attributes:
        callback: Called with the new level after it has changed; None for nobody.

    Raises:
        ConfigError: The thresholds are not three shares above 0 and up to 1 in ascending order.
    """

    def __init__(self, thresholds: tuple[float, float, float]) -> None:
        self.callback: PressureCallback | None = None
        self._medium, self._high, self._critical = _checked(thresholds)
        self._last = MemoryPressure.LOW
        self._last_used = 0
        self._undelivered: deque[MemoryPressure] = deque()
        self._delivering = threading.Lock()
        self._warned = False

    def level(self, used: int, total: int) -> MemoryPressure:
        """The level at which `used` of `total` blocks are in use; a threshold belongs to the level above it."""
        share = used / total
        if share >= self._critical:
            return MemoryPressure.CRITICAL
        if share >= self._high:
            return MemoryPressure.HIGH
        return MemoryPressure.MEDIUM if share >= self._medium else MemoryPressure.LOW

    def note(self, used: int, total: int) -> None:
        """Take the level again; called under the manager's lock after every operation."""
        if used == self._last_used:
            return
        self._last_used = used
        level = self.level(used, total)
        if level is not self._last:
            self._last = level
            if self.callback is not None:
                self._undelivered.append(level)

    def deliver(self) -> None:
        """Tell the callback about changes; called outside the manager's lock.

        One thread delivers at a time, so that the last level told is the level there is. A change that comes
        meanwhile, also one that the callback itself causes, is left to that thread.
        """
        while self._undelivered and self._delivering.acquire(blocking=False):
            try:
                while self._undelivered:
                    self._tell(self._undelivered.popleft())
            finally:
                self._delivering.release()

    def _tell(self, level: MemoryPressure) -> None:
        callback = self.callback
        if callback is None:
            return
        try:
            callback(level)
        except Exception as error:  # noqa: BLE001 - an observer must not break the cache; it is reported instead
            if self._warned:
                return
            self._warned = True
            warnings.warn(
                f"the memory-pressure callback raised {error!r}; further failures are not reported",
                KvCacheWarning,
                stacklevel=3,
            )


def _checked(thresholds: tuple[float, float, float]) -> tuple[float, float, float]:
    medium, high, critical = thresholds
    if not 0 < medium <= high <= critical <= 1:
        raise ConfigError(
            f"pressure_thresholds must be three ascending shares above 0 and up to 1, not {thresholds!r}",
            key="pressure_thresholds",
        )
    return medium, high, critical
