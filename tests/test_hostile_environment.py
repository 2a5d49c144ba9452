"""Everything at once: an environment full of damage, in which the one good backend must still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_core.plugin import ENTRY_POINT_GROUP
from tests.plugin_site import Site

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hostile(site: Site) -> Site:
    """Damaged neighbours, and plugins that are broken in every way."""
    site.distribution("", None, metadata=None, directory="-.dist-info")
    site.distribution("half", None, metadata=None)
    site.distribution("unrelated", "[console_scripts]\nno equals sign\n")
    site.distribution("latin", b"[console_scripts]\ncaf\xe9 = y:z\n")
    site.distribution("ghost", {"ghost": "ghost.plugin"}, directory="~host-1.0.dist-info")
    site.distribution("nameless", {"nameless": "x.plugin"}, metadata="Version: 1\n")
    site.distribution("bytes", f"[{ENTRY_POINT_GROUP}]\nx = x.y\n# ".encode() + b"\xff\n")
    site.distribution("lines", f"[{ENTRY_POINT_GROUP}]\nwhat\nbad name = x.y\nattr = x.y:z\n")
    site.distribution("missing", {"missing": "no_such_module.plugin"})
    site.distribution("kvcache-good", {"good": "kvcache_good.plugin"}, path=site.add_path("earlier"), version="0.1")
    site.plugin("good")
    site.plugin("raising", before="raise OSError('undefined symbol')", priority=1000)
    site.plugin("exiting", before="raise SystemExit(0)")
    site.plugin("dying", probe="lambda request: __import__('os')._exit(3)", priority=-1000)
    site.plugin("newer", interface="(9, 9)")
    site.plugin("hookless")
    site.module("kvcache_hookless.plugin", "pass")
    site.plugin("probing", probe="lambda request: 1 / 0")
    site.plugin("lacking", storage="from kvcache_core.plugin import Storage\nclass Store(Storage): pass")
    site.plugin("shared", dist="first-kv")
    site.plugin("shared", dist="second-kv")
    return site


def kvcache(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a program given as the only argument, in a fresh interpreter."""
    program = arguments[0] if len(arguments) == 1 else "from kvcache_core.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, site.paths), str(ROOT)])},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_list_works(hostile: Site) -> None:
    result = kvcache(hostile, "list", "--json")
    assert result.returncode == 0, result.stderr
    names = {backend["name"] for backend in json.loads(result.stdout)["backends"]}
    assert {"good", "raising", "exiting", "shared"} <= names
    assert not {"ghost", "nameless", "x", "attr"} & names


@pytest.mark.slow
def test_doctor_reports_all_of_it(hostile: Site) -> None:
    result = kvcache(hostile, "doctor", "--json")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    states = {backend["qualified"]: backend["state"] for backend in report["backends"]}
    expected = {
        "dying": "broken",
        "exiting": "broken",
        "good": "available",
        "hookless": "broken",
        "lacking": "incompatible",
        "newer": "incompatible",
        "probing": "broken",
        "raising": "broken",
    }
    assert {name: states[f"kvcache-{name}:{name}"] for name in expected} == expected
    assert states["missing:missing"] == "broken"
    assert states["first-kv:shared"] == states["second-kv:shared"] == "available"
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
