"""`kvcache list`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.messages import FIRST_PARTY
from kvcache_core.registry import get_registry
from tests.cli.conftest import Run
from tests.plugin_site import Site


def test_it_lists_what_is_installed_and_what_could_be(run: Run, site: Site) -> None:
    site.plugin("acme", dist="Acme-KV", version="2.1")
    result = run("list")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "BACKEND PROVIDED BY VERSION STATE"
    assert "acme Acme-KV 2.1 installed" in lines
    installed = {entry.name for entry in get_registry().entries()}
    for name, owner in FIRST_PARTY.items():
        missing = f'{name} {owner} not installed: pip install "kvcache-core[{name}]"'
        assert (missing in lines) == (name not in installed)


def test_p28_it_imports_no_plugin(run: Run, site: Site) -> None:
    site.plugin("acme", before="raise AssertionError('imported')")
    assert run("list").exit_code == 0
    assert "kvcache_acme" not in sys.modules


def test_the_json_form_is_stable(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", dist="Acme-KV", package="acme_kv", version="2.1")
    listed = run_json("list")
    assert list(listed) == ["backends", "observers", "damaged"]
    (acme,) = [each for each in listed["backends"] if each["name"] == "acme"]
    assert acme == {
        "name": "acme",
        "qualified": "acme-kv:acme",
        "distribution": "Acme-KV",
        "version": "2.1",
        "location": str(site.path),
        "editable": False,
        "module": "acme_kv.plugin",
        "state": "installed",
        "reason": "",
    }


def test_disabled_and_ambiguous_backends_say_so(
    run_json: Callable[..., Any], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme")
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    monkeypatch.setenv("KVCACHE_DISABLE", "acme")
    states = {each["qualified"]: (each["state"], each["reason"]) for each in run_json("list")["backends"]}
    assert states["kvcache-acme:acme"] == ("disabled", "by 'acme' in environment variable KVCACHE_DISABLE")
    assert states["acme-kv:shared"] == ("ambiguous", "ask for it as acme-kv:shared")


def test_damaged_metadata_is_counted_and_pointed_to(run: Run, site: Site) -> None:
    site.distribution("acme", {"no name": "acme.plugin"})
    result = run("list")
    assert result.exit_code == 0
    assert "1 damaged; see `kvcache doctor`" in result.stderr


def test_nothing_is_cut_off_in_a_pipe(run: Run, site: Site) -> None:
    site.plugin("acme", dist="a-distribution-with-quite-a-long-name-that-does-not-fit-into-eighty-columns")
    assert "a-distribution-with-quite-a-long-name-that-does-not-fit-into-eighty-columns" in run("list").stdout


def test_p30_it_is_quick_and_imports_no_torch(site: Site) -> None:
    site.plugin("acme", before="raise AssertionError('imported')")
    program = "import sys; from kvcache_core.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    path = os.pathsep.join([str(site.path), str(Path(__file__).parents[2])])
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", program, "list"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(time.perf_counter() - start)
        assert result.stdout.endswith("False\n")
    assert min(seconds) < 2.0  # generous, for a busy machine: it takes a fifth of that
