"""What is installed: a scan of distribution metadata that imports no plugin and survives any neighbour.

Only the text of `entry_points.txt` is read, and METADATA only where that text names one of our groups. A distribution
that is broken costs itself and nobody else: what was wrong is recorded as a `DiscoveryProblem`, never raised.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache_core import _compat
from kvcache_core._compat import MetadataFinder
from kvcache_core.interface import ENTRY_POINT_GROUP, OBSERVER_GROUP
from kvcache_core.names import canonical, name_problem

__all__ = ["Catalogue", "DiscoveryProblem", "Distribution", "Entry", "scan"]

_GROUPS = (ENTRY_POINT_GROUP, OBSERVER_GROUP)
_DISTRIBUTION_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
_EXTRAS = re.compile(r"\s*\[[^]]*\]\s*$")


@dataclass(frozen=True)
class Distribution:
    """An installed distribution that provides backends or observers.

    Attributes:
        name: As its METADATA spells it.
        version: Its version, or `"unknown"`.
        location: The directory (or zip file) it is installed in.
        metadata: Its metadata directory.
        editable: Whether it is an editable install, whose entry points stay as they were until reinstalled.
        source: Where an editable install has its sources, or None.
    """

    name: str
    version: str
    location: str
    metadata: str
    editable: bool = False
    source: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def key(self) -> str:
        """The name in canonical form."""
        return canonical(self.name)


@dataclass(frozen=True)
class Entry:
    """One backend or observer that a distribution announces: a line of its `entry_points.txt`.

    Attributes:
        name: Its canonical name.
        module: The plugin module.
        distribution: Who provides it.
    """

    name: str
    module: str
    distribution: Distribution

    @property
    def qualified(self) -> str:
        """`"distribution:name"`, which tells two claimants of one name apart."""
        return f"{self.distribution.key}:{self.name}"


@dataclass(frozen=True)
class DiscoveryProblem:
    """Something wrong with the installed metadata.

    Attributes:
        code: A short stable word, such as `"not-utf8"`.
        reason: What is wrong, in words.
        location: The file, directory or path entry.
        distribution: The distribution's name where it is known.
        line: The line of `entry_points.txt`, counted from 1.
        breaks_plugin: Whether a plugin is lost through it; otherwise it is only worth knowing.
    """

    code: str
    reason: str
    location: str
    distribution: str | None = None
    line: int | None = None
    breaks_plugin: bool = False


@dataclass(frozen=True)
class Catalogue:
    """The result of a scan: the announced backends and observers, by name, and what was wrong on the way."""

    entries: tuple[Entry, ...] = ()
    observers: tuple[Entry, ...] = ()
    problems: tuple[DiscoveryProblem, ...] = ()


@dataclass
class _Scan:
    """Findings of a scan in progress."""

    # By group, then by canonical name of the distribution.
    entries: dict[str, dict[str, list[Entry]]] = field(default_factory=lambda: {group: {} for group in _GROUPS})
    problems: list[DiscoveryProblem] = field(default_factory=list)

    def report(self, code: str, location: str, reason: str, **details: Any) -> None:
        problem = DiscoveryProblem(code, reason, location, **details)
        if problem not in self.problems:  # both groups of a distribution may have the same one
            self.problems.append(problem)

    def announced(self, group: str) -> tuple[Entry, ...]:
        entries = [entry for claimed in self.entries[group].values() for entry in claimed]
        return tuple(sorted(entries, key=lambda entry: (entry.name, entry.distribution.key)))


def scan(finders: Sequence[MetadataFinder] | None = None) -> Catalogue:
    """Read the metadata of everything installed.

    Args:
        finders: Where to look; the finders on `sys.meta_path` when None.
    """
    found = _Scan()

    def finder_failed(place: str, error: Exception) -> None:
        found.report("finder-failed", place, f"searching it raised {type(error).__name__}: {error}")

    for distribution in _compat.distributions(finders, finder_failed):
        location = _compat.metadata_location(distribution)
        try:
            _read(distribution, location, found)
        except Exception as error:  # noqa: BLE001 - whatever a foreign distribution does, the others are read
            found.report("unreadable", location, f"reading it raised {type(error).__name__}: {error}")
    return Catalogue(found.announced(ENTRY_POINT_GROUP), found.announced(OBSERVER_GROUP), tuple(found.problems))


def _read(distribution: Any, location: str, found: _Scan) -> None:
    if os.path.basename(location).startswith("~"):
        found.report("leftover", location, "left behind by an interrupted pip; it is ignored and can be deleted")
        return
    try:
        text = distribution.read_text("entry_points.txt")
    except UnicodeDecodeError as error:
        ours = any(group.encode() in error.object for group in _GROUPS)
        found.report("not-utf8", location, "entry_points.txt is not UTF-8", breaks_plugin=ours)
        return
    if text is None:
        _check_absence(distribution, location, found)
    elif ENTRY_POINT_GROUP in text or OBSERVER_GROUP in text:
        _read_groups(distribution, location, text, found)


def _check_absence(distribution: Any, location: str, found: _Scan) -> None:
    """Tell a distribution without entry points, of which there are hundreds, from a damaged one."""
    if os.path.exists(os.path.join(location, "entry_points.txt")):
        found.report("unreadable", location, "entry_points.txt exists but cannot be read", breaks_plugin=True)
    elif (
        not os.path.exists(os.path.join(location, "METADATA"))
        and os.path.isdir(location)
        and _compat.header(distribution, "Name") is None
    ):
        found.report("nameless", location, "its METADATA is missing or has no Name; it is ignored")


def _read_groups(distribution: Any, location: str, text: str, found: _Scan) -> None:
    sections = {group: lines for group in _GROUPS if (lines := list(_section(text, group)))}
    owner = _identify(distribution, location, found) if sections else None
    if owner is None:
        return
    for group, lines in sections.items():
        _keep_first(group, owner, _entries(owner, lines, found), found)


def _entries(owner: Distribution, lines: Sequence[tuple[int, str]], found: _Scan) -> list[Entry]:
    """Return what the lines of a group announce, and report those that announce nothing."""
    entries: dict[str, Entry] = {}
    for number, line in lines:
        name, equals, value = (part.strip() for part in line.partition("="))
        module = _EXTRAS.sub("", value)
        problem = _line_problem(line, name, equals, module)
        key = canonical(name)
        if problem is None and key in entries:
            problem = "duplicate", f"{key!r} is announced twice; the first line counts"
        if problem is None:
            entries[key] = Entry(key, module, owner)
        else:
            code, reason = problem
            found.report(
                code, owner.metadata, reason, distribution=owner.name, line=number, breaks_plugin=code != "duplicate"
            )
    return list(entries.values())


def _section(text: str, group: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a group."""
    inside = False
    for number, raw in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            inside = line[1:-1].strip() == group
        elif inside and line and line[0] not in "#;":
            yield number, line


