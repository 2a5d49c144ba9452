"""`kvcache show NAME`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvcache_core.plugin import BackendDescriptor
from kvcache_core.registry import get_registry
from tests.cli.conftest import Run
from tests.plugin_site import Site

OPTIONS = """
from pydantic import Field
class Options(BackendOptions):
    size: int = Field(default=16, ge=1, description="How many there are.")
"""


def test_it_describes_a_backend_for_people(run: Run, site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options", capabilities="{'swap'}", summary="'quick and small'")
    result = run("show", "acme")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert text.startswith("acme: quick and small")
    assert "here available (cpu)" in text
    assert f"provided by kvcache-acme 1.0, {site.path}" in text
    assert "capabilities swap" in text
    assert "block sizes any power of two; 16 unless configured" in text
    assert "size integer >= 1 16 How many there are." in text


def test_it_describes_a_backend_for_programs(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options")
    facts = run_json("show", "acme")
    assert facts["name"] == "acme"
    assert facts["distribution"]["name"] == "kvcache-acme"
    assert facts["options"] == [
        {
            "name": "size",
            "type": "integer >= 1",
            "required": False,
            "default": 16,
            "description": "How many there are.",
        }
    ]
    assert facts["probe"]["state"] == "available"
    assert facts["dtypes"] == ["float32", "float16"]


def test_it_imports_only_the_light_module(run: Run, site: Site) -> None:
    package = site.plugin("acme", storage="raise AssertionError('imported')")
    assert run("show", "acme").exit_code == 0
    assert f"{package}.storage" not in sys.modules


def test_an_unavailable_backend_shows_why(run: Run, site: Site) -> None:
    site.plugin("acme", probe="lambda request: Unavailable(code='no', reason='no device', hint='plug one in')")
    assert "unavailable (no device; plug one in)" in run("show", "acme").stdout


def test_it_says_what_precision_is_lost(run: Run, run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", round_trip_error="0.004")
    site.plugin("exact")
    assert "reads back    within 0.004 of the largest element of a row" in run("show", "acme").stdout
    assert "reads back    every bit that was written" in run("show", "exact").stdout
    assert run_json("show", "acme")["round_trip_error"] == 0.004


def test_a_backend_without_options(run: Run, site: Site) -> None:
    site.plugin("acme")
    assert "It has no options." in run("show", "acme").stdout


def test_a_probe_that_hangs_is_given_up(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", probe="lambda request: __import__('time').sleep(60)")
    assert run_json("show", "acme", "--timeout", "0.8")["probe"]["code"] == "timeout"


def test_a_backend_that_the_program_registered_has_no_distribution(
    run_json: Callable[..., Any], fresh_registry: None
) -> None:
    get_registry().register(
        BackendDescriptor(
            name="home",
            interface=(1, 0),
            storage="home.storage:Store",
            summary="",
            placement="paged",
            devices=("cpu",),
            dtypes=("float32",),
            probe="home.probe:probe",
        )
    )
    facts = run_json("show", "home")
    assert facts["distribution"] is None
    assert facts["probe"] == {}


def test_an_unknown_backend_is_one_clean_message_with_status_2(run: Run) -> None:
    result = run("show", "cdua")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("UnknownBackendError: no KV-cache backend named 'cdua' is installed\n")
    assert "Traceback" not in result.stderr


def test_an_error_in_json_mode_is_json(run_json: Callable[..., Any]) -> None:
    error = run_json("show", "gpu", status=2)["error"]
    assert error["type"] == "UnknownBackendError"
    assert error["message"] == "'gpu' is not a backend name; use 'cuda' (NVIDIA), 'metal' (Apple) or 'auto'"
    assert error["backend"] == "gpu"
    assert error["hint"]


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "import no_such_module"])
def test_a_broken_plugin_is_one_clean_message(run: Run, site: Site, source: str) -> None:
    site.plugin("acme", before=source)
    result = run("show", "acme")
    assert result.exit_code == 2
    assert result.stderr.startswith("BackendLoadError: backend 'acme' (kvcache-acme 1.0) failed while importing")


def test_a_backend_is_tried_with_the_options_that_are_given(run: Run, run_json: Callable[..., Any], site: Site) -> None:
    probe = "def probe(request):\n    return Available(device='cpu', detail=f'{request.options.size} of them')"
    site.plugin(
        "acme",
        before=f"{OPTIONS}\nfrom kvcache_core.plugin import Available\n{probe}",
        options="Options",
        probe="probe",
    )
    assert run_json("show", "acme")["probe"]["detail"] == "16 of them"
    assert run_json("show", "acme", "--option", "size=3")["probe"]["detail"] == "3 of them"
    wrong = run_json("show", "acme", "--option", "size=0")["probe"]
    assert (wrong["state"], wrong["code"]) == ("unavailable", "wrong-options")
    assert "size" in wrong["reason"]
    assert run("show", "acme", "--option", "size").exit_code != 0
