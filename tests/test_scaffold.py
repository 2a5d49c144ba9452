"""Writing a new backend: its names, where it may go, and that it is written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_core import scaffold
from kvcache_core.config_files import tomllib
from kvcache_core.errors import KvCacheError
from kvcache_core.plugin import ENTRY_POINT_GROUP, INTERFACE_VERSION, BackendDescriptor
from kvcache_core.registry import BackendRegistry
from kvcache_core.scaffold import BackendNames, write_backend
from tests.plugin_site import Site

NONE = BackendRegistry(finders=[])
MYPY_CACHE = str(Path(__file__).parents[1] / ".mypy_cache")  # so that torch is not read again
LONGEST = "abcdefghijklm-nopqrstuvwxyz-34"


def written(folder: Path, name: str = "acme") -> list[str]:
    return [path.as_posix() for path in write_backend(BackendNames.of(name, NONE), folder)]


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("acme", ("acme", "kvcache-acme", "kvcache_acme", "Acme")),
        ("My_Fast.KV", ("my-fast-kv", "kvcache-my-fast-kv", "kvcache_my_fast_kv", "MyFastKv")),
        (" acme ", ("acme", "kvcache-acme", "kvcache_acme", "Acme")),
        ("x2", ("x2", "kvcache-x2", "kvcache_x2", "X2")),
        ("class", ("class", "kvcache-class", "kvcache_class", "Class")),
    ],
)
def test_all_names_follow_from_one(given: str, expected: tuple[str, ...]) -> None:
    made = BackendNames.of(given, NONE)
    assert (made.name, made.distribution, made.package, made.class_name) == expected


@pytest.mark.parametrize(
    "name",
    ["", " ", "auto", "-x", "2x", "a b", "a/b", "../x", "é", "\u212aelvin", "a:b", "a\nb", "${name}", "x" * 31],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(KvCacheError, match="choose another name"):
        BackendNames.of(name, NONE)


@pytest.mark.parametrize("name", ["core", "cpu", "CUDA", "metal", "kvcache", "kvcache-x"])
def test_names_of_the_project_itself_are_taken(name: str) -> None:
    with pytest.raises(KvCacheError, match="choose another name"):
        BackendNames.of(name, NONE)


def test_installed_names_are_taken(site: Site) -> None:
    site.plugin("acme", dist="acme-kv", version="2.1")
    site.plugin("beta", dist="kvcache-gamma")
    site.module("kvcache_delta.plugin", "")
    registry = site.registry()
    for name, reason in {
        "Acme": "acme-kv 2.1 is installed and provides a backend 'acme'",
        "gamma": "kvcache-gamma 1.0 is installed and provides a backend 'beta'",
        "delta": "there is an importable package 'kvcache_delta' already",
    }.items():
        with pytest.raises(KvCacheError, match=reason):
            BackendNames.of(name, registry)


# -- what is written ---------------------------------------------------------------------------------------


def test_the_distribution_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    files = written(folder)
    assert files == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {".gitignore", "README.md", "pyproject.toml", "src/kvcache_acme/plugin.py", "src/kvcache_acme/py.typed"} <= {
        *files
    }
    assert not any("$" in (folder / file).read_text().replace("$ ", "") for file in files)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {ENTRY_POINT_GROUP: {"acme": "kvcache_acme.plugin"}}
    assert "license" not in project
    assert f"interface={INTERFACE_VERSION}" in (folder / "src/kvcache_acme/plugin.py").read_text()
    assert list(tmp_path.iterdir()) == [folder]


def test_its_descriptor_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "scaffolded")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    registry = BackendRegistry(finders=[])
    import kvcache_scaffolded.plugin  # type: ignore[import-not-found]

    (backend,) = registry.register_plugin(kvcache_scaffolded.plugin)
    assert isinstance(backend.descriptor, BackendDescriptor)
    assert registry.load(backend).capabilities == backend.descriptor.capabilities
    for name in [name for name in sys.modules if name.startswith("kvcache_scaffolded")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.0", ">=0.1,<1"),
        ("1.12.3", ">=1.12,<2"),
        ("2.0.dev3+g12", ">=2.0,<3"),
        ("", ""),
        ("1", ""),
        ("unknown.x", ""),
    ],
)
def test_it_requires_the_core_it_was_written_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, expected: str
) -> None:
    monkeypatch.setattr(scaffold._compat, "core_version", lambda: version)
    written(tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert f"kvcache-core{expected}" in project["dependencies"]
    assert project["optional-dependencies"]["test"] == [f"kvcache-core[testing]{expected}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x", "my-fast-kv", LONGEST])
def test_it_is_clean_under_ruff_and_strict_mypy(tmp_path: Path, name: str) -> None:
    written(tmp_path, name)
    for tool in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--cache-dir", MYPY_CACHE, "src", "tests"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *tool],
            cwd=tmp_path,
            env={**os.environ, "MYPYPATH": "src"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


# -- where it may go ---------------------------------------------------------------------------------------


def test_an_empty_directory_will_do_also_by_a_link_and_as_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "linked", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "current")
    for folder in (tmp_path / "plain", tmp_path / "link", Path()):
        written(folder)
        assert (folder / "pyproject.toml").exists()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "linked" / "pyproject.toml").exists()


def test_whatever_is_there_stays_untouched(tmp_path: Path) -> None:
    full, file, dangling = tmp_path / "full", tmp_path / "file", tmp_path / "dangling"
    full.mkdir()
    (full / "precious").write_text("x")
    file.write_text("x")
    dangling.symlink_to(tmp_path / "nowhere")
    for folder, problem in {
        full: "is not empty",
        file: "is a file",
        dangling: "a link to nothing",
        tmp_path / "no" / "such": "there is no directory",
    }.items():
        with pytest.raises(KvCacheError, match=problem):
            written(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dangling", "file", "full", "precious"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("failing", ["write_text", "rename"])
def test_nothing_is_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, failing: str
) -> None:
    folder = tmp_path / "new"
    if existing:
        folder.mkdir()
    owner = Path if failing == "write_text" else os
    real, calls = getattr(owner, failing), 0

    def fail_at_last(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("disk full")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, failing, fail_at_last)
    with pytest.raises(KvCacheError, match="disk full"):
        written(folder)
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == ([folder] if existing else [])
    written(folder)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a directory that cannot be written to")
def test_a_directory_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(KvCacheError, match="cannot write"):
            written(tmp_path / "new")
    finally:
        tmp_path.chmod(0o700)
