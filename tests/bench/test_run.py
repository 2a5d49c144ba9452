import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

from kvcache_core import ConfigError, UnsupportedError
from kvcache_core.bench import suites
from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.run import SUITES, run_suites
from kvcache_core.bench.session import Bench


def suite(monkeypatch: pytest.MonkeyPatch, name: str, measure: object) -> None:
    module = ModuleType(f"kvcache_core.bench.suites.{name}")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_unknown_suite_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"no suite 'forks'; choose from .*append.*fork"):
        run_suites(["append", "forks"], Bench())


def test_a_suite_that_cannot_run_is_noted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, series = Figure(name="a", value=1.0, unit="x"), Series(name="b", x="x", y="y")

    def refuse(bench: Bench) -> list[Figure]:
        raise UnsupportedError("only on Linux", capability="pages")

    suite(monkeypatch, "append", refuse)
    suite(monkeypatch, "fork", lambda bench: [figure, series])
    report = run_suites(["append", "fork"], Bench())
    assert report.skipped == {"append": "only on Linux"}
    assert (report.figures, report.series) == ({"fork": [figure]}, {"fork": [series]})


def test_a_report_names_the_machine_and_the_peers_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_core.bench.machine.PEERS", {"no-such-peer": ("no_such_peer", "its cache")})
    report = run_suites([], Bench()).as_dict()
    assert report["missing_peers"] == {"no-such-peer": "its cache"}
    assert {"date", "processor", "cores", "torch_threads", "python", "versions"} <= set(report["machine"])
    assert "torch" in report["machine"]["versions"]


def test_every_suite_has_a_module_and_every_module_a_suite() -> None:
    assert sorted(SUITES.values()) == sorted(module.name for module in pkgutil.iter_modules(suites.__path__))
    for name in SUITES.values():
        assert callable(importlib.import_module(f"{suites.__name__}.{name}").measure)
