"""Observers from plugins: found in metadata, imported only when named, and loud when they cannot be used."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache_core import CacheGeometry, ConfigError, ConfigWarning, KvCacheManager, KvCacheWarning, open_cache
from kvcache_core.cli.app import app
from kvcache_core.interface import OBSERVER_GROUP
from kvcache_core.registry import BackendRegistry, get_registry
from kvcache_core.report import examine
from tests.plugin_site import Site

LISTENING = """
from kvcache_core.plugin import hookimpl

heard = []

@hookimpl
def kvcache_event(event):
    heard.append(event.name)
"""


def add(site: Site, name: str, source: str = LISTENING, *, dist: str | None = None, also: str = "") -> str:
    """Write a distribution with an observer; return its module."""
    package = (dist or f"kvcache-{name}").replace("-", "_")
    site.distribution(dist or f"kvcache-{name}", f"[{OBSERVER_GROUP}]\n{name} = {package}.observer\n{also}")
    site.module(f"{package}.observer", source)
    return f"{package}.observer"


@pytest.fixture
def registry(site: Site) -> BackendRegistry:
    pytest.importorskip("kvcache_cpu.plugin")
    registry = site.registry()
    registry.register_plugin(importlib.import_module("kvcache_cpu.plugin"))
    return registry


def opened(registry: BackendRegistry, *observers: str, **values: Any) -> KvCacheManager:
    return open_cache(
        backend="cpu", geometry=CacheGeometry.uniform(2, 2, 8), registry=registry, observers=observers, **values
    )


def refused(registry: BackendRegistry, *observers: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        opened(registry, *observers)
    assert caught.value.key == "observers"
    return caught.value


def test_an_observer_that_is_named_hears_everything_and_others_are_not_imported(
    site: Site, registry: BackendRegistry
) -> None:
    module, other = add(site, "acme"), add(site, "other")
    with opened(registry, "acme") as cache:
        cache.allocate().free()
    assert importlib.import_module(module).heard == ["attached", "allocated", "freed", "closed"]
    assert other not in sys.modules


def test_names_are_compared_as_those_of_backends(site: Site, registry: BackendRegistry) -> None:
    module = add(site, "my-observer")
    opened(registry, "My_Observer").close()
    opened(registry, "KVCache.My-Observer:my.observer").close()
    assert importlib.import_module(module).heard == ["attached", "closed"] * 2


def test_the_environment_may_name_them(site: Site, registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    module = add(site, "acme")
    monkeypatch.setenv("KVCACHE_OBSERVERS", "acme")
    open_cache(backend="cpu", geometry=CacheGeometry.uniform(2, 2, 8), registry=registry).close()
    assert importlib.import_module(module).heard == ["attached", "closed"]


def test_an_unknown_one_is_refused_with_a_guess_and_what_there_is(site: Site, registry: BackendRegistry) -> None:
    add(site, "acme")
    error = refused(registry, "amce")
    assert str(error) == "no observer named 'amce' is installed; did you mean 'acme'? (installed: acme)"
    assert str(refused(site.registry(), "zzz")) == "no observer named 'zzz' is installed; (installed: acme)"


def test_two_of_one_name_are_told_apart_by_their_distribution(site: Site, registry: BackendRegistry) -> None:
    first, second = add(site, "acme", dist="first"), add(site, "acme", dist="second")
    assert str(refused(registry, "acme")) == (
        "2 installed distributions provide an observer named 'acme'; write 'first:acme' or 'second:acme'"
    )
    opened(registry, "second:acme").close()
    assert importlib.import_module(second).heard
    assert first not in sys.modules


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('undefined symbol: x')", "OSError: undefined symbol: x"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "HookError: kvcache_acme.observer implements no kvcache_event hook; mark the function with @hookimpl"),
        (LISTENING.replace("kvcache_event", "kvcache_evnet"), "HookError: unknown hook 'kvcache_evnet'"),
        (LISTENING.replace("(event)", "(event, more)"), "HookError: Plugin 'kvcache_acme.observer' for hook"),
    ],
)
def test_one_that_cannot_be_used_is_an_error_with_its_cause(
    source: str, cause: str, site: Site, registry: BackendRegistry
) -> None:
    add(site, "acme", source)
    error = refused(registry, "acme")
    first, detail = str(error).splitlines()
    assert first == ("the observer 'acme' (kvcache-acme 1.0) cannot be used: mend it, or take 'acme' out of observers")
    assert detail.strip().startswith(f"importing kvcache_acme.observer: {cause}")
    assert error.__cause__ is not None


def test_an_interrupt_while_it_is_imported_passes(site: Site, registry: BackendRegistry) -> None:
    add(site, "acme", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        opened(registry, "acme")


def test_one_that_raises_later_is_reported_by_name(site: Site, registry: BackendRegistry) -> None:
    add(site, "acme", LISTENING.replace("heard.append(event.name)", "1 / 0"))
    with pytest.warns(KvCacheWarning, match=r"the observer 'acme' \(kvcache-acme 1\.0\) raised ZeroDivisionError"):
        opened(registry, "acme").close()


def test_a_hook_may_leave_the_event_out_and_one_module_may_have_several(site: Site, registry: BackendRegistry) -> None:
    source = """
    from kvcache_core.plugin import hookimpl
    heard = []
    @hookimpl(specname="kvcache_event")
    def first():
        heard.append("first")
    @hookimpl(specname="kvcache_event")
    def second(event):
        heard.append(event.name)
    """
    module = add(site, "acme", source)
    cache = opened(registry, "acme")
    heard = importlib.import_module(module).heard
    heard.clear()
    cache.allocate().free()
    assert sorted(heard) == ["allocated", "first", "first", "freed"]
    cache.close()


def test_one_that_is_switched_off_is_not_imported(
    site: Site, registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = add(site, "acme")
    monkeypatch.setenv("KVCACHE_DISABLE", "kvcache-acme")
    opened(registry, "acme").close()
    assert module not in sys.modules


def test_a_word_that_switches_nothing_off_still_causes_a_warning(site: Site, registry: BackendRegistry) -> None:
    add(site, "acme")
    with pytest.warns(ConfigWarning, match="names 'amce'"):
        opened(registry, disable=["amce", "acme"]).close()


def test_an_observer_is_no_backend_and_a_backend_no_observer(site: Site) -> None:
    add(site, "acme", also="[kvcache_core.backends]\nfast = kvcache_acme.plugin\n")
    registry = site.registry()
    assert registry.names() == ("fast",)
    assert [(entry.name, entry.module) for entry in registry.observers()] == [("acme", "kvcache_acme.observer")]


def test_problems_of_both_kinds_of_plugin_are_found_once(site: Site, tmp_path: Path) -> None:
    both = "[kvcache_core.backends]\nx = a.b\n[kvcache_core.observers]\ny = a.c\nbad line\n"
    site.distribution("acme", both, version="1.0")
    site.distribution("acme", both, version="2.0", path=site.add_path("earlier"))
    problems = [(problem.code, problem.line) for problem in site.registry().problems]
    assert sorted(problems, key=str) == [("malformed-line", 5), ("malformed-line", 5), ("shadowed", None)]


def test_observers_installed_meanwhile_are_seen_after_a_refresh(site: Site, registry: BackendRegistry) -> None:
    assert registry.observers() == ()
    add(site, "acme")
    assert registry.observers() == ()
    registry.refresh()
    assert [entry.name for entry in registry.observers()] == ["acme"]


# -- what the commands say of them -----------------------------------------------------------------------


def test_doctor_tries_each_in_a_process_of_its_own(site: Site) -> None:
    add(site, "fine")
    add(site, "raising", "raise OSError('no socket')")
    add(site, "leaving", "import os; os._exit(3)")
    add(site, "hidden")
    report = examine(site.registry(), timeout=60, environ={"KVCACHE_DISABLE": "kvcache-hidden"})
    found = {each.name: (each.state, each.code, each.reason) for each in report.observers}
    assert found["fine"] == ("available", None, "")
    assert found["raising"] == ("broken", "OSError", "importing kvcache_raising.observer: OSError: no socket")
    assert found["leaving"][:2] == ("broken", "crashed")
    assert found["hidden"][0] == "disabled"
    assert not report.healthy
    assert list(report.to_json()["observers"][0]) == [
        "name",
        "qualified",
        "distribution",
        "version",
        "location",
        "editable",
        "source",
        "module",
        "state",
        "code",
        "reason",
        "ambiguous",
    ]


def test_list_and_doctor_show_them(site: Site) -> None:
    add(site, "acme", "raise OSError('no socket')", dist="first")
    add(site, "acme", dist="second")
    with get_registry().isolated() as registry:
        registry.refresh()
        run = CliRunner()
        listed = run.invoke(app, ["list"]).stdout
        assert re.search(r"^OBSERVER +PROVIDED BY +VERSION +STATE", listed, re.MULTILINE)
        assert re.search(r"^acme +first +1.0 +ambiguous: ask for it as first:acme", listed, re.MULTILINE)
        names = [each["qualified"] for each in json.loads(run.invoke(app, ["list", "--json"]).stdout)["observers"]]
        assert names == ["first:acme", "second:acme"]
        done = run.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert re.search(r"^acme +broken +first 1.0", done.stdout, re.MULTILINE)
    assert "broken: importing first.observer: OSError: no socket" in done.stdout
