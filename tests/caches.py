"""Small caches over the test storages, tensors that say what they are, and checks that nothing changed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager, LayerGroup
from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.sequence import CachedSequence
from tests.storages.int8 import Int8Storage
from tests.storages.paged import PagedStorage

STORAGES: tuple[type[Storage], ...] = (PagedStorage, Int8Storage)
GEOMETRY = CacheGeometry.uniform(3, 2, 8)
#: Two shapes, a window, a layer that caches nothing (1) and one that reads another's K and V (4 reads 2).
MIXED = CacheGeometry(
    num_layers=5,
    groups=(
        LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=8),
        LayerGroup(layers=(3,), num_kv_heads=1, head_dim=4, value_head_dim=6, window=3),
    ),
    shared={4: 2},
)
BLOCK_SIZE = 4
NUM_BLOCKS = 16
MAX_TOKENS = 48

StorageMaker = Callable[[StorageSpec], Storage]
NewCache = Callable[..., KvCacheManager]


def make_spec(**changes: Any) -> StorageSpec:
    values: dict[str, Any] = {
        "geometry": GEOMETRY,
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "max_sequence_length": MAX_TOKENS,
        "dtype": "float32",
        "device": "cpu",
    }
    return StorageSpec(**values | changes)


class KeepingManager(KvCacheManager):
    """A cache whose handles live as long as it does, so that a test need not free each of them."""

    def handle_to(self, sequence: CachedSequence) -> KvCacheHandle:
        handle = super().handle_to(sequence)
        self.__dict__.setdefault("kept", []).append(handle)
        return handle


def make_cache(
    storage: StorageMaker = PagedStorage,
    *,
    manager: type[KvCacheManager] = KeepingManager,
    settings: dict[str, Any] | None = None,
    **spec: Any,
) -> Any:
    """A cache of 16 blocks of 4 tokens unless `spec` changes that; `settings` are the manager's."""
    return manager(storage(make_spec(**spec)), **(settings or {}))


# -- tensors that say what they are --------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _signs(sequence: str, role: str, layer: int, heads: int, dim: int) -> torch.Tensor:
    """`[256, heads, dim]` of 1 and -1, which every dtype stores exactly, int8 with a scale included."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{sequence} {role} {layer}".encode()))
    return torch.randint(0, 2, (256, heads, dim), generator=generator).mul_(2).sub_(1).float()


def rows(
    cache: KvCacheManager, layer: int, start: int, stop: int, sequence: str = "a"
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions `start` to `stop`: no two sequences, roles, layers, positions or heads are alike."""
    spec = cache.own_spec(layer)
    key = _signs(sequence, "key", layer, spec.num_kv_heads, spec.head_dim)[start:stop]
    value = _signs(sequence, "value", layer, spec.num_kv_heads, spec.value_head_dim)[start:stop]
    return key.to(cache.dtype).clone(), value.to(cache.dtype).clone()


def layers_of(
    cache: KvCacheManager, start: int, stop: int, sequence: str = "a"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `append` takes."""
    return [rows(cache, layer, start, stop, sequence) for layer in cache.geometry.caching_layers]


def grow(handle: KvCacheHandle, count: int, sequence: str = "a", token_ids: Iterable[int] | None = None) -> None:
    """Append `count` tagged tokens."""
    start = handle.num_tokens
    handle.append(layers_of(handle.manager, start, start + count, sequence), token_ids)


def filled(cache: KvCacheManager, count: int, sequence: str = "a", **request: Any) -> KvCacheHandle:
    """A new handle with `count` tagged tokens, whose ids are 0, 1, 2, ..."""
    handle = cache.allocate(**request)
    grow(handle, count, sequence, range(count))
    return handle


def write_all(step: Any, tensors: list[tuple[torch.Tensor, torch.Tensor]], manager: KvCacheManager) -> None:
    for layer, (key, value) in zip(manager.geometry.caching_layers, tensors, strict=True):
        step.write(layer, key, value)


def assert_holds(handle: KvCacheHandle, **stops: int) -> None:
    """Check every layer: `a=5, b=9` means rows 0 to 5 of sequence "a", then rows 5 to 9 of sequence "b"."""
    cache = handle.manager
    total = max(stops.values(), default=0)
    assert handle.num_tokens == total
    for layer in cache.geometry.caching_layers:
        pieces, start = [], 0
        for sequence, stop in stops.items():
            pieces.append(rows(cache, layer, start, stop, sequence))
            start = stop
        both = handle.kv_cache(layer)
        assert both is not None
        for got, wanted in zip(both, zip(*pieces, strict=True), strict=True):
            torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-5)


# -- nothing changed -----------------------------------------------------------------------------------------


def picture(cache: KvCacheManager) -> tuple[Any, ...]:
    """Everything a caller can see of a cache, except the counters of failures and the times of use."""
    stats = cache.stats()
    handles = [
        (
            handle.request_id,
            handle.cache_id,
            handle.num_tokens,
            handle.token_ids,
            handle.block_table,
            handle.stats().memory_bytes,
            [
                [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in both]
                for layer in cache.geometry.caching_layers
                if (both := handle.kv_cache(layer)) is not None
            ],
        )
        for handle in cache.list_handles()
    ]
    return (
        replace(stats, failures=0),
        sorted(cache.block_allocator.free_ids()),
        cache.audit(),
        handles,
    )


@contextmanager
def unchanged(cache: KvCacheManager) -> Iterator[None]:
    """Check that what happens inside leaves nothing behind and the books sound."""
    before = picture(cache)
    yield
    assert picture(cache) == before
    assert cache.audit() == ()


@contextmanager
def raising(error: type[Exception], *words: str, reason: str | None = None) -> Iterator[None]:
    """Check that what happens inside raises exactly `error`, for this reason, and that its first line has `words`."""
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    first = str(caught.value).splitlines()[0]
    assert all(word in first for word in words), first
    assert getattr(caught.value, "reason", None) == reason


@contextmanager
def refused(cache: KvCacheManager, error: type[Exception], *words: str, reason: str | None = None) -> Iterator[None]:
    """As `raising`, and nothing changes."""
    with unchanged(cache), raising(error, *words, reason=reason):
        yield


class StorageFailed(RuntimeError):
    """What `failing` raises."""


@contextmanager
def failing(storage: Storage, method: str, *, at: int = 1) -> Iterator[None]:
    """Let the `at`-th call of a storage's method raise before it does anything."""
    calls = 0
    original = getattr(storage, method)

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise StorageFailed(f"{method}, call {at}")
        return original(*arguments, **named)

    setattr(storage, method, call)
    try:
        yield
    finally:
        delattr(storage, method)
    assert calls >= at, f"{method} was called {calls} times only"