def _line_problem(line: str, name: str, equals: str, module: str) -> tuple[str, str] | None:
    if not (name and equals and module):
        return "malformed-line", f"{line!r} is not of the form 'name = package.module'"
    if unfit := name_problem(name):
        return "bad-name", unfit
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")):
        return "bad-value", f"{name} = {module!r}: the value must be the plugin module, such as 'package.plugin'"
    return None


def _identify(distribution: Any, location: str, found: _Scan) -> Distribution | None:
    try:
        name = _compat.header(distribution, "Name")
        version = _compat.header(distribution, "Version")
    except UnicodeDecodeError:
        found.report("not-utf8", location, "METADATA is not UTF-8", breaks_plugin=True)
        return None
    if name is None or not _DISTRIBUTION_NAME.fullmatch(name):
        reason = f"{name!r} is not a distribution name" if name else "its METADATA is missing or has no Name"
        found.report("nameless", location, f"{reason}; what it announces is ignored", breaks_plugin=True)
        return None
    editable, url = _compat.direct_url(distribution)
    source = url.removeprefix("file://") if editable and url else None
    return Distribution(name, version or "unknown", os.path.dirname(location) or location, location, editable, source)


def _keep_first(group: str, owner: Distribution, entries: list[Entry], found: _Scan) -> None:
    """Enter what a distribution announces unless an earlier copy of the same distribution already did."""
    claimed = found.entries[group]
    earlier = claimed.get(owner.key)
    if not entries or not earlier:
        if entries:
            claimed[owner.key] = entries
        return
    other = earlier[0].distribution
    if os.path.realpath(other.metadata) == os.path.realpath(owner.metadata):
        return  # the same directory reached by two path entries
    # Within one directory the order is the file system's and means nothing: the newest version counts.
    if other.location == owner.location and _version_order(owner.version) > _version_order(other.version):
        claimed[owner.key] = entries
        owner, other = other, owner
    found.report(
        "shadowed",
        owner.metadata,
        f"{owner} is hidden by {other} in {other.location}",
        distribution=owner.name,
    )


def _version_order(version: str) -> list[tuple[int, str]]:
    """Order versions by their numbers, well enough to prefer a newer leftover over an older one."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[a-z]+", version.lower())]
