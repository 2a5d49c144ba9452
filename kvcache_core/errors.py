"""The exceptions and warnings of kvcache-core.

```
KvCacheError
├─ ConfigError(ValueError)                        .key .origin
│  └─ OptionsError                                .backend .problems
├─ BackendError                                   .backend .distribution .hint
│  ├─ UnknownBackendError(LookupError)
│  ├─ AmbiguousBackendError(LookupError)
│  ├─ BackendDisabledError(LookupError)
│  ├─ BackendLoadError(ImportError)
│  ├─ IncompatibleBackendError(ImportError)
│  ├─ BackendUnavailableError(RuntimeError)
│  ├─ NoBackendAvailableError(RuntimeError)
│  └─ UnsupportedError(NotImplementedError)       .capability
├─ CacheFullError(MemoryError)                    .needed .free .evictable .hint
├─ HandleError(RuntimeError)                      .reason
├─ ShapeError(ValueError)
├─ StepError(RuntimeError)
└─ WouldCopy(BufferError)                         .export .reason
```

The first line of every message stands alone in a log and says what to do; details follow, indented.
Every exception survives pickling with its attributes, so that it can cross a process boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

__all__ = [
    "AmbiguousBackendError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendSkippedWarning",
    "BackendUnavailableError",
    "CacheFullError",
    "ConfigError",
    "ConfigWarning",
    "HandleError",
    "IncompatibleBackendError",
    "KvCacheError",
    "KvCacheWarning",
    "NoBackendAvailableError",
    "OptionsError",
    "ShapeError",
    "StepError",
    "UnknownBackendError",
    "UnsupportedError",
    "WouldCopy",
]


def _restore(cls: type[KvCacheError], message: str, state: dict[str, Any]) -> KvCacheError:
    error: KvCacheError = Exception.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class KvCacheError(Exception):
    """Base of every error raised by kvcache-core and its backends.

    Args:
        message: The first line: what is wrong and what to do.
        details: Further lines, shown indented below the first.
    """

    def __init__(self, message: str, *, details: Iterable[str] = ()) -> None:
        super().__init__("\n  ".join([message, *details]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), str(self.args[0]), self.__dict__)

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(KvCacheError, ValueError):
    """A configuration value is missing, unknown or out of range.

    Attributes:
        key: The dotted key, such as `"geometry.head_dim"`, or None when the whole source is at fault.
        origin: Where the value came from, such as `"kvcache.toml, line 3"` or `"environment variable X"`.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        origin: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, details=details)
        self.key = key
        self.origin = origin


class OptionsError(ConfigError):
    """The options given to a backend do not fit the backend's own options model.

    Attributes:
        backend: The backend's name.
        problems: One `(path, message)` pair a problem; paths begin with `"options."`.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str,
        problems: Iterable[tuple[str, str]] = (),
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, key="options", details=details)
        self.backend = backend
        self.problems = tuple(problems)


class BackendError(KvCacheError):
    """A backend cannot be found, loaded or used.

    Attributes:
        backend: The name that was asked for, or None when none was.
        distribution: The installed distribution that provides it, or None.
        hint: What would help, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        distribution: str | None = None,
        hint: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, details=details)
        self.backend = backend
        self.distribution = distribution
        self.hint = hint


class UnknownBackendError(BackendError, LookupError):
    """No installed distribution provides a backend of this name."""


class AmbiguousBackendError(BackendError, LookupError):
    """Several distributions provide a backend of this name; `dist:name` picks one."""


class BackendDisabledError(BackendError, LookupError):
    """The backend is installed but was switched off by configuration or environment."""


class BackendLoadError(BackendError, ImportError):
    """The backend's code raised while it was imported or described; the cause is chained."""


class IncompatibleBackendError(BackendError, ImportError):
    """The backend was written for another version of the interface, or misses required methods."""


class BackendUnavailableError(BackendError, RuntimeError):
    """The backend is installed and whole, but cannot run on this machine or in this configuration.

    Attributes:
        code: A short stable word for the reason, such as `"torch-without-cuda"`.
        reason: What is missing, as a phrase, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str | None = None,
        backend: str | None = None,
        distribution: str | None = None,
        hint: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, backend=backend, distribution=distribution, hint=hint, details=details)
        self.code = code
        self.reason = reason


class NoBackendAvailableError(BackendError, RuntimeError):
    """`auto` found no backend that can run here; the message gives each one's reason."""


class UnsupportedError(BackendError, NotImplementedError):
    """The backend does not declare the capability that this operation needs.

    Attributes:
        capability: The capability's name, such as `"swap"`.
    """

    def __init__(
        self,
        message: str,
        *,
        capability: str,
        backend: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, backend=backend, details=details)
        self.capability = capability


class CacheFullError(KvCacheError, MemoryError):
    """There is no room; nothing was changed.

    Attributes:
        needed: Blocks the operation needs beyond what its sequences hold.
        free: Blocks that are free.
        evictable: Blocks that could be freed by dropping cached prefixes.
        hint: What would make room.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: int,
        free: int,
        evictable: int = 0,
        hint: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(message, details=[*details, hint] if hint else details)
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.hint = hint


HandleReason = Literal["freed", "stale", "swapped", "foreign", "closed", "forked-process", "unknown", "in-use"]


class HandleError(KvCacheError, RuntimeError):
    """A handle cannot be used.

    Attributes:
        reason: `"freed"`, `"stale"` (the cache was reset), `"swapped"`, `"foreign"` (it belongs to another
            cache), `"closed"`, `"forked-process"` (made before an `os.fork`), `"unknown"`, or `"in-use"` (the
            name already belongs to a live sequence).
    """

    def __init__(self, message: str, *, reason: HandleReason, details: Iterable[str] = ()) -> None:
        super().__init__(message, details=details)
        self.reason: HandleReason = reason


class ShapeError(KvCacheError, ValueError):
    """A tensor, layer number, token count or length does not fit the cache."""


class StepError(KvCacheError, RuntimeError):
    """A step was used out of order, or a handle was changed while it is part of an open step."""


class WouldCopy(KvCacheError, BufferError):
    """An export that shares memory is not possible: the data does not lie as its reader needs it.

    Attributes:
        export: The export's name, such as `"flashinfer"`.
        reason: Why it would take a copy, as a phrase.
    """

    def __init__(self, message: str, *, export: str, reason: str, details: Iterable[str] = ()) -> None:
        super().__init__(message, details=details)
        self.export = export
        self.reason = reason


class KvCacheWarning(UserWarning):
    """Base of the warnings issued by kvcache-core."""


class ConfigWarning(KvCacheWarning):
    """A configuration source holds something that has no effect."""


class BackendSkippedWarning(KvCacheWarning):
    """`auto` passed over a backend that is installed but broken."""
