"""Wheels of this repository, built once, and environments to install them into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache_core.config_files import tomllib
from tests.packaging.environments import PROJECTS, ROOT, Environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds the wheel of a project folder, once."""
    built: dict[Path, Path] = {}

    def build(project: Path) -> Path:
        if project not in built:
            folder = tmp_path_factory.mktemp("wheel")
            command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project]
            subprocess.run(command, check=True, capture_output=True)
            (built[project],) = folder.glob("*.whl")
        return built[project]

    return build


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds the source distribution of a project folder, once."""
    built: dict[Path, Path] = {}

    def build(project: Path) -> Path:
        if project not in built:
            folder = tmp_path_factory.mktemp("sdist")
            command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, project]
            subprocess.run(command, check=True, capture_output=True)
            (built[project],) = folder.glob("*.tar.gz")
        return built[project]

    return build


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory, wheel: Callable[[Path], Path]) -> Path:
    """A folder with the wheels of all our distributions."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    for project in PROJECTS:
        shutil.copy(wheel(project), folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path, wheel: Callable[[Path], Path]) -> Environment:
    """An environment in which the core is installed from its wheel, with what its extra for testing brings.

    Nothing else is there that the outer environment has: numpy, for one, comes with neither torch nor the core.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["testing"]]
    made = Environment(tmp_path / "environment", ["pip", "build", "hatchling", "editables", *needed])
    made.run("pip", "install", "--quiet", wheel(ROOT))
    return made
