"""What breaks without a guard: one scenario for each, on whatever device the caches are opened."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from plugins.metal.tests.caches import append, assert_attends_exactly, random, rows_of

__all__ = ["SCENARIOS", "Open"]

#: Opens a cache; keyword arguments are fields of its `StorageSpec`.
Open = Callable[..., KvCacheManager]


def assert_holds(cache: KvCacheManager, handle: KvCacheHandle, count: int, seed: int = 0) -> None:
    """A handle holds the rows that `append` has written, in every layer."""
    for layer in cache.geometry.caching_layers:
        for stored, written in zip(handle.kv_cache(layer) or (), rows_of(cache, layer, count, seed), strict=True):
            assert torch.equal(stored, written)


def a_pool_beyond_4_gib_is_exact_at_its_far_end(open_cache: Open) -> None:
    """4.6 GB of K and as much of V, of which only the last blocks are used."""
    far = CacheGeometry.uniform(1, 8, 128)
    with open_cache(
        geometry=far, num_blocks=140_000, block_size=16, dtype="bfloat16", max_sequence_length=4096
    ) as cache:
        allocator = cache.block_allocator
        skipped = allocator.allocate_blocks(allocator.free_block_count - 6)
        with cache.allocate() as handle:
            append(cache, handle, 40)
            assert max(handle.block_table.physical_blocks) > 139_990
            assert_holds(cache, handle, 40)
            assert_attends_exactly(cache, {handle: 1}, heads=8)
            assert_attends_exactly(cache, {handle: 20}, heads=8)
        allocator.free_blocks(skipped)


def layers_keys_and_values_do_not_write_over_each_other(open_cache: Open) -> None:
    with open_cache(scrub=True) as cache, cache.allocate() as handle:
        append(cache, handle, 6)
        fork = handle.fork()
        append(cache, fork, 3, seed=7)  # copies a block
        assert_holds(cache, handle, 6)
        fork.free()  # zeroes blocks
        assert_holds(cache, handle, 6)
        assert cache.audit() == ()


def rows_arrive_in_the_slots_they_are_sent_to(open_cache: Open) -> None:
    with open_cache() as cache, cache.allocate() as first, cache.allocate() as second:
        append(cache, first, 5)
        append(cache, second, 5, seed=3)
        assert_holds(cache, first, 5)
        assert_holds(cache, second, 5, seed=3)
        assert_attends_exactly(cache, {second: 1, first: 1})


def rows_in_any_memory_are_stored_and_attended_by_value(open_cache: Open) -> None:
    """A model hands over views of `[batch, heads, tokens, dim]`."""
    with open_cache() as cache, cache.allocate() as handle:
        with cache.step({handle: 20}) as step:
            for layer in range(2):
                key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in rows_of(cache, layer, 20))
                assert not key.is_contiguous()
                step.write(layer, key, value)
        assert_holds(cache, handle, 20)
        assert_attends_exactly(cache, {handle: 3})
        with cache.step({handle: 4}) as step:
            for layer in range(2):
                step.write(layer, *rows_of(cache, layer, 4))
                query = random(4, 4, 64, device=cache.device)
                strided = query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
                assert torch.equal(step.attend(layer, strided), step.attend(layer, query))


def decoding_many_tokens_takes_few_shapes(open_cache: Open) -> None:
    geometry = CacheGeometry.uniform(1, 2, 64)
    with open_cache(geometry=geometry) as cache, cache.allocate() as handle:
        for _ in range(120):
            with cache.step({handle: 1}) as step:
                step.write(0, *rows_of(cache, 0, 1))
                step.attend(0, random(1, 4, 64, device=cache.device))


def more_query_heads_than_kv_heads_are_attended(open_cache: Open) -> None:
    with open_cache() as cache, cache.allocate() as one, cache.allocate() as two:
        assert_attends_exactly(cache, {one: 20, two: 3}, heads=6)
        assert_attends_exactly(cache, {one: 1, two: 1}, heads=6)


def no_query_sees_a_later_token_or_anothers(open_cache: Open) -> None:
    with open_cache(dtype="float16") as cache, cache.allocate() as one, cache.allocate() as two:
        assert_attends_exactly(cache, {one: 64}, heads=2)
        assert_attends_exactly(cache, {two: 3}, heads=2)
        assert_attends_exactly(cache, {two: 5}, heads=4)
        assert_attends_exactly(cache, {one: 1}, heads=2)
    with open_cache(dtype="bfloat16") as cache, cache.allocate() as one, cache.allocate() as two:
        assert_attends_exactly(cache, {one: 30})
        assert_attends_exactly(cache, {two: 21})
        assert_attends_exactly(cache, {one: 1, two: 1})


def values_of_another_dim_than_keys_are_attended(open_cache: Open) -> None:
    for dim, value_dim in ((64, 16), (16, 64)):
        geometry = CacheGeometry.uniform(2, 2, dim, value_head_dim=value_dim)
        with open_cache(geometry=geometry) as cache, cache.allocate() as handle:
            assert_attends_exactly(cache, {handle: 20})
            assert_attends_exactly(cache, {handle: 1})


#: For each guard, what fails without it.
SCENARIOS: dict[str, Callable[[Open], None]] = {
    "blocking_uploads": rows_arrive_in_the_slots_they_are_sent_to,
    "bounded_tensors": a_pool_beyond_4_gib_is_exact_at_its_far_end,
    "bucketed_lengths": decoding_many_tokens_takes_few_shapes,
    "contiguous_operands": rows_in_any_memory_are_stored_and_attended_by_value,
    "equal_head_dims": values_of_another_dim_than_keys_are_attended,
    "float_mask": no_query_sees_a_later_token_or_anothers,
    "folded_heads": more_query_heads_than_kv_heads_are_attended,
    "whole_tensors": layers_keys_and_values_do_not_write_over_each_other,
}
