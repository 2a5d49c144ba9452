"""What is in the wheels and source distributions, and what their metadata says."""

from __future__ import annotations

import configparser
import re
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from kvcache_core.interface import ENTRY_POINT_GROUP
from kvcache_core.messages import FIRST_PARTY
from packaging.requirements import Requirement
from packaging.version import Version
from tests.packaging.environments import PROJECTS, ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

Builder = Callable[[Path], Path]
PLUGINS = [project for project in PROJECTS if project != ROOT]
EACH = pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name if project != ROOT else "core")


def files(archive: Path) -> set[str]:
    """The files of a wheel, or those of a source distribution without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


def text(wheel: Path, name: str) -> str:
    """A file of a wheel's metadata, or nothing."""
    with zipfile.ZipFile(wheel) as opened:
        found = [each for each in opened.namelist() if each.endswith(f".dist-info/{name}")]
        return opened.read(found[0]).decode() if found else ""


def metadata(wheel: Path) -> Message:
    return Parser().parsestr(text(wheel, "METADATA"))


def entry_points(wheel: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(text(wheel, "entry_points.txt"))
    return {section: dict(parser[section]) for section in parser.sections()}


def requirements(wheel: Path, extra: str = "") -> dict[str, Requirement]:
    """What a wheel requires, by name; for an extra, only what that adds."""
    found = [Requirement(each) for each in metadata(wheel).get_all("Requires-Dist", [])]
    return {
        each.name: each
        for each in found
        if ("extra" in str(each.marker)) == bool(extra) and (not each.marker or each.marker.evaluate({"extra": extra}))
    }


def package(project: Path) -> str:
    return "kvcache_core" if project == ROOT else f"kvcache_{project.name}"


@EACH
def test_a_wheel_from_the_source_distribution_has_the_same_files(
    project: Path, wheel: Builder, sdist: Builder, tmp_path: Path
) -> None:
    with tarfile.open(sdist(project)) as archive:
        archive.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    again = wheel(unpacked)
    assert files(again) == files(wheel(project))
    assert again.name == wheel(project).name
    assert text(again, "METADATA") == text(wheel(project), "METADATA")


@EACH
def test_a_wheel_has_one_typed_package_with_a_licence_and_no_tests(project: Path, wheel: Builder) -> None:
    found = files(wheel(project))
    tops = {file.partition("/")[0] for file in found if ".dist-info/" not in file}
    assert tops == {package(project)}
    assert f"{package(project)}/py.typed" in found
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", file) for file in found)
    assert not [file for file in found if "__pycache__" in file or file.endswith((".c", ".part", ".pyc"))]
    top = project if project == ROOT else project / "src"
    sources = {file.relative_to(top).as_posix() for file in (top / package(project)).rglob("*.py")}
    assert {file for file in found if file.endswith(".py")} == sources
    assert not [file for file in sources if "/tests/" in file]


@EACH
def test_a_source_distribution_has_what_building_and_testing_need_and_nothing_of_the_workplace(
    project: Path, sdist: Builder
) -> None:
    found = files(sdist(project))
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= found
    assert any(file.startswith("tests/test_") for file in found)
    tops = {file.partition("/")[0] for file in found}
    allowed = {"src", "tests", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "hatch_build.py", ".gitignore"}
    if project == ROOT:
        allowed |= {"kvcache_core", "docs", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert tops <= allowed
    assert not [file for file in found if "__pycache__" in file or file.endswith((".so", ".pyc"))]


def test_no_two_wheels_have_a_file_in_common(wheel: Builder) -> None:
    owners: dict[str, Path] = {}
    for project in PROJECTS:
        for file in files(wheel(project)):
            assert owners.setdefault(file, project) == project, file


@EACH
def test_entry_points_are_exactly_these(project: Path, wheel: Builder) -> None:
    found = entry_points(wheel(project))
    if project == ROOT:
        assert found == {"console_scripts": {"kvcache": "kvcache_core.cli:main"}}  # and no pytest11
    else:
        assert found == {ENTRY_POINT_GROUP: {project.name: f"kvcache_{project.name}.plugin"}}


@EACH
def test_metadata_says_who_what_and_for_which_python(project: Path, wheel: Builder) -> None:
    found = metadata(wheel(project))
    assert found["Name"] == package(project).replace("_", "-")
    assert found["Requires-Python"] == ">=3.10"
    assert found["License-Expression"] == "MIT"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found["Summary"]
    assert str(found.get_payload()).strip() == (project / "README.md").read_text(encoding="utf-8").strip()


def test_all_share_a_version_and_plugins_and_extras_ask_for_a_range_around_it(wheel: Builder) -> None:
    version = Version(metadata(wheel(ROOT))["Version"])
    expected = f"<{version.major + 1},>={version.major}.{version.minor}"
    for plugin in PLUGINS:
        assert Version(metadata(wheel(plugin))["Version"]) == version
        assert str(requirements(wheel(plugin))["kvcache-core"].specifier) == expected
        assert str(requirements(wheel(ROOT), plugin.name)[f"kvcache-{plugin.name}"].specifier) == expected


def test_core_needs_neither_torch_nor_pytest_and_every_plugin_brings_torch(wheel: Builder) -> None:
    assert not {"torch", "numpy", "pytest", "hypothesis", "transformers"} & set(requirements(wheel(ROOT)))
    assert {"torch", "pytest", "hypothesis"} <= set(requirements(wheel(ROOT), "testing"))
    assert all("torch" in requirements(wheel(plugin)) for plugin in PLUGINS)


def test_every_first_party_backend_is_a_plugin_and_an_extra_and_all_that_anybody_names_exist(wheel: Builder) -> None:
    extras = set(metadata(wheel(ROOT)).get_all("Provides-Extra", []))
    assert {project.name: f"kvcache-{project.name}" for project in PLUGINS} == dict(FIRST_PARTY)
    assert set(FIRST_PARTY) <= extras
    texts = [
        *(file for project in PROJECTS for file in project.glob("*.md")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("kvcache_core/**/*.py"),
        *ROOT.glob("plugins/*/src/**/*.py"),
        *ROOT.glob("plugins/*/pyproject.toml"),
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
    ]
    named = {
        extra.strip()
        for file in texts
        for group in re.findall(r"kvcache-core\[([a-z, ]+)\]", file.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named
    assert named <= extras
