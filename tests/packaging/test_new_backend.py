"""A generated backend, installed and used as its author would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.environments import Environment

pytestmark = [pytest.mark.packaging, pytest.mark.slow]


def test_a_generated_backend_conforms_once_it_is_installed(environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    environment.run("kvcache", "new-backend", "demo", "--dir", folder)
    environment.run("pip", "install", folder)
    listed = environment.run("kvcache", "list").stdout
    assert re.search(r"^demo +kvcache-demo +0.1.0 +installed *$", listed, re.MULTILINE)
    report = environment.run("kvcache", "conformance", "demo").stdout
    assert report.endswith("kvcache-demo:demo conforms.\n")
    assert " 0 failed, " in report


def test_a_generated_backend_passes_its_own_tests(environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "my-demo"
    environment.run("kvcache", "new-backend", "My_Demo", "--dir", folder)
    environment.run("pip", "install", "-e", f"{folder}[test]")
    assert "passed" in environment.run("pytest", "-q", "-k", "not histor and not fault", cwd=folder).stdout
    (example,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert "MyDemoKvCacheHandle" in environment.run("python", "-c", example).stdout
