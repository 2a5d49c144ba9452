"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugin_site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site directory, and an environment that disables nothing."""
    monkeypatch.delenv("KVCACHE_DISABLE", raising=False)
    made = Site(tmp_path, monkeypatch)
    yield made
    made.forget_modules()
