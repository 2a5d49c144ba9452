"""`kvcache new-backend`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run


def test_it_says_what_it_wrote_and_what_comes_next(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("new-backend", "Acme_Fast")
    assert result.exit_code == 0, result.output
    assert "  src/kvcache_acme_fast/storage.py\n" in result.stdout
    assert "  pip install -e 'kvcache-acme-fast[test]'\n  kvcache conformance acme-fast\n" in result.stdout
    assert (tmp_path / "kvcache-acme-fast" / "pyproject.toml").exists()


def test_the_json_names_everything(run_json: Callable[..., Any], tmp_path: Path) -> None:
    report = run_json("new-backend", "acme", "--dir", str(tmp_path / "new"))
    assert "pyproject.toml" in report.pop("files")
    assert report == {
        "name": "acme",
        "distribution": "kvcache-acme",
        "package": "kvcache_acme",
        "folder": str(tmp_path / "new"),
    }


def test_a_name_that_is_taken_is_an_error(run: Run, tmp_path: Path) -> None:
    result = run("new-backend", "cpu", "--dir", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert result.stderr == "KvCacheError: choose another name: kvcache-cpu belongs to kvcache-core\n"
    assert list(tmp_path.iterdir()) == []
