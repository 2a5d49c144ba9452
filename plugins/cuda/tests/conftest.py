"""Caches of the CUDA backend: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcache_core import KvCacheManager, open_cache
from plugins.cuda.tests.caches import GEOMETRY


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are small: threads would only wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def new_cache() -> Iterator[Callable[..., KvCacheManager]]:
    """Opens caches of 16 blocks of 4 tokens with `option device=cpu`; closed in the end."""
    opened: list[KvCacheManager] = []

    def make(options: dict[str, Any] | None = None, **config: Any) -> KvCacheManager:
        settings = {"geometry": GEOMETRY, "budget": "16 blocks", "block_size": 4} | config
        opened.append(open_cache(backend="cuda", options={"device": "cpu"} | (options or {}), **settings))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()
