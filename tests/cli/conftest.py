"""Fixtures of the command line's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache_core.cli.app import app
from kvcache_core.registry import get_registry

#: Runs `kvcache` and returns what typer's `CliRunner` returns.
Run = Callable[..., Any]


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    """The registry of the process, looking again at what is installed."""
    registry = get_registry()
    with registry.isolated():
        registry.refresh()
        yield


@pytest.fixture
def run(fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kvcache` with arguments, in this process."""
    monkeypatch.delenv("KVCACHE_DISABLE", raising=False)

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, arguments)

    return invoke


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run `kvcache ... --json` and return what it printed, after checking that it was nothing else."""

    def invoke(*arguments: str, status: int = 0) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    return invoke
