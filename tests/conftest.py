"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcache_core import KvCacheManager
from tests.caches import STORAGES, make_cache
from tests.plugin_site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site directory, and an environment that disables nothing."""
    monkeypatch.delenv("KVCACHE_DISABLE", raising=False)
    made = Site(tmp_path, monkeypatch)
    yield made
    made.forget_modules()


@pytest.fixture
def new_cache() -> Iterator[Callable[..., KvCacheManager]]:
    """`make_cache`, whose caches are closed in the end."""
    with ExitStack() as stack:
        yield lambda *arguments, **named: stack.enter_context(make_cache(*arguments, **named))


@pytest.fixture(params=STORAGES, ids=lambda storage: storage.__name__)
def cache(request: pytest.FixtureRequest) -> Iterator[KvCacheManager]:
    """A cache of 16 blocks of 4 tokens over each of the test storages; its books are sound in the end."""
    with make_cache(request.param) as made:
        yield made
        if not made.closed:
            assert made.audit() == ()
