"""The example of a third party's backend, built as a wheel and installed beside the core and nothing else of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "kvcache-int8"


@pytest.fixture
def installed(environment: Environment, wheel: Callable[[Path], Path]) -> Environment:
    """An environment with the example."""
    environment.run("pip", "install", wheel(EXAMPLE))
    return environment


def test_the_example_is_found_chosen_by_configuration_and_opened(installed: Environment, tmp_path: Path) -> None:
    (listed,) = json.loads(installed.run("kvcache", "list", "--json").stdout)["backends"]
    assert (listed["qualified"], listed["state"]) == ("kvcache-int8:int8", "installed")
    (tmp_path / "kvcache.toml").write_text('backend = "int8"\ndtype = "bfloat16"\nbudget = "1000 tokens"\n')
    program = (
        "from kvcache_core import CacheConfig, CacheGeometry, open_cache\n"
        "geometry = CacheGeometry.uniform(num_layers=2, num_kv_heads=2, head_dim=64)\n"
        "with open_cache('kvcache.toml', geometry=geometry) as cache:\n"
        "    print(cache.backend, cache.dtype, cache.storage.bytes_per_block // cache.block_size)\n"
    )
    assert installed.run("python", "-c", program, cwd=tmp_path).stdout == "int8 torch.bfloat16 528\n"
    report = json.loads(installed.run("kvcache", "doctor", "--json").stdout)
    assert report["healthy"]
    assert [backend["state"] for backend in report["backends"]] == ["available"]


def test_the_example_conforms(installed: Environment) -> None:
    report = json.loads(installed.run("kvcache", "conformance", "int8", "--json").stdout)
    assert report["conforms"]
    assert report["round_trip_error"] == 0.008
    reasons = {test["reason"] for test in report["tests"] if test["outcome"] == "skipped"}
    assert all("round_trip_error" in reason or "does not declare" in reason for reason in reasons)


def test_the_example_passes_its_own_tests_and_its_readme_runs(installed: Environment) -> None:
    own = ("pytest", "-q", "-p", "no:cacheprovider", EXAMPLE / "tests", "-k", "quantise or storage")
    assert "passed" in installed.run(*own).stdout
    (source,) = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert installed.run("python", "-c", source).stdout == "torch.int8 torch.Size([100, 2, 1]) 528 bytes a token\n"


def test_the_example_is_clean_under_strict_mypy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache", "src", "tests"],
        cwd=EXAMPLE,
        env={**os.environ, "MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
