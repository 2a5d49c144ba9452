"""Writing a new backend's distribution from the templates in `kvcache_core/templates`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from string import Template
from typing import TYPE_CHECKING

from kvcache_core import _compat
from kvcache_core.errors import KvCacheError
from kvcache_core.messages import FIRST_PARTY
from kvcache_core.names import canonical, name_problem
from kvcache_core.plugin import ENTRY_POINT_GROUP, INTERFACE_VERSION
from kvcache_core.registry import BackendRegistry, get_registry

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

__all__ = ["BackendNames", "write_backend"]

_SUFFIX = ".txt"  # so that no tool takes a template for what it will become
_LONGEST_NAME = 30  # so that no line of what is written is too long
_CORE = "kvcache-core"


@dataclass(frozen=True)
class BackendNames:
    """The names of a new backend, all made from the one that users will write.

    Attributes:
        name: The backend.
        distribution: What one installs.
        package: What one imports.
        class_name: What its classes begin with.
    """

    name: str
    distribution: str
    package: str
    class_name: str

    @classmethod
    def of(cls, name: str, registry: BackendRegistry | None = None) -> BackendNames:
        """Make the names for a new backend.

        Args:
            name: The backend's name, in any spelling.
            registry: Where to look for names that are taken; the registry of this process when None.

        Raises:
            KvCacheError: It is no name, or one of the names is taken.
        """
        problem = name_problem(name)
        if problem is None and len(name) > _LONGEST_NAME:
            problem = f"{name!r} is longer than {_LONGEST_NAME} characters"
        if problem:
            raise KvCacheError(f"choose another name: {problem}")
        name = canonical(name)
        distribution = f"kvcache-{name}"
        made = cls(
            name=name,
            distribution=distribution,
            package=distribution.replace("-", "_"),
            class_name="".join(part.capitalize() for part in name.split("-")),
        )
        taken = made._taken_by(registry or get_registry())
        if taken:
            raise KvCacheError(f"choose another name: {taken}")
        return made

    def _taken_by(self, registry: BackendRegistry) -> str | None:
        if self.distribution in (_CORE, *FIRST_PARTY.values()):
            return f"{self.distribution} belongs to kvcache-core"
        if self.name.startswith("kvcache"):
            return f"the distribution would be called {self.distribution}; leave out 'kvcache'"
        for entry in registry.entries():
            if self.name == entry.name or self.distribution == entry.distribution.key:
                return f"{entry.distribution} is installed and provides a backend {entry.name!r}"
        if self.name in registry.names():
            return f"this program has registered a backend {self.name!r}"
        if find_spec(self.package) is not None:
            return f"there is an importable package {self.package!r} already"
        return None


def write_backend(names: BackendNames, folder: Path) -> list[Path]:
    """Write a complete distribution, or nothing.

    Args:
        names: Its names.
        folder: Where; it must not exist, or be empty, and its parent must exist.

    Returns:
        The files, relative to `folder`.

    Raises:
        KvCacheError: `folder` cannot be written to as it is; nothing has been written.
    """
    try:
        _require_new_or_empty(folder)
        values = _values(names)
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{names.distribution}-") as draft:
            written = [_write(Path(draft), place, text, values) for place, text in _templates()]
            _move(Path(draft), folder)
    except OSError as error:
        raise KvCacheError(f"cannot write {str(folder)!r}: {error}") from error
    return sorted(written)


def _require_new_or_empty(folder: Path) -> None:
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise KvCacheError(f"there is no directory {str(parent)!r}; make it first, or choose another")
    if folder.is_symlink() and not folder.exists():
        raise KvCacheError(f"{str(folder)!r} is a link to nothing; choose a new or an empty directory")
    if folder.exists() and not folder.is_dir():
        raise KvCacheError(f"{str(folder)!r} is a file; choose a new or an empty directory")
    if folder.is_dir() and any(folder.iterdir()):
        raise KvCacheError(f"{str(folder)!r} is not empty; choose a new or an empty directory")


def _values(names: BackendNames) -> dict[str, str]:
    requirement = _core_requirement(_compat.core_version())
    return {
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "class_name": names.class_name,
        "group": ENTRY_POINT_GROUP,
        "interface": repr(INTERFACE_VERSION),
        "core_requirement": f"{_CORE}{requirement}",
        "core_testing_requirement": f"{_CORE}[testing]{requirement}",
    }


def _core_requirement(version: str) -> str:
    """The versions of core that go with the one that is installed; any where that is unknown."""
    numbers = version.split(".")
    if len(numbers) < len(("major", "minor")) or not all(part.isdecimal() for part in numbers[:2]):
        return ""
    major, minor = numbers[:2]
    return f">={major}.{minor},<{int(major) + 1}"


def _templates() -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path of every file of the distribution, and its template."""
    yield from _below(files("kvcache_core") / "templates" / "backend", PurePosixPath())


def _below(folder: Traversable, place: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _below(item, place / item.name)
        elif item.name.endswith(_SUFFIX):
            name = item.name.removesuffix(_SUFFIX)
            yield place / (".gitignore" if name == "gitignore" else name), item.read_text(encoding="utf-8")


def _write(draft: Path, place: PurePosixPath, text: str, values: Mapping[str, str]) -> Path:
    parts = (values["package"] if part == "package" else part for part in place.parts)
    relative = Path(*parts)
    target = draft / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(Template(text).substitute(values), encoding="utf-8", newline="\n")
    return relative


def _move(draft: Path, folder: Path) -> None:
    """Move what was written to its place; what had been moved is taken away again when that fails."""
    made = not folder.exists()
    if made:
        folder.mkdir()
    moved: list[Path] = []
    try:
        for item in draft.iterdir():
            moved.append(folder / item.name)
            os.rename(item, folder / item.name)
    except BaseException:
        for item in moved:
            shutil.rmtree(item, ignore_errors=True) if item.is_dir() else item.unlink(missing_ok=True)
        if made:
            folder.rmdir()
        raise
