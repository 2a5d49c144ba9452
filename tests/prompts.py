"""Prompts whose K and V tell everything they depend on, so that a wrong prefix hit shows in the data.

The K and V of a token are a function of its layer, its role, every token up to it, and the key (salt, adapter and
the like) it was computed under, as they are in a transformer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcache_core import KvCacheHandle, KvCacheManager, PrefixExplanation
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.plugin import Storage, StorageSpec
from tests.caches import StorageMaker, make_cache
from tests.storages.int8 import Int8Storage
from tests.storages.paged import PagedStorage


def _cpu(memory: str) -> StorageMaker:
    def make(spec: StorageSpec) -> Storage:
        storage = pytest.importorskip("kvcache_cpu.storage")
        options = pytest.importorskip("kvcache_cpu.options").CpuOptions(memory=memory)
        made: Storage = storage.CpuStorage(replace(spec, options=options))
        return made

    return make


#: Blocks and copies of whole sequences, shared pages and copies that grow.
STORAGES: dict[str, StorageMaker] = {
    "paged": PagedStorage,
    "int8": Int8Storage,
    "mapped": _cpu("mapped"),
    "heap": _cpu("heap"),
}

Layers = list[tuple[torch.Tensor, torch.Tensor]]

ON = PrefixCacheConfig(enabled=True)


def make_prefix_cache(
    *storage: Any, prefix: PrefixCacheConfig = ON, settings: dict[str, Any] | None = None, **spec: Any
) -> Any:
    """`make_cache` with prefix reuse."""
    return make_cache(*storage, settings={"prefix": prefix, **(settings or {})}, **spec)


def _numbers(token_ids: Sequence[int], key: str) -> list[int]:
    """One number for each token, which depends on all tokens up to it; exact in float32."""
    state, numbers = zlib.crc32(key.encode()), []
    for token in token_ids:
        state = zlib.crc32(token.to_bytes(8, "little", signed=True), state)
        numbers.append(1 + state % 65521)
    return numbers


def layers_for(cache: KvCacheManager, token_ids: Sequence[int], start: int = 0, **request: Any) -> Layers:
    """What `append` takes for the tokens from position `start` on."""
    numbers = torch.tensor(_numbers(token_ids, key_of(request))[start:], dtype=torch.float32)
    layers = []
    for layer in cache.geometry.caching_layers:
        spec = cache.own_spec(layer)
        k = (numbers + layer)[:, None, None].expand(-1, spec.num_kv_heads, spec.head_dim)
        v = (-numbers - layer)[:, None, None].expand(-1, spec.num_kv_heads, spec.value_head_dim)
        layers.append((k.to(cache.dtype), v.to(cache.dtype)))
    return layers


def key_of(request: dict[str, Any]) -> str:
    """The part of a request that K and V depend on, as text."""
    fields = {name: request.get(name) for name in ("adapter", "salt")}
    fields |= {f"extra {name}": value for name, value in (request.get("extra_keys") or {}).items()}
    return repr(sorted((name, repr(value)) for name, value in fields.items() if value is not None))


def fill(handle: KvCacheHandle, token_ids: Sequence[int], **request: Any) -> None:
    """Append what the handle lacks of a prompt."""
    start = handle.num_tokens
    handle.append(layers_for(handle.manager, token_ids, start, **request), token_ids[start:])


def assert_reads(handle: KvCacheHandle, token_ids: Sequence[int], **request: Any) -> None:
    """Check that the handle holds exactly these tokens, with the K and V that they have under this request."""
    assert handle.num_tokens == len(token_ids)
    cache = handle.manager
    wanted = layers_for(cache, token_ids, 0, **request)
    for layer, pair in zip(cache.geometry.caching_layers, wanted, strict=True):
        both = handle.kv_cache(layer)
        assert both is not None
        for got, want in zip(both, pair, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0.05)


def stored(cache: KvCacheManager, token_ids: Sequence[int], **request: Any) -> KvCacheHandle:
    """A new handle that holds a prompt: what was found of it, and the rest appended."""
    handle = cache.allocate(token_ids=token_ids, **request)
    assert_reads(handle, token_ids[: handle.num_tokens], **request)
    fill(handle, token_ids, **request)
    return handle


def publish(cache: KvCacheManager, token_ids: Sequence[int], **request: Any) -> None:
    """Store a prompt and free it, so that it is kept."""
    stored(cache, token_ids, **request).free()


def hit(cache: KvCacheManager, token_ids: Sequence[int], **request: Any) -> int:
    """How many tokens a prompt finds, after a check of what it then reads; the finding counts as a use."""
    handle = cache.allocate(token_ids=token_ids, **request)
    found = handle.num_tokens
    assert_reads(handle, token_ids[:found], **request)
    handle.free()
    return found


def peek(cache: KvCacheManager, token_ids: Sequence[int], **request: Any) -> int:
    """How many tokens a prompt would find, without using them."""
    return explain(cache, token_ids, **request).num_tokens


def explain(cache: KvCacheManager, token_ids: Sequence[int], **request: Any) -> PrefixExplanation:
    return cache.explain(token_ids=token_ids, **request)
