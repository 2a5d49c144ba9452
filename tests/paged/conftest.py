"""Caches over the paged pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcache_core import KvCacheManager
from tests.paged import hostpool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are small: threads would only wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def close_pools() -> Iterator[None]:
    """The books of every cache that a test has opened are sound in the end."""
    yield
    while hostpool.opened:
        cache = hostpool.opened.pop()
        problems = () if cache.closed else cache.audit()
        cache.close()
        assert problems == ()


@pytest.fixture
def cache() -> KvCacheManager:
    """16 blocks of 4 tokens full of NaN."""
    return hostpool.open_pool()
