"""Numbers: bits that come back, and softmax at its limits.

Faults of other caches that these tests are named after: `transformers#25420` (storage faults taken for kernel
rounding), `pytorch#141128` (NaN turned into zero), `flashinfer#4051` (merging empty partial results gives NaN),
`flashinfer#4401` (a finite "minus infinity" loses valid very negative scores). `sglang#32477` is with the
perturbations.
"""

from __future__ import annotations

import math

import pytest
import torch

from kvcache_core.geometry import CacheGeometry
from kvcache_core.manager import KvCacheManager
from kvcache_core.step import Step
from kvcache_core.testing.conformance import Conformance

__all__ = ["NumericsConformance"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NumericsConformance(Conformance):
    """Storage changes no bit it does not say it changes; attention is a softmax, also where it is hard."""

    def odd_numbers(self, dtype: torch.dtype) -> list[float]:
        """Numbers that careless conversions change."""
        info = torch.finfo(dtype)
        return [0.0, -0.0, info.tiny, info.smallest_normal / 2, -info.max, info.max, math.inf, -math.inf, 1 + info.eps]

    def test_transformers_25420_stored_bits_come_back_unchanged(self, dtype: str) -> None:
        if self.round_trip_error:
            pytest.skip("the backend declares a round_trip_error")
        with self.cache(self.geometry("uniform"), dtype=dtype) as cache:
            handle, size = cache.allocate(), cache.block_size
            bits = BITS[cache.dtype.itemsize]
            shape = (2 * size + 1, 2, self.head_dim)
            generator = torch.Generator().manual_seed(1)
            noise = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, shape, dtype=bits, generator=generator)
            rows = noise.view(cache.dtype).clone()  # includes NaN of many payloads, and subnormals
            odd = torch.tensor(self.odd_numbers(cache.dtype), dtype=cache.dtype)
            rows[0, 0, : len(odd)] = odd
            rows = rows.to(cache.device)
            with cache.step({handle: len(rows)}) as step:
                for layer in cache.geometry.caching_layers:
                    step.write(layer, rows, rows.flip(0))
            fork = handle.fork()
            with cache.step({fork: 1}) as step:
                for layer in cache.geometry.caching_layers:
                    step.write(layer, rows[:1], rows[:1])
            for reader in (handle, fork):
                for layer in cache.geometry.caching_layers:
                    both = reader.kv_cache(layer)
                    assert both is not None
                    for stored, written in zip(both, (rows, rows.flip(0)), strict=True):
                        assert torch.equal(stored[: len(rows)].contiguous().view(bits), written.contiguous().view(bits))

    def test_a_declared_round_trip_error_is_kept(self, dtype: str) -> None:
        with self.cache(self.geometry("uniform"), dtype=dtype) as cache:
            handle = cache.allocate()
            spec, count = cache.own_spec(0), 3 * cache.block_size
            key = self.random(count, spec.num_kv_heads, spec.head_dim, dtype=cache.dtype)
            value = key.flip(0) * 100
            with cache.step({handle: count}) as step:
                for layer in cache.geometry.caching_layers:
                    step.write(layer, key, value)
            both = handle.kv_cache(1)
            assert both is not None
            for stored, written in zip(both, (key, value), strict=True):
                found, wanted = stored.cpu().double(), written.cpu().double()  # not every device has float64
                error = float(((found - wanted).abs() / wanted.abs().amax(dim=-1, keepdim=True)).max())
                assert error <= self.round_trip_error, f"{error:.5f} of a row's largest element"

    # -- softmax -----------------------------------------------------------------------------------------

    def one_layer(self, *, window: int | None = None) -> CacheGeometry:
        """One kv head and one layer: what is needed to look at single weights."""
        return CacheGeometry.uniform(1, 1, self.head_dim, window=window)

    def feed_rows(self, cache: KvCacheManager, key: torch.Tensor, value: torch.Tensor, *, new: int) -> Step:
        """Store rows in a new sequence, the last `new` of them in a step that is returned open."""
        handle, length = cache.allocate(), len(key)
        if length > new:
            with cache.step({handle: length - new}) as step:
                step.write(0, key[: length - new], value[: length - new])
        step = cache.begin({handle: new})
        step.write(0, key[length - new :], value[length - new :])
        return step

    @pytest.mark.parametrize("new", [1, 3, 20])
    def test_flashinfer_4401_very_negative_scores_keep_their_weights(self, dtype: str, new: int) -> None:
        if self.round_trip_error:
            pytest.skip("the backend declares a round_trip_error, which such scores would magnify")
        length = 24
        with self.cache(self.one_layer(), dtype=dtype) as cache:
            key = torch.zeros(length, 1, self.head_dim)
            key[:, 0, 0] = -240.0
            key[:, 0, 1] = torch.arange(length) / 16
            query = torch.zeros(new, 1, self.head_dim)
            query[:, 0, 0] = 256.0
            query[:, 0, 1] = 1.0
            key, query = (tensor.to(device=cache.device, dtype=cache.dtype) for tensor in (key, query))
            value = self.random(length, 1, self.head_dim, dtype=cache.dtype)
            for sign in (1.0, -1.0):
                step = self.feed_rows(cache, key * sign, value, new=new)
                out = self.assert_attends(step, 0, query, scale=1.0)
                assert bool((out != 0).any(dim=-1).all())
                step.abort()
                cache.reset()

    def test_flashinfer_4051_no_length_and_no_window_gives_nan(self) -> None:
        size = self.block_size
        for window in (None, 1, size, 2 * size + 1):
            with self.cache(self.one_layer(window=window), num_blocks=300 // size + 64) as cache:
                for length in (1, size - 1 or 1, size, size + 1, 31, 32, 33, 64, 129):
                    for new in {1, min(2, length), min(size, length), length}:
                        rows = [self.random(length, 1, self.head_dim, dtype=cache.dtype, seed=seed) for seed in (1, 2)]
                        step = self.feed_rows(cache, *rows, new=new)
                        out = self.assert_attends(step, 0, self.random(new, 2, self.head_dim, dtype=cache.dtype))
                        assert torch.isfinite(out).all()
                        step.abort()
                        cache.reset()

    @pytest.mark.parametrize("where", ["query", "key", "value"])
    def test_pytorch_141128_nan_reaches_the_rows_that_use_it_and_no_others(self, dtype: str, where: str) -> None:
        length = 20
        for window in (None, 4):
            for new in (length, 6, 3, 1):
                with self.cache(self.one_layer(window=window), dtype=dtype) as cache:
                    query, key, value = (
                        self.random(rows, 1, self.head_dim, dtype=cache.dtype, seed=seed)
                        for seed, rows in ((1, new), (2, length), (3, length))
                    )
                    bad = length - new // 2 - 1
                    {"query": query, "key": key, "value": value}[where][
                        new - new // 2 - 1 if where == "query" else bad
                    ] = math.nan
                    step = self.feed_rows(cache, key, value, new=new)
                    out = step.attend(0, query)
                    positions = range(length - new, length)
                    uses = [
                        position == bad
                        if where == "query"
                        else bad <= position and (window is None or position - window < bad)
                        for position in positions
                    ]
                    assert out.isnan().all(dim=-1).any(dim=-1).tolist() == uses
                    assert torch.isfinite(out[~torch.tensor(uses)]).all()
                    self.assert_attends(step, 0, query)
                    step.abort()
