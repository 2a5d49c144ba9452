"""The public door: exactly these names, and nothing heavy behind it until it is needed."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import kvcache_core
from tests.api_listing import FROZEN, MODULES, listing

SOURCES = Path(kvcache_core.__file__).parent
HEAVY = {"torch", "numpy", "transformers", "importlib_metadata", "pytest", "hypothesis", "rich", "typer", "click"}

HOW_TO_ANNOUNCE = """
The public API has changed. If that is meant:
  1. python -m tests.api_listing        (writes tests/public_api.txt anew; commit it)
  2. add a line to CHANGELOG.md that says what changes for whom; a removal or a new duty waits for the next major.
What differs:
"""


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_api_is_as_announced() -> None:
    announced, found = FROZEN.read_text(encoding="utf-8").splitlines(), listing().splitlines()
    if found != announced:
        diff = difflib.unified_diff(announced, found, "announced", "found", lineterm="", n=1)
        pytest.fail(HOW_TO_ANNOUNCE + "\n".join(diff), pytrace=False)


def test_the_announcement_has_every_name_that_is_offered() -> None:
    lines = FROZEN.read_text(encoding="utf-8").splitlines()
    for module in MODULES:
        start = lines.index(f"# {module}") + 1
        section = lines[start : lines.index("", start)]
        names = [re.sub(r"^(class|def) ", "", line) for line in section if not line.startswith(" ")]
        offered = importlib.import_module(module).__all__
        assert [re.split(r"\W", name)[0] for name in names] == sorted(offered), module
        assert len(set(offered)) == len(offered), module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def before(a: int, *, b: str = 'x') -> None: ...", "def before(a: int, *, b: str = 'y') -> None: ..."),
        ("def before(a: int) -> None: ...", "def before(b: int) -> None: ..."),
        ("def before(a: int) -> None: ...", "def before(a: int = 0) -> None: ..."),
        ("class before:\n    def do(self): ...", "class before:\n    def did(self): ..."),
        ("class before:\n    def do(self): ...", "class before(Exception):\n    def do(self): ..."),
        ("@dataclass\nclass before:\n    a: int", "@dataclass\nclass before:\n    a: int = 0"),
        ("@dataclass\nclass before:\n    a: int", "@dataclass\nclass before:\n    a: str"),
        ("before = 1", "before = 2"),
    ],
)
def test_the_listing_notices_a_change(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(source: str) -> str:
        module = types.ModuleType("kvcache_core.made_up")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec("from __future__ import annotations\nfrom dataclasses import dataclass\n" + source, vars(module))
        vars(module)["__all__"] = ["before"]
        return listing((module.__name__,))

    assert listed(before) != listed(after)
    assert listed(before) == listed(before)


def test_public_names_are_sorted_and_no_other_shows() -> None:
    assert dir(kvcache_core) == kvcache_core.__all__ == sorted(kvcache_core.__all__)
    with pytest.raises(AttributeError, match="'kvcache_core' has no attribute 'KvCacheManger'"):
        _ = kvcache_core.KvCacheManger  # type: ignore[attr-defined]


def test_type_checkers_are_told_the_same_homes_of_the_public_names() -> None:
    tree = ast.parse((SOURCES / "__init__.py").read_text(encoding="utf-8"))
    told = {
        alias.name: str(node.module).removeprefix("kvcache_core.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvcache_core.")
        for alias in node.names
    }
    assert told == kvcache_core._HOMES
    assert sorted(told) == kvcache_core.__all__


def test_public_objects_say_what_they_are_for() -> None:
    for name in kvcache_core.__all__:
        assert (getattr(kvcache_core, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("module", ["kvcache_core", "kvcache_core.plugin"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") & HEAVY == set()


def test_importing_the_package_loads_nothing_at_all_and_listing_backends_no_model() -> None:
    assert loaded_by("import kvcache_core") & {"pydantic", "pluggy", "dataclasses", "logging"} == set()
    listing_backends = "from kvcache_core.registry import get_registry; get_registry().entries()"
    assert loaded_by(listing_backends) & {"pydantic", "pluggy", "torch"} == set()


def test_a_plugins_module_does_not_bring_in_configurations_and_their_models() -> None:
    code = "import sys, kvcache_core.plugin; print(sorted(name for name in sys.modules if 'kvcache_core' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"kvcache_core.config", "kvcache_core.manager", "kvcache_core.events"} & set(
        ast.literal_eval(done.stdout)
    )


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
        if name.startswith("_") or name in {"attention", "bench", "integrations", "testing", "paged", "cli"}:
            continue
        module = importlib.import_module(f"kvcache_core.{name}")
        assert module.__doc__, name
        offered = module.__all__
        assert len(set(offered)) == len(offered), name
        assert all(hasattr(module, each) for each in offered), name
