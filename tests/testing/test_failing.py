"""The storage that fails when it is told to."""

from __future__ import annotations

from typing import cast

import pytest

from kvcache_core import KvCacheManager
from kvcache_core.plugin import Storage
from kvcache_core.testing import FailingStorage, InjectedFault
from tests.caches import KeepingManager, filled, make_spec
from tests.storages.paged import PagedStorage


def failing_cache() -> tuple[KvCacheManager, FailingStorage]:
    storage = FailingStorage(PagedStorage(make_spec()))
    return KeepingManager(cast("Storage", storage)), storage


def test_it_counts_the_calls_that_do_work_and_passes_everything_on() -> None:
    cache, storage = failing_cache()
    with cache:
        handle = filled(cache, 5)
        assert storage.calls == ["open", "reserve", "plan", "write", "write", "write"]
        assert handle.num_tokens == 5
        assert storage.failed is None


def test_the_chosen_call_raises_before_it_does_anything() -> None:
    cache, storage = failing_cache()
    with cache:
        storage.fail_at = 0
        with pytest.raises(InjectedFault, match="injected into call 0, open"):
            cache.allocate()
        assert storage.failed == "open"
        with cache.allocate() as handle:
            assert handle.is_valid


def test_a_late_failure_comes_after_the_work_where_the_protocol_allows_that() -> None:
    cache, storage = failing_cache()
    with cache:
        storage.late, storage.fail_at = True, 3
        with pytest.raises(InjectedFault, match="injected after call 3, write"):
            filled(cache, 5)
        storage.fail_at = len(storage.calls)
        with pytest.raises(InjectedFault, match="injected into call"):  # an open that fails has opened nothing
            cache.allocate()
        cache.reset()
