"""The public door: exactly these names, and nothing heavy behind it until it is needed."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache_core
from kvcache_core import plugin

SOURCES = Path(kvcache_core.__file__).parent
HEAVY = {"torch", "numpy", "transformers", "importlib_metadata", "pytest", "hypothesis", "rich", "typer", "click"}

PUBLIC = [
    "AllocationRequest",
    "AmbiguousBackendError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendSkippedWarning",
    "BackendUnavailableError",
    "BlockTable",
    "Budget",
    "CacheConfig",
    "CacheFullError",
    "CacheGcStats",
    "CacheGeometry",
    "CacheHandleStats",
    "CacheManagerStats",
    "ConfigError",
    "ConfigWarning",
    "HandleError",
    "HandleState",
    "IncompatibleBackendError",
    "KvCacheError",
    "KvCacheHandle",
    "KvCacheManager",
    "KvCacheWarning",
    "LayerGroup",
    "LayerSpec",
    "MemoryPressure",
    "MutableBlockTable",
    "NoBackendAvailableError",
    "OptionsError",
    "PrefixCacheConfig",
    "PrefixExplanation",
    "PressureThresholds",
    "ShapeError",
    "Step",
    "StepError",
    "UnknownBackendError",
    "UnsupportedError",
    "WouldCopy",
    "open_cache",
]

FOR_BACKENDS = [
    "Available",
    "BackendDescriptor",
    "BackendOptions",
    "Batch",
    "BlockCopy",
    "BlockRows",
    "CAPABILITIES",
    "CacheGeometry",
    "DeviceMemory",
    "ENTRY_POINT_GROUP",
    "HostInfo",
    "INTERFACE_VERSION",
    "KvCacheHandle",
    "LayerGroup",
    "LayerSpec",
    "Placement",
    "ProbeRequest",
    "ProbeResult",
    "Segment",
    "Storage",
    "StorageSpec",
    "Unavailable",
    "hookimpl",
    "host_memory",
]


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_public_names_are_exactly_these() -> None:
    assert kvcache_core.__all__ == PUBLIC
    assert sorted(kvcache_core.__all__) == kvcache_core.__all__


def test_every_public_name_is_there_and_no_other() -> None:
    modules = {name for _, name, _ in pkgutil.iter_modules(kvcache_core.__path__)}
    visible = {name for name in vars(kvcache_core) if not name.startswith("_")} - modules
    assert visible == set(PUBLIC)


def test_what_backend_authors_import_is_exactly_this() -> None:
    assert sorted(plugin.__all__) == sorted(FOR_BACKENDS)
    assert all(hasattr(plugin, name) for name in plugin.__all__)


def test_public_objects_say_what_they_are_for() -> None:
    for name in PUBLIC:
        assert (getattr(kvcache_core, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("module", ["kvcache_core", "kvcache_core.plugin"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") & HEAVY == set()


def test_bookkeeping_needs_no_torch() -> None:
    statement = (
        "from kvcache_core import AllocationRequest, BlockTable, CacheGeometry; "
        "from kvcache_core.allocator import BlockAllocator; "
        "from kvcache_core.batch import Batch; "
        "from kvcache_core.storage import Storage, StorageSpec; "
        "g = CacheGeometry.uniform(2, 2, 8, dtype='bfloat16'); "
        "AllocationRequest(token_ids=[1, 2]).estimated_memory_bytes(g); "
        "BlockAllocator(4, 16).allocate_blocks(2); BlockTable([1], 3, 16).slot(2)"
    )
    assert loaded_by(statement) & HEAVY == set()


def test_the_package_is_typed() -> None:
    assert (SOURCES / "py.typed").is_file()


def shipped() -> list[Path]:
    return [path for path in sorted(SOURCES.rglob("*.py")) if "testing" not in path.relative_to(SOURCES).parts]


@pytest.mark.parametrize("path", shipped(), ids=lambda path: str(path.relative_to(SOURCES)))
def test_shipped_code_validates_by_errors_and_trusts_no_pickle(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: an assert is gone under -O"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, f"line {node.lineno}"


def test_modules_say_what_is_theirs_to_offer() -> None:
    for _, name, _ in pkgutil.iter_modules(kvcache_core.__path__):
        if name.startswith("_") or name in {"attention", "integrations", "testing", "paged", "cli"}:
            continue
        module = importlib.import_module(f"kvcache_core.{name}")
        assert module.__doc__, name
        offered = module.__all__
        assert len(set(offered)) == len(offered), name
        assert all(hasattr(module, each) for each in offered), name
