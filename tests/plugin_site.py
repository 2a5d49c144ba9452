"""A site directory full of plugins, good and bad, made of real files: `*.dist-info` directories and modules."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from importlib_metadata import DistributionFinder, MetadataPathFinder

from kvcache_core.messages import FIRST_PARTY
from kvcache_core.plugin import ENTRY_POINT_GROUP
from kvcache_core.registry import BackendRegistry

#: A storage that conforms and needs no torch.
STORAGE = """
from kvcache_core.plugin import KvCacheHandle, Storage

class Handle(KvCacheHandle):
    pass

def _unused(*args, **kwargs):
    raise NotImplementedError

members = {name: _unused for name in Storage.__abstractmethods__}
members |= {"placement": "paged", "handle_type": Handle, "dense_is_view": False, "__module__": __name__}
Store = type("Store", (Storage,), members)
"""


class PathsFinder:
    """Finds the distributions of some directories only, and counts how often it is asked."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self.calls = 0

    def find_distributions(self, context: Any) -> Iterable[Any]:
        self.calls += 1
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(path=[str(p) for p in self.paths]))


class Site:
    """Directories on `sys.path` that hold the plugins of one test."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self.paths: list[Path] = []
        self.path = self.add_path("site")
        self._set_real_backends_aside()

    def _set_real_backends_aside(self) -> None:
        """Have a backend of this site imported although an installed one of its name was before."""
        packages = {distribution.replace("-", "_") for distribution in FIRST_PARTY.values()}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            self._monkeypatch.delitem(sys.modules, name)

    def add_path(self, name: str) -> Path:
        """A further directory, before all others."""
        path = self._root / name
        path.mkdir()
        self.paths.insert(0, path)
        self._monkeypatch.syspath_prepend(str(path))
        return path

    def registry(self) -> BackendRegistry:
        """A registry that sees this site and nothing else."""
        return BackendRegistry(finders=[PathsFinder(self.paths)])

    def distribution(
        self,
        name: str,
        entry_points: str | bytes | Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        metadata: str | bytes | None = "",
        directory: str | None = None,
        path: Path | None = None,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Write a distribution's metadata directory.

        Args:
            name: Its name.
            entry_points: The text of entry_points.txt, or the lines of our group.
            version: Its version.
            metadata: The text of METADATA when it is not the usual one; None for no such file.
            directory: The metadata directory's name when it is not the usual one.
            path: The directory to install into.
            files: Further files of the metadata directory.
        """
        stem = name.replace("-", "_")
        folder = (path or self.path) / (directory or f"{stem}-{version}.dist-info")
        folder.mkdir()
        if metadata == "":
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if isinstance(entry_points, Mapping):
            lines = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
            entry_points = f"[{ENTRY_POINT_GROUP}]\n{lines}\n"
        for file, content in {"METADATA": metadata, "entry_points.txt": entry_points, **files}.items():
            if content is not None:
                (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    def module(self, name: str, source: str, path: Path | None = None) -> Path:
        """Write a module, with the packages around it."""
        *packages, last = name.split(".")
        folder = path or self.path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        file = folder / f"{last}.py"
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        return file

    def plugin(
        self,
        name: str,
        *,
        dist: str | None = None,
        version: str = "1.0",
        before: str = "",
        storage: str = STORAGE,
        path: Path | None = None,
        package: str | None = None,
        **fields: Any,
    ) -> str:
        """Write a whole plugin: distribution, plugin module and storage module.

        Args:
            name: The backend's name.
            dist: The distribution's name; `kvcache-NAME` by default.
            version: The distribution's version.
            before: Source to run before the plugin module declares its backend.
            storage: Source of the storage module.
            path: The directory to install into.
            package: The import package.
            **fields: Fields of the descriptor, as source text.

        Returns:
            The import package.
        """
        dist = dist or f"kvcache-{name}"
        package = package or dist.replace("-", "_")
        self.distribution(dist, {name: f"{package}.plugin"}, version=version, path=path)
        self.module(f"{package}.plugin", declaration(name, package, before=before, **fields), path)
        self.module(f"{package}.storage", storage, path)
        return package

    def forget_modules(self) -> None:
        """Take the modules of this site out of `sys.modules`."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(str(self._root)):
                del sys.modules[name]


def declaration(name: str, package: str, *, before: str = "", names: Sequence[str] = (), **fields: Any) -> str:
    """Source of a plugin module that declares one backend, or one for each of `names`."""
    arguments = {
        "interface": "(1, 0)",
        "storage": f"'{package}.storage:Store'",
        "summary": "'a backend for tests'",
        "placement": "'paged'",
        "devices": "('cpu',)",
        "dtypes": "('float32', 'float16')",
        "probe": "lambda request: Available(device='cpu')",
        **fields,
    }
    declared = ",\n        ".join(
        f"BackendDescriptor(name={each!r}, {', '.join(f'{key}={value}' for key, value in arguments.items())})"
        for each in names or [name]
    )
    return (
        "from kvcache_core.plugin import *\n"
        f"{textwrap.dedent(before)}\n"
        "@hookimpl\n"
        "def kvcache_backends(host):\n"
        f"    return [{declared}]\n"
    )
