"""The base of all parts of the kit: how tests open, fill and read a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.geometry import CacheGeometry, LayerGroup, LayerSpec
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.step import Step
from kvcache_core.storage import Storage, StorageSpec
from kvcache_core.testing.declaration import Declaration
from kvcache_core.testing.reference import reference_attention
from kvcache_core.testing.rows import assert_rows, encode

__all__ = ["Conformance"]


class Conformance(Declaration):
    """How the parts of the kit open, fill and read caches of the declared backend."""

    # -- caches ------------------------------------------------------------------------------------------

    def geometry(self, shape: str = "mixed") -> CacheGeometry:
        """Return one of the kit's model shapes.

        `"uniform"`: two equal layers. `"single-head"`: one kv head for all query heads. `"mixed"`: groups that
        differ in heads and window (and in K and V head dims where the backend can), a layer that shares another's
        K and V, and one that caches nothing.
        """
        dim = self.head_dim
        if shape == "uniform":
            return CacheGeometry.uniform(2, 2, dim)
        if shape == "single-head":
            return CacheGeometry.uniform(2, 1, dim)
        wide = dim + 16 if "unequal_head_dims" in self.capabilities else dim
        return CacheGeometry(
            num_layers=5,
            groups=(
                LayerGroup(layers=(0, 4), num_kv_heads=2, head_dim=dim, value_head_dim=wide),
                LayerGroup(layers=(1,), num_kv_heads=1, head_dim=wide, value_head_dim=dim, window=self.block_size + 1),
            ),
            shared={2: 0},
        )

    def spec(self, geometry: CacheGeometry | None = None, **values: Any) -> StorageSpec:
        """Return a spec for a small cache; `values` replace its fields."""
        block_size = values.get("block_size", self.block_size)
        num_blocks = values.get("num_blocks", max(32, 128 // block_size))
        defaults: dict[str, Any] = {
            "geometry": geometry or self.geometry(),
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_sequence_length": num_blocks * block_size,
            "dtype": self.dtypes[0],
            "device": self.device,
            "options": self.options,
        }
        return StorageSpec(**{**defaults, **values})

    @contextmanager
    def cache(
        self,
        geometry: CacheGeometry | None = None,
        *,
        wrap: Callable[[Storage], Storage] = lambda storage: storage,
        prefix: PrefixCacheConfig | None = None,
        **values: Any,
    ) -> Iterator[KvCacheManager]:
        """Open a cache for the length of a test, and audit it at the end.

        Args:
            geometry: What it caches; the mixed shape when None.
            wrap: What to put between the cache and its storage.
            prefix: How prefixes are kept and found; not at all when None.
            values: Fields of the `StorageSpec`.
        """
        storage = wrap(self.open_storage(self.spec(geometry, **values)))
        with KvCacheManager(storage, backend="under test", prefix=prefix) as cache:
            yield cache
            if not cache.closed:
                assert cache.audit() == ()

    # -- filling -----------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        """Return `count` token numbers that this test has not used before."""
        numbers: Iterator[int] = self.__dict__.setdefault("_numbers", itertools.count(1))
        return list(itertools.islice(numbers, count))

    def write(self, step: Step, tokens: Mapping[KvCacheHandle, Sequence[int]]) -> None:
        """Write the rows of every handle's new tokens in all layers of an open step."""
        cache = step.handles[0].manager
        parts = [(new, handle.num_tokens) for handle, new in tokens.items()]
        for layer in cache.geometry.caching_layers:
            step.write(layer, *self.rows(cache, layer, parts))

    def rows(
        self, cache: KvCacheManager, layer: int, parts: Sequence[tuple[Sequence[int], int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer for `(tokens, first position)` parts, packed in their order."""
        spec = cache.own_spec(layer)
        key = [encode(new, start, layer, "key", spec.num_kv_heads, spec.head_dim) for new, start in parts]
        value = [encode(new, start, layer, "value", spec.num_kv_heads, spec.value_head_dim) for new, start in parts]
        return (
            torch.cat(key).to(device=cache.device, dtype=cache.dtype),
            torch.cat(value).to(device=cache.device, dtype=cache.dtype),
        )

    def feed(self, cache: KvCacheManager, tokens: Mapping[KvCacheHandle, Sequence[int]]) -> None:
        """Append tokens to several handles in one step."""
        with cache.step(tokens) as step:
            self.write(step, tokens)

    def filled(self, cache: KvCacheManager, count: int, **request: Any) -> tuple[KvCacheHandle, list[int]]:
        """Return a new handle of `count` tokens, and the tokens."""
        handle, tokens = cache.allocate(**request), self.tokens(count)
        if count:
            self.feed(cache, {handle: tokens})
        return handle, tokens

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """Return reproducible normal numbers on the backend's device."""
        generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
        return torch.randn(*shape, generator=generator).to(device=self.device, dtype=dtype)

    def write_random(self, step: Step, *, seed: int = 0) -> None:
        """Write random rows in all layers of an open step."""
        cache = step.handles[0].manager
        for layer in cache.geometry.caching_layers:
            spec, rows = cache.own_spec(layer), step.num_new_tokens
            key = self.random(rows, spec.num_kv_heads, spec.head_dim, dtype=cache.dtype, seed=seed + 2 * layer)
            value = self.random(
                rows, spec.num_kv_heads, spec.value_head_dim, dtype=cache.dtype, seed=seed + 2 * layer + 1
            )
            step.write(layer, key, value)

    # -- reading -----------------------------------------------------------------------------------------

    def assert_holds(self, handle: KvCacheHandle, tokens: Sequence[int]) -> None:
        """Assert that a handle reads back exactly these tokens, in every layer, keys and values."""
        assert handle.num_tokens == len(tokens)
        cache = handle.manager
        for layer in range(cache.geometry.num_layers):
            both, producer = handle.kv_cache(layer), cache.geometry.producer(layer)
            assert (both is None) == (producer is None)
            if both is None or producer is None:
                continue
            expected = self.rows(cache, producer, [(tokens, 0)])
            for role, actual, wanted in zip(("keys", "values"), both, expected, strict=True):
                what = f"{role} of {handle.request_id!r}, layer {layer}"
                assert actual.dtype is cache.dtype, f"{what}: dtype {actual.dtype}, expected {cache.dtype}"
                assert_rows(actual, wanted, error=self.round_trip_error, what=what)

    def assert_attends(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend, compare with exact attention over what the cache reads back, and return the output."""
        out = step.attend(layer, query) if scale is None else step.attend(layer, query, scale=scale)
        spec = self.layer_spec(step.handles[0].manager, layer)
        assert out.dtype is query.dtype, f"attend returned {out.dtype} for a query in {query.dtype}"
        assert out.shape == (*query.shape[:2], spec.value_head_dim)
        bounds = step.cu_seqlens_q.tolist()
        for handle, first, last in zip(step.handles, bounds, bounds[1:], strict=False):
            key, value = step.gather(layer, handle)
            expected = reference_attention(
                query[first:last], key, value, scale=spec.head_dim**-0.5 if scale is None else scale, window=spec.window
            )
            self.assert_close(
                out[first:last], expected, value, what=f"attention of {handle.request_id!r}, layer {layer}"
            )
        return out

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor, value: torch.Tensor, *, what: str) -> None:
        """Assert that attention outputs agree within the rounding of the dtypes involved."""
        error = max(self.attention_error[str(t.dtype).removeprefix("torch.")] for t in (actual, value))
        finite = value[torch.isfinite(value)]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        torch.testing.assert_close(
            actual.cpu().double(),
            expected,
            rtol=0,
            atol=error * max(largest, 1e-30),
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )

    @staticmethod
    def layer_spec(cache: KvCacheManager, layer: int) -> LayerSpec:
        """The shape that a layer reads, which must not be one that caches nothing."""
        spec = cache.geometry.layer_spec(layer)
        assert spec is not None
        return spec

    @staticmethod
    def attending_layers(cache: KvCacheManager) -> list[int]:
        """Layers that have keys and values to attend to, those that share another's included."""
        return [layer for layer in range(cache.geometry.num_layers) if cache.geometry.producer(layer) is not None]
