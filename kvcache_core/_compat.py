"""The one module that touches `importlib_metadata`.

The backport serves every Python, so that discovery is the same everywhere. Importing it takes the place of the
standard library's finder, which the host program can notice; so it is imported only inside a scan. Its classes
differ between versions and from the standard library's: distributions are used by the methods they share and
never compared by type.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

__all__ = [
    "MetadataFinder",
    "core_version",
    "direct_url",
    "distributions",
    "header",
    "metadata_location",
]


class MetadataFinder(Protocol):
    """What discovery needs of a finder on `sys.meta_path`."""

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """Return the distributions on `context.path`."""
        ...


def distributions(
    finders: Sequence[MetadataFinder] | None, on_failure: Callable[[str, Exception], None]
) -> Iterator[Any]:
    """Yield the installed distributions, in the order of `sys.path`.

    Args:
        finders: Where to look; the finders on `sys.meta_path` when None.
        on_failure: Told the place and the error when a finder fails; the rest is still searched.
    """
    if finders is None:
        import importlib_metadata  # noqa: F401, PLC0415 - see the module's docstring

        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]  # type: ignore[misc]
    for finder in finders:
        yield from _found_by(finder, on_failure)


def _found_by(finder: MetadataFinder, on_failure: Callable[[str, Exception], None]) -> list[Any]:
    from importlib_metadata import DistributionFinder  # noqa: PLC0415 - see the module's docstring

    try:
        return list(finder.find_distributions(DistributionFinder.Context()))  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001, S110 - foreign code; searched again below, entry by entry, to find the culprit
        pass
    found: list[Any] = []
    failures: list[tuple[str, Exception]] = []
    for entry in list(sys.path):
        try:
            found += finder.find_distributions(DistributionFinder.Context(path=[entry]))  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - one bad path entry must not hide the others
            failures.append((str(entry), error))
    if failures and not found:
        failures = [(f"the finder {finder!r}", failures[0][1])]  # not the entries, the finder itself is broken
    for place, failure in failures:
        on_failure(place, failure)
    return found


def header(distribution: Any, field: str) -> str | None:
    """Return a field of a distribution's METADATA; None where the field or the file is missing.

    Raises:
        ValueError: The file cannot be decoded.
    """
    try:
        value = distribution.metadata.get(field)
    except UnicodeDecodeError:
        raise
    except Exception:  # noqa: BLE001 - a missing file is None, KeyError, TypeError or FileNotFoundError by version
        return None
    return str(value) if value else None


def metadata_location(distribution: Any) -> str:
    """Return the path of a distribution's metadata directory, or of what contains it."""
    try:
        # Every version has kept `_path`; the public `locate_file` only knows the directory above. `str`, not
        # `os.fspath`: a path inside a zip file is not an `os.PathLike`.
        return str(getattr(distribution, "_path", None) or distribution.locate_file("")).rstrip("/")
    except Exception:  # noqa: BLE001 - foreign distribution classes need not locate anything
        return repr(distribution)


def direct_url(distribution: Any) -> tuple[bool, str | None]:
    """Return whether a distribution is an editable install, and the URL it was installed from."""
    try:
        record = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(record.get("dir_info", {}).get("editable", False)), record.get("url")
    except Exception:  # noqa: BLE001 - a damaged record only costs the report this detail
        return False, None


def core_version() -> str:
    """Return the version of the installed kvcache-core, or an empty string when it has no metadata."""
    import importlib_metadata  # noqa: PLC0415 - see the module's docstring

    try:
        return str(importlib_metadata.version("kvcache-core"))
    except Exception:  # noqa: BLE001 - frozen programs have no metadata, and damaged metadata must not stop a cache
        return ""
