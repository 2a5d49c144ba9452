"""A storage that fails at a chosen call, to see what core and callers make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcache_core.storage import Storage

__all__ = ["CALLS", "CALLS_THAT_MAY_FAIL_LATE", "FailingStorage", "InjectedFault"]

#: Every call of core into a storage that does work, and may therefore fail.
CALLS = frozenset(
    {"open", "fork", "reserve", "truncate", "close", "scrub", "plan", "write", "attend", "gather", "context"}
)

#: Calls that may also fail after they have done their work: what they leave behind lies beyond every length.
CALLS_THAT_MAY_FAIL_LATE = frozenset({"plan", "write", "attend", "gather", "context"})


class InjectedFault(RuntimeError):
    """What a `FailingStorage` raises."""


class FailingStorage:
    """Wraps a storage and lets one of its calls raise.

    Attributes:
        calls: Names of the calls so far, in order, the failed one included.
        fail_at: Index into `calls` of the call that fails, or None for none.
        late: The failing call does its work before it raises, where the protocol allows that.
        error: What it raises.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        fail_at: int | None = None,
        late: bool = False,
        error: type[BaseException] = InjectedFault,
    ) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at
        self.late = late
        self.error = error
        self._storage = storage

    @property
    def failed(self) -> str | None:
        """Name of the call that failed, or None."""
        return self.calls[self.fail_at] if self.fail_at is not None and self.fail_at < len(self.calls) else None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        return self._counted(name, attribute) if name in CALLS else attribute

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            failing = self.fail_at == len(self.calls) - 1
            if failing and not (self.late and name in CALLS_THAT_MAY_FAIL_LATE):
                raise self.error(f"injected into call {self.fail_at}, {name}")
            result = call(*arguments, **keywords)
            if failing:
                raise self.error(f"injected after call {self.fail_at}, {name}")
            return result

        return counted
