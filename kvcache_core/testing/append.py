"""Storing new tokens: what is written comes back, and what is refused leaves no trace.

Faults of other caches that these tests are named after: `kvcached#364` (an allocation that fails half way keeps what
it took), `rMLX#14` (a chunk that straddles the limit is written in part), `transformers#30377` (length guessed from
non-zero contents), `transformers#31644` (another model's keys accepted), `mlx-lm#1097` (the cache keeps the caller's
tensors), `mlx-lm#1141` (empty members of a batch), `pytorch#175191` (sources read in storage order).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.step import NewTokens
from kvcache_core.testing.conformance import Conformance

__all__ = ["AppendConformance"]

#: The same rows `[tokens, heads, dim]` under other strides.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads first": lambda rows: rows.transpose(0, 1).contiguous().transpose(0, 1),
    "dims first": lambda rows: rows.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every second row": lambda rows: rows.repeat_interleave(2, dim=0)[::2],
    "every second element": lambda rows: rows.repeat_interleave(2, dim=2)[..., ::2],
    "an offset into a longer buffer": lambda rows: torch.cat([rows.new_zeros(3, *rows.shape[1:]), rows])[3:],
    "a slice of fused projections": lambda rows: torch.cat([rows * 0, rows, rows * 0], dim=2)[
        ..., rows.shape[2] : 2 * rows.shape[2]
    ],
    "a batch of one": lambda rows: rows.transpose(0, 1)[None].contiguous()[0].transpose(0, 1),
}


class AppendConformance(Conformance):
    """Appending stores every token of every layer, or nothing."""

    def test_append_stores_a_whole_step_in_one_call(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 2)
            more = self.tokens(self.block_size)
            pairs = [self.rows(cache, layer, [(more, 2)]) for layer in cache.geometry.caching_layers]
            handle.append(pairs, more)
            self.assert_holds(handle, tokens + more)
            assert list(handle.token_ids) == tokens + more
            last = self.tokens(1)
            handle.append([self.rows(cache, n, [(last, handle.num_tokens)]) for n in cache.geometry.caching_layers])
            self.assert_holds(handle, tokens + more + last)
            assert list(handle.token_ids) == tokens + more, "what was not named stays anonymous"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_pytorch_175191_rows_are_read_whatever_their_strides(self, layout: str) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            more = self.tokens(self.block_size + 1)
            with cache.step({handle: more}) as step:
                for layer in cache.geometry.caching_layers:
                    key, value = self.rows(cache, layer, [(more, 3)])
                    step.write(layer, LAYOUTS[layout](key), LAYOUTS[layout](value))
            self.assert_holds(handle, tokens + more)

    def test_pytorch_175191_an_expanded_row_is_stored_for_each_token(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            key, value = self.rows(cache, 0, [([7], 0)])
            with cache.step({handle: 5}) as step:
                for layer in cache.geometry.caching_layers:
                    step.write(layer, key.expand(5, -1, -1), value.expand(5, -1, -1))
            stored = handle.key_cache(0)
            assert stored is not None
            assert bool(((stored - key).abs() <= self.round_trip_error).all())

    def test_mlx_lm_1097_the_cache_keeps_nothing_of_the_callers_tensors(self) -> None:
        with self.cache() as cache:
            handle, tokens = cache.allocate(), self.tokens(self.block_size + 1)
            with cache.step({handle: tokens}) as step:
                for layer in cache.geometry.caching_layers:
                    key, value = self.rows(cache, layer, [(tokens, 0)])
                    step.write(layer, key, value)
                    key.fill_(3)
                    value.fill_(3)
            self.assert_holds(handle, tokens)

    def test_transformers_30377_zero_rows_are_tokens_like_others(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            for count in (1, self.block_size, 1):
                with cache.step({handle: count}) as step:
                    for layer in cache.geometry.caching_layers:
                        key, value = self.rows(cache, layer, [([0] * count, 0)])
                        step.write(layer, key * 0, value * 0)
            length = self.block_size + 2
            assert handle.num_tokens == length
            fork = handle.fork()
            tokens = self.tokens(1)
            self.feed(cache, {handle: tokens})
            fork.truncate(length - 1)
            for reader, zeros in ((handle, length), (fork, length - 1)):
                for stored in (reader.key_cache(0), reader.value_cache(1)):
                    assert stored is not None
                    assert bool((stored[:zeros] == 0).all())
            stored = handle.key_cache(0)
            assert stored is not None
            assert bool((stored[length] != 0).all())

    def test_kvcached_364_an_append_that_does_not_fit_takes_nothing(self) -> None:
        with self.cache(num_blocks=8) as cache:
            size = self.block_size
            first, tokens = self.filled(cache, 5 * size)
            second = cache.allocate()
            with pytest.raises(CacheFullError) as caught:
                cache.begin({second: 5 * size})
            error = caught.value
            assert (error.needed, error.free) == (5, 3)
            assert "free" in str(error).splitlines()[0]
            assert cache.stats().free_blocks == 3
            assert (second.num_tokens, second.block_table.num_blocks) == (0, 0)
            assert cache.audit() == ()
            fitting = self.tokens(3 * size)
            self.feed(cache, {second: fitting})
            self.assert_holds(second, fitting)
            self.assert_holds(first, tokens)

    def test_kvcached_364_a_layer_refused_in_mid_step_leaves_no_layer_longer(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            free, new = cache.stats().free_blocks, self.tokens(self.block_size)
            layers = cache.geometry.caching_layers
            for bad in range(len(layers)):
                with pytest.raises(ShapeError), cache.step({handle: new}) as step:
                    for index, layer in enumerate(layers):
                        key, value = self.rows(cache, layer, [(new, 3)])
                        step.write(layer, key, value[:-1] if index == bad else value)
                assert cache.stats().free_blocks == free
                assert cache.audit() == ()
                self.assert_holds(handle, tokens)

    @pytest.mark.parametrize("chunk", [1, 3])
    def test_rmlx_14_a_chunk_that_straddles_the_limit_is_refused_whole(self, chunk: int) -> None:
        limit = 2 * self.block_size + 2
        with self.cache() as cache:
            small, large = cache.allocate(max_sequence_length=limit), cache.allocate()
            tokens: list[int] = []
            while len(tokens) + chunk <= limit:
                new = self.tokens(chunk)
                self.feed(cache, {small: new, large: new})
                tokens += new
            free = cache.stats().free_blocks
            with pytest.raises(CacheFullError):
                cache.begin({large: chunk, small: chunk})
            assert cache.stats().free_blocks == free
            for handle in (small, large):
                self.assert_holds(handle, tokens)
            rest = self.tokens(limit - len(tokens))
            self.feed(cache, {small: rest})
            self.assert_holds(small, tokens + rest)

    def test_a_prompt_longer_than_the_cache_is_refused_before_anything_happens(self) -> None:
        with self.cache(num_blocks=4) as cache:
            for count in (4 * self.block_size + 1, 10**9):
                assert not cache.can_allocate(num_tokens=count)
                with pytest.raises(CacheFullError):
                    cache.allocate(num_tokens=count)
            assert cache.list_handles() == []
            assert cache.stats().free_blocks == 4

    def test_transformers_31644_rows_of_another_shape_or_kind_are_refused_untouched(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle, tokens = self.filled(cache, 2)
            step = cache.begin({handle: 2})
            key, value = self.rows(cache, 0, [(self.tokens(2), 2)])
            other_dtype = torch.float16 if cache.dtype is not torch.float16 else torch.bfloat16
            for wrong in (
                key[:1],
                torch.cat([key, key]),
                key[:, :1],
                torch.cat([key, key], dim=1),
                key[..., :-1],
                key[0],
                key[None],
                key.transpose(0, 1)[..., :2],
                key.to(other_dtype),
                key.to(torch.int64),
                key > 0,
                key.to(torch.complex64),
                key.float().to("meta").to(cache.dtype),
                key.clone().requires_grad_(),
                key.tolist(),
                *([key.float().cpu().numpy()] if find_spec("numpy") else []),
                None,
            ):
                for pair in ((wrong, value), (key, wrong)):
                    with pytest.raises(ShapeError, match="layer 0"):
                        step.write(0, *pair)
            step.abort()
            self.assert_holds(handle, tokens)
            self._assert_layers_are_checked(cache)

    def _assert_layers_are_checked(self, cache: KvCacheManager) -> None:
        other = cache.allocate()
        step = cache.begin({other: 1})
        key, value = self.rows(cache, 0, [(self.tokens(1), 0)])
        for layer in (-1, cache.geometry.num_layers, 10**6, True, 0.0, None, "0"):
            with pytest.raises(ShapeError, match="layer"):
                step.write(layer, key, value)  # type: ignore[arg-type]
            with pytest.raises(ShapeError, match="layer"):
                step.attend(layer, key)  # type: ignore[arg-type]
        step.abort()
        other.free()

    def test_keys_and_values_may_have_different_head_dims(self) -> None:
        self.require("unequal_head_dims")
        for wide_keys in (True, False):
            narrow, wide = self.head_dim, self.head_dim + 16
            key_dim, value_dim = (wide, narrow) if wide_keys else (narrow, wide)
            with self.cache(CacheGeometry.uniform(2, 2, key_dim, value_head_dim=value_dim)) as cache:
                handle, tokens = self.filled(cache, self.block_size + 1)
                fork, new = handle.fork(), self.tokens(2)
                with cache.step({fork: new}) as step:
                    self.write(step, {fork: new})
                    self.assert_attends(step, 1, self.random(2, 4, key_dim))
                self.assert_holds(fork, tokens + new)
                self.assert_holds(handle, tokens)

    def test_layers_without_rows_of_their_own_are_not_written(self) -> None:
        with self.cache(self.geometry("mixed")) as cache:
            handle = cache.allocate()
            step = cache.begin({handle: 1})
            for layer in (2, 3):  # one shares, the other caches nothing
                with pytest.raises(ShapeError, match="layer"):
                    step.write(layer, *self.rows(cache, 0, [([1], 0)]))
            step.abort()

    @pytest.mark.parametrize(
        "layers",
        [None, 3, [], [()], {}, [None, None], [(None, None)] * 2, [(1, 2)] * 2, [(torch.tensor(1.0),) * 2] * 2, "kv"],
    )
    def test_append_refuses_what_is_no_list_of_pairs(self, layers: Any) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle, tokens = self.filled(cache, 2)
            with pytest.raises(ShapeError):
                handle.append(layers)
            self.assert_holds(handle, tokens)
            assert cache.audit() == ()

    @pytest.mark.parametrize(
        "new", [-1, True, 1.5, None, "ab", b"12345678", [1.5], [[1]], [2**63], torch.ones(2, 2).long()]
    )
    def test_new_tokens_that_are_no_count_and_no_ids_are_refused(self, new: Any) -> None:
        with self.cache() as cache:
            handle = cache.allocate()
            with pytest.raises(ShapeError):
                cache.begin({handle: new})
            if not isinstance(new, (int, float)) and new is not None:
                with pytest.raises(ShapeError):
                    cache.allocate(token_ids=new)
            assert cache.audit() == ()
            assert len(cache.list_handles()) == 1

    def test_mlx_lm_1141_a_ragged_batch_equals_appending_one_by_one(self) -> None:
        size = self.block_size
        lengths, counts = (0, 4 * size + 1, 8 * size + 1, 0, 2), (3, 0, size, 0, 1)
        with self.cache() as cache:
            held = [self.filled(cache, length) for length in lengths]
            new = [self.tokens(count) for count in counts]
            self.feed(cache, {handle: tokens for (handle, _), tokens in zip(held, new, strict=True)})
            for (handle, tokens), more in zip(held, new, strict=True):
                self.assert_holds(handle, tokens + more)

    def test_mlx_lm_1141_a_step_without_tokens_changes_nothing(self) -> None:
        with self.cache() as cache:
            held = [self.filled(cache, length) for length in (0, 3)]
            batches: list[dict[KvCacheHandle, NewTokens]]
            batches = [{}, {held[0][0]: 0}, {held[0][0]: [], held[1][0]: 0}]
            for batch in batches:
                with cache.step(batch) as step:
                    assert step.num_new_tokens == 0
                    if batch:
                        self.write(step, {handle: [] for handle in batch})
                with cache.step(batch):
                    pass  # nothing to write
            for handle, tokens in held:
                self.assert_holds(handle, tokens)

    def test_inference_mode_is_neither_needed_nor_remembered(self) -> None:
        with torch.inference_mode(), self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            fork = handle.fork()
            with torch.inference_mode(mode=False):
                more = self.tokens(self.block_size)
                self.feed(cache, {handle: more, fork: more})
                late, late_tokens = self.filled(cache, 2)
            self.feed(cache, {late: (again := self.tokens(self.block_size))})
            self.assert_holds(handle, tokens + more)
            self.assert_holds(late, late_tokens + again)
