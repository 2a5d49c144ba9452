"""Memory pressure: how full the budget is, as a level, and telling somebody when the level changes."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

from kvcache_core.errors import KvCacheWarning
from kvcache_core.stats import MemoryPressure

__all__ = ["PressureCallback", "PressureMonitor"]

PressureCallback = Callable[[MemoryPressure], None]


class PressureMonitor:
    """Watches the share of the budget that sequences use.

    Attributes:
        callback: Called with the new level after it has changed; None for nobody.
    """

    def __init__(self, thresholds: tuple[float, float, float]) -> None:
        self.callback: PressureCallback | None = None
        self._medium, self._high, self._critical = thresholds
        self._last = MemoryPressure.LOW
        self._undelivered: deque[MemoryPressure] = deque()
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
        level = self.level(used, total)
        if level is not self._last:
            self._last = level
            if self.callback is not None:
                self._undelivered.append(level)

    def deliver(self) -> None:
        """Tell the callback about changes; called outside the manager's lock."""
        while self._undelivered:
            try:
                level = self._undelivered.popleft()
            except IndexError:  # another thread was faster
                return
            callback = self.callback
            if callback is None:
                continue
            try:
                callback(level)
            except Exception as error:  # noqa: BLE001 - an observer must not break the cache; it is reported instead
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"the memory-pressure callback raised {error!r}; further failures are not reported",
                        KvCacheWarning,
                        stacklevel=2,
                    )
