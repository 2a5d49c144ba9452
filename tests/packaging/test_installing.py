"""The wheels, installed into environments of their own: alone, with plugins, in unequal versions, and taken away."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvcache_core.messages import FIRST_PARTY
from tests.packaging.environments import ROOT, Environment

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

Builder = Callable[[Path], Path]
CPU = ROOT / "plugins" / "cpu"
CORE_NEEDS = ("importlib-metadata", "pluggy", "pydantic", "rich", "tomli; python_version < '3.11'", "typer", "pip")
PLUGINS_NEED = (*CORE_NEEDS, "torch", "hatchling", "editables")
OPEN = (
    "from kvcache_core import CacheGeometry, open_cache\n"
    "with open_cache(backend='auto', geometry=CacheGeometry.uniform(2, 2, 8)) as cache:\n"
    "    cache.allocate(num_tokens=3).free()\n"
    "    print(cache.backend, cache.audit())\n"
)


def say(environment: Environment, program: str, *, status: int = 0) -> str:
    """What a program prints, or fails with, in isolated mode: no folder and no variable can lend it the checkout."""
    done = environment.run("python", "-I", "-c", program, status=status)
    return done.stderr if status else done.stdout


@pytest.fixture
def alone(tmp_path: Path, wheel: Builder) -> Environment:
    """Core, and what it needs."""
    made = Environment(tmp_path / "alone", CORE_NEEDS)
    made.run("pip", "install", "--quiet", wheel(ROOT))
    return made


def changed(project: Path, folder: Path, **replacements: tuple[str, str]) -> Path:
    """A copy of a project with other text in some of its files, each named by its stem."""
    copy = folder / project.name
    shutil.copytree(
        project, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so", "benchmarks", "examples", "plugins")
    )
    for stem, (old, new) in replacements.items():
        found = [path for path in copy.rglob(f"{stem}.*") if path.suffix in (".py", ".toml")]
        file = min(found, key=lambda path: len(path.parts))  # the project's own, not a template's or an example's
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1
        file.write_text(text.replace(old, new), encoding="utf-8")
    return copy


# -- core alone ------------------------------------------------------------------------------------------


def test_core_alone_imports_lists_nothing_and_says_how_to_get_a_backend(alone: Environment) -> None:
    where = say(alone, "import kvcache_core; print(kvcache_core.__file__)")
    assert where.startswith(str(alone.folder)), "the checkout was imported"
    program = (
        "import sys; from kvcache_core import *; from kvcache_core.registry import get_registry;"
        "print('torch' in sys.modules, get_registry().names())"
    )
    assert say(alone, program) == "False ()\n"
    assert "NoBackendAvailableError: no KV-cache backend can run on this machine" in (
        said := say(alone, OPEN, status=1)
    )
    assert re.search(r'cpu +not installed +pip install "kvcache-core\[cpu\]"', said)
    assert alone.run("kvcache", "doctor", "--json").stdout.startswith('{\n  "healthy": true')
    assert "No broken requirements" in alone.run("pip", "check").stdout


def test_the_kit_without_pytest_is_one_clear_error(alone: Environment) -> None:
    said = say(alone, "import kvcache_core.testing", status=1)
    assert said.count("Traceback") == 1
    assert re.search(r"pip install .kvcache-core\[testing\].$", said.strip())


# -- with plugins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", FIRST_PARTY)
def test_each_extra_brings_its_plugin_which_can_be_described(extra: str, tmp_path: Path, wheelhouse: Path) -> None:
    project = (ROOT / "plugins" / extra / "pyproject.toml").read_text(encoding="utf-8")
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    others = [each for each in re.findall(r'"([^"]+)"', needed) if not each.startswith("kvcache-")]
    try:
        environment = Environment(tmp_path / "environment", [*PLUGINS_NEED, *others])
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name}, which the plugin needs, is not installed here")
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, f"kvcache-core[{extra}]")
    assert "No broken requirements" in environment.run("pip", "check").stdout
    program = (
        "import sys; from kvcache_core.registry import get_registry; registry = get_registry();"
        f"print(registry.names(), registry.describe({extra!r}).label, 'torch' in sys.modules)"
    )
    assert say(environment, program) == f"('{extra}',) '{extra}' (kvcache-{extra} 0.1.0) False\n"


def test_the_cpu_backend_is_chosen_runs_and_leaves_nothing_behind(tmp_path: Path, wheelhouse: Path) -> None:
    environment = Environment(tmp_path / "environment", PLUGINS_NEED)
    before = set(environment.site_packages().iterdir())
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, "kvcache-core[cpu]")
    assert say(environment, OPEN) == "cpu ()\n"
    environment.run("pip", "uninstall", "--quiet", "--yes", "kvcache-cpu")
    assert "NoBackendAvailableError" in say(environment, OPEN, status=1)
    environment.run("pip", "uninstall", "--quiet", "--yes", "kvcache-core")
    assert set(environment.site_packages().iterdir()) == before


def test_a_plugin_whose_core_was_taken_away_harms_nobody_and_works_again_with_a_new_one(
    tmp_path: Path, wheelhouse: Path, wheel: Builder
) -> None:
    environment = Environment(tmp_path / "environment", PLUGINS_NEED)
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, "kvcache-core[cpu]")
    environment.run("pip", "uninstall", "--quiet", "--yes", "kvcache-core")
    assert say(environment, "from importlib.metadata import entry_points; print(len(entry_points()) > 0)") == "True\n"
    assert "No module named 'kvcache_core'" in say(environment, "import kvcache_cpu.plugin", status=1)
    environment.run("pip", "install", "--quiet", wheel(ROOT))
    assert say(environment, OPEN) == "cpu ()\n"


# -- unequal versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interface", "words", "advice"),
    [
        ("(0, 9)", "implements interface 0.9, this kvcache-core 0.1.0 needs 1.x", 'pip install -U "kvcache-core[cpu]"'),
        ("(2, 0)", "implements interface 2.0, this kvcache-core 0.1.0 needs 1.x", "pip install -U kvcache-core"),
    ],
    ids=["older plugin", "newer plugin"],
)
def test_a_plugin_for_another_interface_is_told_apart_before_torch_is_imported(
    interface: str, words: str, advice: str, tmp_path: Path, alone: Environment, wheel: Builder
) -> None:
    project = changed(CPU, tmp_path, plugin=("interface=(1, 0)", f"interface={interface}"))
    alone.run("pip", "install", "--quiet", "--no-deps", wheel(project))  # torch is not even there
    said = say(alone, OPEN.replace("auto", "cpu"), status=1)
    assert f"IncompatibleBackendError: backend 'cpu' (kvcache-cpu 0.1.0) {words}" in said
    assert advice in said
    assert '"state": "incompatible"' in alone.run("kvcache", "doctor", "--json", status=1).stdout


def test_upgrading_core_alone_past_the_range_is_a_conflict_for_pip_and_works_while_the_interface_is_the_same(
    tmp_path: Path, wheelhouse: Path, wheel: Builder
) -> None:
    environment = Environment(tmp_path / "environment", PLUGINS_NEED)
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, "kvcache-core[cpu]")
    newer = changed(ROOT, tmp_path / "newer", pyproject=('version = "0.1.0"', 'version = "1.0.0"'))
    environment.run("pip", "install", "--quiet", wheel(newer))
    assert "kvcache-cpu 0.1.0 has requirement kvcache-core" in environment.run("pip", "check", status=1).stdout
    assert say(environment, OPEN) == "cpu ()\n"


def test_of_two_versions_on_the_path_the_first_counts_and_doctor_tells_of_the_other(
    tmp_path: Path, wheelhouse: Path, wheel: Builder
) -> None:
    environment = Environment(tmp_path / "environment", PLUGINS_NEED)
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, "kvcache-core[cpu]")
    older = changed(CPU, tmp_path, pyproject=('version = "0.1.0"', 'version = "0.0.9"'))
    target = tmp_path / "target"
    environment.run("pip", "install", "--quiet", "--no-deps", "--target", target, wheel(older))
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r}); from kvcache_core.registry import get_registry;"
        "registry = get_registry(); print(registry.describe('cpu').label, [p.code for p in registry.problems])"
    )
    assert say(environment, program) == "'cpu' (kvcache-cpu 0.0.9) ['shadowed']\n"


def test_an_editable_install_is_seen_as_one(tmp_path: Path, wheelhouse: Path) -> None:
    environment = Environment(tmp_path / "environment", PLUGINS_NEED)
    project = changed(CPU, tmp_path)
    environment.run("pip", "install", "--quiet", "--find-links", wheelhouse, "kvcache-core", "-e", project)
    assert f"kvcache-cpu 0.1.0 (editable, {project})" in environment.run("kvcache", "doctor").stdout
    assert say(environment, OPEN) == "cpu ()\n"
