"""Memory pressure: how full the budget is, as a level, and noticing when the level changes."""

from __future__ import annotations

from collections.abc import Callable

from kvcache_core.errors import ConfigError
from kvcache_core.observing import EventQueue
from kvcache_core.stats import MemoryPressure

__all__ = ["PressureCallback", "PressureMonitor"]

PressureCallback = Callable[[MemoryPressure], None]


class PressureMonitor:
    """Watches the share of the budget that sequences use.

    Args:
        thresholds: Shares from which pressure is medium, high and critical.

    Attributes:
        used: Blocks in use when the level was last taken.

    Raises:
        ConfigError: The thresholds are not three shares above 0 and up to 1 in ascending order.
    """

    def __init__(self, thresholds: tuple[float, float, float]) -> None:
        self._medium, self._high, self._critical = _checked(thresholds)
        self._last = MemoryPressure.LOW
        self.used = 0

    def level(self, used: int, total: int) -> MemoryPressure:
        """The level at which `used` of `total` blocks are in use; a threshold belongs to the level above it."""
        share = used / total
        if share >= self._critical:
            return MemoryPressure.CRITICAL
        if share >= self._high:
            return MemoryPressure.HIGH
        return MemoryPressure.MEDIUM if share >= self._medium else MemoryPressure.LOW

    def note(self, used: int, total: int, events: EventQueue) -> None:
        """Take the level again; called under the manager's lock after every operation that changed `used`."""
        self.used = used
        level = self.level(used, total)
        if level is not self._last:
            previous, self._last = self._last, level
            if "pressure_changed" in events.wanted:
                events.note("pressure_changed", level=level, previous=previous, used_blocks=used, total_blocks=total)


def _checked(thresholds: tuple[float, float, float]) -> tuple[float, float, float]:
    medium, high, critical = thresholds
    if not 0 < medium <= high <= critical <= 1:
        raise ConfigError(
            f"pressure_thresholds must be three ascending shares above 0 and up to 1, not {thresholds!r}",
            key="pressure_thresholds",
        )
    return medium, high, critical
