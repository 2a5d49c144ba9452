"""`kvcache conformance`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvcache_core import child
from kvcache_core.conformance import run_kit
from tests.cli.conftest import Run
from tests.plugin_site import Site

#: A right storage, to begin wrong ones with.
STORAGE = """
import os, signal, sys, time
from kvcache_core.paged import PagedStorage
from kvcache_core.plugin import DeviceMemory

class Store(PagedStorage):
    @classmethod
    def device_memory(cls, device, options):
        return DeviceMemory(total=1 << 30, free=1 << 30)
"""
CAPABLE = {"capabilities": "{'unequal_head_dims'}", "dtypes": "('bfloat16', 'float8_e5m2', 'float32')"}
FEW = "test_begin_reserves_for_all_handles_or_for_none or test_truncate_gives_back_reserved_room"


def wrong(method: str, body: str) -> str:
    """A storage of which one method runs `body` first."""
    lines = (
        "",
        f"def {method}(self, *args, **kwargs):",
        f"    {body}",
        f"    return super().{method}(*args, **kwargs)",
    )
    return STORAGE + "\n    ".join(lines)


@pytest.mark.slow
def test_a_backend_that_conforms(run: Run, site: Site) -> None:
    site.plugin("acme", storage=STORAGE, version="2.1", **CAPABLE)
    result = run("conformance", "acme", "-k", FEW)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "backend      kvcache-acme:acme, kvcache-acme 2.1\n" in text
    assert "dtypes       float32, bfloat16 (not tried: float8_e5m2)\n" in text
    assert "block sizes  1, 2, 4, 16\n" in text
    assert "capabilities unequal_head_dims\n" in text
    assert "Step      1" in text
    assert "2 passed, 0 failed, 0 skipped" in text
    assert text.endswith("kvcache-acme:acme conforms.\n")


@pytest.mark.slow
def test_the_json_is_stable(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", storage=STORAGE, block_sizes="(8, 2, 32)", default_block_size="8", **CAPABLE)
    report = run_json("conformance", "acme", "-k", FEW)
    tests, groups = report.pop("tests"), report.pop("groups")
    assert report.pop("seconds") > 0
    assert report == {
        "conforms": True,
        "backend": "kvcache-acme:acme",
        "distribution": "kvcache-acme 1.0",
        "device": "cpu",
        "dtypes": ["float32", "bfloat16"],
        "untried_dtypes": ["float8_e5m2"],
        "block_size": 2,
        "block_sizes": [2, 8, 32],
        "capabilities": ["unequal_head_dims"],
        "round_trip_error": 0.0,
        "options": {},
        "passed": 2,
        "failed": 0,
        "skipped": 0,
        "planned": 2,
        "ending": None,
    }
    assert [(group["name"], group["passed"]) for group in groups] == [("Step", 1), ("Truncate", 1)]
    assert all(group["summary"].endswith(".") for group in groups)
    assert tests[0].keys() == {"name", "group", "outcome", "seconds", "reason", "details"}
    assert [test["outcome"] for test in tests] == ["passed", "passed"]


@pytest.mark.slow
def test_a_failure_shows_what_was_found_and_exits_with_1(run: Run, site: Site) -> None:
    storage = wrong("write", "args = (args[0], args[1], args[2] * 0, args[3])")
    site.plugin("acme", storage=storage, **CAPABLE)
    result = run("conformance", "acme", "-k", "stores_a_whole_step")
    assert result.exit_code == 1
    assert "failed: Append: test_append_stores_a_whole_step_in_one_call" in result.stdout
    assert "keys of" in result.stdout  # the assertion's own words
    assert result.stdout.endswith("kvcache-acme:acme does not conform.\n")


@pytest.mark.slow
def test_a_failing_assertion_shows_its_values(run_json: Callable[..., Any], site: Site) -> None:
    storage = f"{STORAGE}\n    capabilities = frozenset({{'unequal_head_dims', 'export.acme'}})\n"
    site.plugin("acme", storage=storage, **CAPABLE)
    (test,) = run_json("conformance", "acme", "-k", "declared_capabilities", status=1)["tests"]
    assert test["outcome"] == "failed"
    assert "export.acme" in test["reason"]
    assert "handle.py" in test["details"]


@pytest.mark.slow
def test_what_is_not_declared_is_skipped_with_that_reason(run: Run, site: Site) -> None:
    storage = f"{STORAGE}\n    capabilities = frozenset()\n"
    site.plugin("acme", storage=storage)
    result = run("conformance", "acme", "-k", "different_head_dims or gives_back_reserved_room")
    assert result.exit_code == 0
    assert "capabilities none beyond the contract\n" in result.stdout
    assert "skipped 1: the backend does not declare the capability 'unequal_head_dims'\n" in result.stdout
    assert "1 passed, 0 failed, 1 skipped" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "timeout", "ending"),
    [
        ("os._exit(0)", "600", "ended with status 0 in test_"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "600", "was killed by SIGSEGV in test_"),
        ("time.sleep(600)", "1", "gives_back_reserved_room took more than 1 seconds"),
    ],
    ids=["exits", "crashes", "hangs"],
)
def test_a_backend_that_does_not_come_back_is_reported(
    run: Run, site: Site, body: str, timeout: str, ending: str
) -> None:
    site.plugin("acme", storage=wrong("reserve", body), **CAPABLE)
    result = run("conformance", "acme", "-k", "gives_back_reserved_room", "--timeout", timeout)
    assert result.exit_code == 1
    assert "It ended early, after 0 of 1 tests: " in result.stdout
    assert ending in result.stdout


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_behind(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme", storage=wrong("reserve", "time.sleep(600)"), **CAPABLE)
    started: list[Any] = []
    start = child.start
    monkeypatch.setattr(child, "start", lambda *args, **kwargs: started.append(start(*args, **kwargs)) or started[0])

    def interrupt(done: int, planned: int, test: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_kit("acme", options={}, select="gives_back", progress=interrupt, registry=site.registry())
    assert started[0].wait(10) == -signal.SIGKILL


@pytest.mark.slow
def test_what_the_backend_prints_does_not_disturb_the_answer(run_json: Callable[..., Any], site: Site) -> None:
    storage = wrong("reserve", "print('noise', flush=True); os.write(1, b'noise')")
    site.plugin("acme", storage=f"print('noise')\n{storage}", **CAPABLE)
    assert run_json("conformance", "acme", "-k", FEW)["passed"] == 2


@pytest.mark.slow
def test_the_settings_of_the_directory_and_the_environment_are_not_used(
    run: Run, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme", storage=STORAGE, **CAPABLE)
    monkeypatch.chdir(site.path)
    (site.path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (site.path / "conftest.py").write_text("raise SystemExit\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    assert run("conformance", "acme", "-k", FEW).exit_code == 0


@pytest.mark.slow
def test_options_reach_the_storage_and_are_validated(run: Run, run_json: Callable[..., Any], site: Site) -> None:
    site.plugin(
        "acme",
        storage=wrong("reserve", "assert self.spec.options.pages == 7, self.spec.options"),
        before="class Options(BackendOptions):\n    pages: int = 1\n",
        options="Options",
        **CAPABLE,
    )
    assert run_json("conformance", "acme", "--option", "pages=7", "-k", FEW)["options"] == {"pages": 7}
    assert run("conformance", "acme", "-k", FEW).exit_code == 1
    error = run_json("conformance", "acme", "--option", "page=7", status=2)["error"]
    assert error["type"] == "OptionsError"
    assert "did you mean 'pages'" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nix",), "UnknownBackendError: no KV-cache backend named 'nix'"),
        (("acme", "-k", "nix"), "KvCacheError: no test of the kit is selected by -k 'nix'"),
        (("acme", "-k", "a or"), "KvCacheError: -k 'a or' is no expression"),
        (("narrow",), "KvCacheError: the kit tries float32, bfloat16, float16, float64, and backend 'narrow'"),
        (("acme", "--device", "cuda"), "ConfigError: "),
    ],
)
def test_what_cannot_be_tried_is_an_error(run: Run, site: Site, arguments: tuple[str, ...], error: str) -> None:
    site.plugin("acme", storage=STORAGE, **CAPABLE)
    site.plugin("narrow", dtypes="('float8_e5m2',)")
    result = run("conformance", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(error)
    assert not result.stdout


@pytest.mark.slow
def test_a_broken_storage_fails_every_test_with_its_reason(run: Run, site: Site) -> None:
    site.plugin("acme", storage="raise OSError('libacme.so')", **CAPABLE)
    result = run("conformance", "acme", "-k", FEW)
    assert result.exit_code == 1
    assert result.stdout.count("libacme.so") >= 2


@pytest.mark.parametrize("missing", ["pytest", "hypothesis", "torch"])
def test_without_the_extra_it_says_what_to_install(
    run: Run, site: Site, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    site.plugin("acme", **CAPABLE)
    monkeypatch.setitem(sys.modules, missing, None)
    result = run("conformance", "acme")
    assert result.exit_code == 2
    assert f"kvcache_core.testing needs {missing}: pip install 'kvcache-core[testing]'" in result.stderr


@pytest.mark.slow
def test_the_first_party_backends_pass_what_is_quick(run: Run) -> None:
    for arguments in (("cpu",), ("cuda", "--option", "device=cpu")):
        result = run("conformance", *arguments, "-k", "Append or Step or Fork")
        assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_first_party_backend_passes_the_whole_kit(run: Run) -> None:
    result = run("conformance", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] > 250
    assert {group["name"] for group in report["groups"]} >= {"Handle", "Oracle", "Fault"}
