"""`kvcache doctor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.plugin_site import Site


@pytest.fixture(autouse=True)
def without_the_installed_backends(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying the real ones imports torch, which these tests have no use for."""
    monkeypatch.setenv("KVCACHE_DISABLE", "kvcache-cpu, kvcache-cuda, kvcache-metal")


def test_a_healthy_installation(run: Run, site: Site) -> None:
    site.plugin("acme", dist="Acme-KV", version="2.1")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "kvcache-core " in text
    assert f"acme available 1.0 Acme-KV 2.1 ({site.path})" in text
    assert "KVCACHE_DISABLE=kvcache-cpu, kvcache-cuda, kvcache-metal" in text
    assert text.endswith("Nothing is broken.")


def test_a_broken_backend_is_shown_with_its_reason_and_exit_status_1(run: Run, site: Site) -> None:
    site.plugin("acme", before="raise OSError('libfoo.so')")
    result = run("doctor")
    assert result.exit_code == 1
    assert "OSError: libfoo.so" in result.stdout
    assert result.stdout.endswith("Something that is installed is broken.\n")


@pytest.mark.parametrize(
    "fields",
    [{"before": "raise OSError"}, {"interface": "(9, 0)"}, {"before": "import os; os._exit(0)"}],
    ids=["broken", "incompatible", "exits with 0"],
)
def test_anything_broken_makes_the_exit_status_1(
    run_json: Callable[..., Any], site: Site, fields: dict[str, str]
) -> None:
    site.plugin("acme", **fields)
    site.plugin("good")
    report = run_json("doctor", status=1)
    states = {backend["name"]: backend["state"] for backend in report["backends"]}
    assert states["acme"] in ("broken", "incompatible")
    assert states["good"] == "available"
    assert report["healthy"] is False


def test_unreadable_metadata_makes_the_exit_status_1(run: Run, site: Site) -> None:
    folder = site.distribution("acme", {"acme": "not a module"})
    result = run("doctor")
    assert result.exit_code == 1
    assert "broken [bad-value]: acme: acme = 'not a module'" in result.stdout
    assert f"{folder}, line 2" in result.stdout


def test_p06_p09_notes_do_not_make_it_fail(run: Run, site: Site) -> None:
    stale = site.distribution("acme", None, metadata=None)
    result = run("doctor")
    assert result.exit_code == 0
    assert "note [nameless]" in result.stdout
    assert str(stale) in result.stdout


def test_p17_editable_installs_show_their_sources(run: Run, site: Site) -> None:
    package = site.plugin("acme")
    record = '{"url": "file:///src/acme", "dir_info": {"editable": true}}'
    (site.path / f"{package}-1.0.dist-info" / "direct_url.json").write_text(record)
    assert "kvcache-acme 1.0 (editable, /src/acme)" in run("doctor").stdout


def test_p38_ambiguous_names_are_pointed_out(run: Run, site: Site) -> None:
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    result = run("doctor")
    assert result.exit_code == 0
    assert "ask for it as beta-kv:shared" in result.stdout


def test_a_backend_that_hangs_is_reported(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", before="import time; time.sleep(60)")
    report = run_json("doctor", "--timeout", "0.8", status=1)
    (acme,) = [backend for backend in report["backends"] if backend["name"] == "acme"]
    assert (acme["state"], acme["code"]) == ("broken", "timeout")
