"""Everything at once: an environment full of damage, in which the one good backend must still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import add_damage, add_deadly_plugins
from tests.plugin_site import Site

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hostile(site: Site) -> Site:
    """Damaged neighbours, and plugins that are broken in every way."""
    add_damage(site)
    return site


@pytest.fixture
def deadly(hostile: Site) -> Site:
    """The same, and plugins that take the process with them, or the name of the CPU backend."""
    pytest.importorskip("kvcache_cpu.plugin")
    add_deadly_plugins(hostile)
    return hostile


def kvcache(site: Site, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a program given as the only argument, in a fresh interpreter."""
    program = arguments[0] if len(arguments) == 1 else "from kvcache_core.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join([*map(str, site.paths), str(ROOT)])},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_list_works(hostile: Site) -> None:
    result = kvcache(hostile, "list", "--json")
    assert result.returncode == 0, result.stderr
    names = {backend["name"] for backend in json.loads(result.stdout)["backends"]}
    assert {"good", "edited", "zipped", "raising", "exiting", "shared"} <= names
    assert not {"ghost", "nameless", "x", "attr"} & names


@pytest.mark.slow
def test_doctor_reports_all_of_it(hostile: Site) -> None:
    result = kvcache(hostile, "doctor", "--json")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    states = {backend["qualified"]: backend["state"] for backend in report["backends"]}
    expected = {
        "dying": "broken",
        "edited": "available",
        "exiting": "broken",
        "good": "available",
        "hookless": "broken",
        "lacking": "incompatible",
        "newer": "incompatible",
        "probing": "broken",
        "raising": "broken",
        "zipped": "available",
    }
    assert {name: states[f"kvcache-{name}:{name}"] for name in expected} == expected
    assert states["missing:missing"] == "broken"
    assert states["first-kv:shared"] == states["second-kv:shared"] == "available"
    assert [(observer["name"], observer["state"]) for observer in report["observers"]] == [("listener", "broken")]
    codes = {problem["code"] for problem in report["problems"]}
    assert codes == {"nameless", "not-utf8", "leftover", "malformed-line", "bad-name", "bad-value", "shadowed"}


def test_a_good_backend_is_chosen_by_name_with_no_word_about_the_others(hostile: Site) -> None:
    program = (
        "from kvcache_core.config import CacheConfig; from kvcache_core.selection import choose\n"
        "print(choose(CacheConfig(backend='good'), load=False).backend.label)"
    )
    result = kvcache(hostile, program)
    assert result.stdout == "'good' (kvcache-good 0.1)\n"
    assert "Skipped" not in result.stderr


@pytest.mark.slow
def test_the_cpu_backend_runs_although_damaged_metadata_would_break_the_import_of_torch(hostile: Site) -> None:
    pytest.importorskip("kvcache_cpu.plugin")
    broken = kvcache(hostile, "import torch")
    assert "UnicodeDecodeError" in broken.stderr or "TypeError" in broken.stderr
    program = (
        "from kvcache_core import CacheGeometry, open_cache\n"
        "with open_cache(backend='cpu', geometry=CacheGeometry.uniform(2, 2, 8)) as cache:\n"
        "    print(cache.stats().total_blocks)"
    )
    result = kvcache(hostile, program)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1000\n"
    assert "installed metadata is damaged" in result.stderr


def test_auto_finds_its_way_and_names_each_broken_plugin_once(hostile: Site) -> None:
    program = (
        "from kvcache_core.config import CacheConfig; from kvcache_core.selection import choose\n"
        "print(choose(CacheConfig(disable=['kvcache-cpu'])).backend.name)"
    )
    result = kvcache(hostile, program)
    assert result.stdout == "good\n", result.stderr
    for name in ("raising", "exiting", "hookless", "missing"):
        assert result.stderr.count(f"BackendSkippedWarning: '{name}' ") == 1


@pytest.mark.parametrize("name", ["edited", "zipped"])
def test_an_editable_install_and_one_in_a_zip_file_are_chosen_like_any_other(name: str, hostile: Site) -> None:
    program = (
        "from kvcache_core.config import CacheConfig; from kvcache_core.selection import choose\n"
        f"print(choose(CacheConfig(backend={name!r})).backend.label)"
    )
    assert kvcache(hostile, program).stdout == f"'{name}' (kvcache-{name} 1.0)\n"


def test_a_broken_observer_that_nobody_names_is_never_imported(hostile: Site) -> None:
    program = "import sys; from kvcache_core.registry import get_registry\nprint(*get_registry().observers())\n"
    result = kvcache(hostile, program + "print('broken_observer' in sys.modules)")
    assert "listener" in result.stdout
    assert result.stdout.endswith("False\n")


def test_p19_nothing_is_written_to_disk(hostile: Site, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    before = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    for arguments in (("list",), ("show", "good")):
        kvcache(hostile, *arguments, HOME=str(home), XDG_CACHE_HOME=str(home), TMPDIR=str(home))
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before


def test_deadly_plugins_are_listed_like_others(deadly: Site) -> None:
    result = kvcache(deadly, "list", "--json")
    assert result.returncode == 0, result.stderr
    states = {backend["qualified"]: backend["state"] for backend in json.loads(result.stdout)["backends"]}
    assert states["kvcache-hanging:hanging"] == states["kvcache-leaving:leaving"] == "installed"
    assert states["evil-cpu:cpu"] == states["kvcache-cpu:cpu"] == "ambiguous"


@pytest.mark.slow
def test_doctor_outlives_plugins_that_hang_or_end_the_process(deadly: Site) -> None:
    result = kvcache(deadly, "doctor", "--json", "--timeout", "20")
    assert result.returncode == 1, result.stderr
    found = {backend["qualified"]: backend for backend in json.loads(result.stdout)["backends"]}
    assert (found["kvcache-hanging:hanging"]["state"], found["kvcache-hanging:hanging"]["code"]) == (
        "broken",
        "timeout",
    )
    assert (found["kvcache-leaving:leaving"]["state"], found["kvcache-leaving:leaving"]["code"]) == (
        "broken",
        "crashed",
    )
    assert found["kvcache-edited:edited"]["editable"]
    assert found["kvcache-zipped:zipped"]["state"] == "available"
    assert found["kvcache-cpu:cpu"]["state"] == "available"
    assert found["kvcache-cpu:cpu"]["ambiguous"]


CHOOSE_CPU = (
    "from kvcache_core.config import CacheConfig; from kvcache_core.selection import choose\n"
    "print(choose(CacheConfig(backend={0!r}), load=False).backend.qualified)"
)


@pytest.mark.parametrize(
    ("asked", "environ"),
    [("kvcache-cpu:cpu", {}), ("cpu", {"KVCACHE_DISABLE": "evil-cpu"})],
    ids=["by its full name", "with the other hidden"],
)
def test_cpu_is_chosen_beside_a_claimant_of_its_name(asked: str, environ: dict[str, str], deadly: Site) -> None:
    result = kvcache(deadly, CHOOSE_CPU.format(asked), **environ)
    assert result.stdout == "kvcache-cpu:cpu\n", result.stderr


def test_the_bare_name_is_refused_with_both_claimants_and_a_way_out(deadly: Site) -> None:
    result = kvcache(deadly, CHOOSE_CPU.format("cpu"))
    assert "AmbiguousBackendError: 2 installed distributions provide a backend named 'cpu'" in result.stderr
    assert 'backend="kvcache-cpu:cpu"' in result.stderr
    assert 'backend="evil-cpu:cpu"' in result.stderr
