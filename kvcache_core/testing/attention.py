"""Attention over what is cached, against exact attention in float64.

Faults of other caches that these tests are named after: `pytorch#144858` (causal flag aligned to the wrong corner),
`accel#10` (prefill ignores the page table), `mlxcel#412` (prefill longer than the window loses early rows),
`lalamo#200` (window counted from the start of the chunk), `pytorch#103963` and `pytorch#174939` (nothing to attend
to), `transformers#30400` (results depend on how much was allocated). `pytorch#162588` (a mask of more than 2**32
elements) needs more memory than a test should take; the masks of core's own attention are bounded instead, which
core tests.
"""

from __future__ import annotations

import pytest
import torch

from kvcache_core.errors import ShapeError, StepError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.testing.conformance import Conformance

__all__ = ["AttentionConformance"]


class AttentionConformance(Conformance):
    """Query i of the new tokens sees every cached token and the new tokens up to i, and nothing else."""

    def query(self, cache: KvCacheManager, layer: int, rows: int, *, group: int = 3, seed: int = 9) -> torch.Tensor:
        """Return a random query for a layer, with `group` query heads to each kv head."""
        spec = self.layer_spec(cache, layer)
        return self.random(rows, group * spec.num_kv_heads, spec.head_dim, dtype=cache.dtype, seed=seed + layer)

    def extend_randomly(self, cache: KvCacheManager, handle: KvCacheHandle, count: int, *, seed: int = 0) -> None:
        """Append random rows."""
        if count:
            with cache.step({handle: count}) as step:
                self.write_random(step, seed=seed)

    def check_step(self, cache: KvCacheManager, new: dict[KvCacheHandle, int], *, group: int = 3) -> None:
        """Append random rows to several handles in one step and judge what every layer attends."""
        with cache.step(new) as step:
            self.write_random(step, seed=77)
            for layer in self.attending_layers(cache):
                self.assert_attends(step, layer, self.query(cache, layer, step.num_new_tokens, group=group))

    # -- masks -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("group", [1, 3])
    def test_pytorch_144858_the_last_query_sees_every_key(self, dtype: str, shape: str, group: int) -> None:
        with self.cache(self.geometry(shape), dtype=dtype) as cache:
            for queries, keys in ((1, 16), (2, 17), (5, 17), (16, 33), (17, 17), (1, 1), (20, 21), (40, 40)):
                handle = cache.allocate()
                self.extend_randomly(cache, handle, keys - queries)
                self.check_step(cache, {handle: queries}, group=group)
                handle.free()

    def test_pytorch_144858_more_queries_than_new_tokens_are_refused(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            with cache.step({handle: 3}) as step:
                self.write_random(step)
                good = self.query(cache, 0, 3)
                for wrong in (
                    torch.cat([good, good]),
                    good[:2],
                    good[:, :3],
                    good[:, :0],
                    good[..., :-1],
                    good[0],
                    good[None],
                    good.to(torch.int32),
                    good.to("meta"),
                    good.tolist(),
                    None,
                ):
                    with pytest.raises(ShapeError, match="query"):
                        step.attend(0, wrong)  # type: ignore[arg-type]
                self.assert_attends(step, 0, good)

    @pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 1000])
    def test_a_window_counts_the_token_itself(self, window: int) -> None:
        geometry = CacheGeometry.uniform(1, 2, self.head_dim, window=window)
        with self.cache(geometry) as cache:
            handle = cache.allocate()
            for count in (min(window, 20), 1, 5, 1, 16):
                self.check_step(cache, {handle: count})

    def test_mlxcel_412_a_prefill_longer_than_the_window_is_right_in_every_row(self, dtype: str) -> None:
        for window in (3, self.block_size, self.block_size + 1):
            geometry = CacheGeometry.uniform(1, 1, self.head_dim, window=window)
            with self.cache(geometry, dtype=dtype) as cache:
                handle = cache.allocate()
                self.check_step(cache, {handle: 3 * window + 1})
                assert handle.num_tokens == 3 * window + 1
                self.check_step(cache, {handle: 1})

    def test_lalamo_200_every_way_to_feed_the_tokens_gives_the_same_outputs(self) -> None:
        total = 20
        for window in (None, 6):
            geometry = CacheGeometry.uniform(1, 2, self.head_dim, window=window)
            query = self.random(total, 4, self.head_dim, seed=3)
            key, value = (self.random(total, 2, self.head_dim, seed=seed) for seed in (4, 5))
            outputs = []
            for chunks in ([1] * 20, [5] * 4, [20], [7, 13], [13, 1, 6]):
                with self.cache(geometry) as cache:
                    handle, rows = cache.allocate(), []
                    for count in chunks:
                        part = slice(handle.num_tokens, handle.num_tokens + count)
                        with cache.step({handle: count}) as step:
                            step.write(0, key[part].to(cache.dtype), value[part].to(cache.dtype))
                            rows.append(step.attend(0, query[part]))
                    outputs.append(torch.cat(rows))
            for other in outputs[1:]:
                self.assert_close(other, outputs[0].cpu().double(), value.to(cache.dtype), what="another chunking")

    # -- addressing --------------------------------------------------------------------------------------

    def scattered(self, cache: KvCacheManager, count: int) -> KvCacheHandle:
        """Return a handle whose block table is out of order, with holes taken by others."""
        size = cache.block_size
        others = [cache.allocate(num_tokens=size) for _ in range(8)]
        for index in (6, 1, 4):
            others[index].free()
        handle = cache.allocate()
        for index, first in enumerate(range(0, count, size)):
            if index == 2:
                others[2].free()
            self.extend_randomly(cache, handle, min(size, count - first), seed=first)
        for index in (0, 3, 5, 7):
            others[index].free()
        return handle

    def test_accel_10_no_query_length_assumes_blocks_in_order(self, dtype: str) -> None:
        size = self.block_size
        for queries in (1, 2, size, size + 1, 3 * size):
            with self.cache(dtype=dtype) as cache:
                handle = self.scattered(cache, 4 * size + 1)
                blocks = handle.block_table.physical_blocks
                assert list(blocks) != sorted(blocks)
                self.check_step(cache, {handle: queries})

    def test_transformers_30400_outputs_depend_on_neither_capacity_nor_block_size(self, block_size: int) -> None:
        geometry = self.geometry("uniform")
        outputs = []
        for capacity, size in ((27, self.block_size), (27, block_size), (64, block_size), (1024, block_size)):
            blocks = -(-1100 // size)
            with self.cache(geometry, block_size=size, num_blocks=blocks) as cache:
                handle, rows = cache.allocate(max_sequence_length=capacity), []
                for index, count in enumerate([7, *[1] * 20]):
                    with cache.step({handle: count}) as step:
                        self.write_random(step, seed=index)
                        rows.append(step.attend(0, self.random(count, 4, self.head_dim, seed=index)))
                outputs.append(torch.cat(rows))
                _, value = step.gather(0, handle)
        for other in outputs[2:]:
            assert torch.equal(other, outputs[1])
        # A kernel that sums block by block may round otherwise where blocks are larger.
        self.assert_close(outputs[1], outputs[0].cpu().double(), value, what=f"blocks of {block_size}")

    def test_a_ragged_batch_attends_as_each_sequence_does_alone(self, dtype: str) -> None:
        size = self.block_size
        histories, counts = (0, 3 * size + 1, 1, size, 0), (2, 1, size + 1, 0, 3)
        with self.cache(dtype=dtype) as cache:
            handles = [cache.allocate() for _ in histories]
            for index, (handle, length) in enumerate(zip(handles, histories, strict=True)):
                self.extend_randomly(cache, handle, length, seed=100 * index)
            forks = [handle.fork() for handle in handles]
            with cache.step(dict(zip(handles, counts, strict=True))) as step:
                self.write_random(step, seed=5)
                together = {
                    layer: self.assert_attends(step, layer, self.query(cache, layer, step.num_new_tokens))
                    for layer in self.attending_layers(cache)
                }
                written = {
                    layer: [step.gather(layer, handle) for handle in handles] for layer in cache.geometry.caching_layers
                }
                rows = [slice(*pair) for pair in zip(step.cu_seqlens_q[:-1], step.cu_seqlens_q[1:], strict=True)]
            for index, (fork, count) in enumerate(zip(forks, counts, strict=True)):
                with cache.step({fork: count}) as step:
                    for layer in cache.geometry.caching_layers:
                        key, value = written[layer][index]
                        step.write(layer, key[len(key) - count :], value[len(value) - count :])
                    for layer in self.attending_layers(cache):
                        query = self.query(cache, layer, sum(counts))[rows[index]]
                        alone, _ = step.attend(layer, query), None
                        value = step.gather(layer)[1]
                        self.assert_close(together[layer][rows[index]], alone.cpu().double(), value, what="in a batch")

    def test_a_shared_layer_attends_to_its_producers_rows(self) -> None:
        with self.cache(self.geometry("mixed")) as cache:
            handle = cache.allocate()
            with cache.step({handle: 4}) as step:
                query = self.query(cache, 0, 4)
                with pytest.raises(StepError, match="layer 0"):
                    step.attend(2, query)
                with pytest.raises(ShapeError, match="caches nothing"):
                    step.attend(3, query)
                self.write_random(step)
                assert torch.equal(step.attend(2, query), step.attend(0, query))

    # -- numbers -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("scale", [1.0, 0.25, 0.0, -1.0])
    def test_scale_multiplies_the_scores(self, scale: float) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            for count in (7, 1):
                with cache.step({handle: count}) as step:
                    self.write_random(step)
                    self.assert_attends(step, 1, self.query(cache, 1, count), scale=scale)

    @pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_outputs_have_the_dtype_of_the_query(self, dtype: str, query_dtype: torch.dtype) -> None:
        with self.cache(dtype=dtype) as cache:
            handle = cache.allocate()
            for count in (5, 1):
                with cache.step({handle: count}) as step:
                    self.write_random(step)
                    for layer in self.attending_layers(cache):
                        self.assert_attends(step, layer, self.query(cache, layer, count).to(query_dtype))

    def test_queries_may_have_any_strides(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            for count in (5, 1, 20):
                with cache.step({handle: count}) as step:
                    self.write_random(step)
                    query = self.query(cache, 0, count, group=2)
                    expected = step.attend(0, query)
                    for strided in (
                        query.transpose(0, 1).contiguous().transpose(0, 1),
                        query.permute(2, 1, 0).contiguous().permute(2, 1, 0),
                        query.repeat_interleave(2, dim=0)[::2],
                        query.repeat_interleave(2, dim=1)[:, ::2],
                        torch.cat([query, query], dim=2)[..., : self.head_dim],
                    ):
                        value = step.gather(0)[1]
                        self.assert_close(step.attend(0, strided), expected.cpu().double(), value, what="strided query")
                    assert torch.equal(query, self.query(cache, 0, count, group=2)), "the query was written to"

    def test_pytorch_103963_a_member_with_nothing_to_attend_to_disturbs_nobody(self) -> None:
        with self.cache() as cache:
            empty, filled = cache.allocate(), cache.allocate()
            self.extend_randomly(cache, filled, 3)
            for new in ({empty: 0, filled: 2}, {filled: 1, empty: 0}, {empty: 0}):
                self.check_step(cache, new)
            assert empty.num_tokens == 0

    def test_pytorch_174939_zero_sized_inputs_are_harmless(self, dtype: str) -> None:
        with self.cache(dtype=dtype) as cache:
            handle = cache.allocate()
            fork = handle.fork()
            self.check_step(cache, {handle: 0})
            self.check_step(cache, {fork: 0, handle: 0})
            self.extend_randomly(cache, handle, 2)
            handle.truncate(0)
            self.check_step(cache, {handle: 0})
            self.check_step(cache, {handle: 1})
            for layer in self.attending_layers(cache):
                both = fork.kv_cache(layer)
                assert both is not None
                assert (len(both[0]), len(both[1])) == (0, 0)
            with cache.step({}) as step:
                spec = self.layer_spec(cache, 0)
                query = self.random(0, spec.num_kv_heads, spec.head_dim)
                assert step.attend(0, query).shape == (0, spec.num_kv_heads, spec.value_head_dim)
