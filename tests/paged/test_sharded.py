"""A pool in several tensors: each small enough, and together one pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache_core import CacheGeometry, LayerGroup, ShapeError
from kvcache_core.errors import WouldCopy
from kvcache_core.paged import BlockPool, Pool, ShardedPool, slots_of
from kvcache_core.plugin import BlockCopy, BlockRows

GEOMETRY = CacheGeometry(
    num_layers=4,
    groups=(
        LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=4),
        LayerGroup(layers=(3,), num_kv_heads=1, head_dim=6, value_head_dim=2),
    ),
)
LAYERS = (0, 2, 3)
SIZE, BLOCKS = 4, 5
#: A block of the widest layer has 32 elements, so that a tensor holds 2 blocks and the one for unwanted writes.
THREE_SHARDS = 3 * 32

Make = Callable[[], Pool]


def as_is(indices: torch.Tensor) -> torch.Tensor:
    return indices


def sharded(max_elements: int | None = THREE_SHARDS) -> ShardedPool:
    return ShardedPool(GEOMETRY, SIZE, BLOCKS, torch.zeros, max_elements=max_elements)


def rows(layer: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    group = next(group for group in GEOMETRY.groups if layer in group.layers)
    generator = torch.Generator().manual_seed(100 * seed + layer)
    key = torch.randn(count, group.num_kv_heads, group.head_dim, generator=generator)
    return key, torch.randn(count, group.num_kv_heads, group.value_head_dim, generator=generator)


def filled(pool: Pool) -> Pool:
    """Write every row that can be handed out."""
    slots = torch.arange(SIZE, (BLOCKS + 1) * SIZE)
    for layer in LAYERS:
        pool.write(layer, slots, *rows(layer, len(slots)))
    return pool


def assert_same(one: Pool, other: Pool) -> None:
    """Every block of two pools holds the same in every layer."""
    for layer in LAYERS:
        for block in range(BLOCKS + 1):
            for mine, theirs in zip(
                one.gather(layer, [block], SIZE, as_is), other.gather(layer, [block], SIZE, as_is), strict=True
            ):
                assert torch.equal(mine, theirs)


@pytest.fixture(params=[None, THREE_SHARDS, 2 * 32], ids=["one shard", "three shards", "a block a shard"])
def pool(request: pytest.FixtureRequest) -> ShardedPool:
    return sharded(request.param)


@pytest.fixture
def twin() -> BlockPool:
    """A pool of one allocation, filled alike, to compare with."""
    pool = filled(BlockPool(GEOMETRY, SIZE, BLOCKS, torch.zeros))
    assert isinstance(pool, BlockPool)
    return pool


def test_no_tensor_is_larger_than_allowed_and_each_starts_its_allocation() -> None:
    pool = sharded()
    assert (pool.num_shards, pool.blocks_per_shard) == (3, 2)
    tensors = list(pool.tensors)
    assert len(tensors) == 3 * 2 * len(LAYERS)
    assert all(tensor.numel() <= THREE_SHARDS and tensor.is_contiguous() for tensor in tensors)
    assert all(tensor.storage_offset() == 0 for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_a_block_that_fits_no_tensor_is_refused() -> None:
    with pytest.raises(ShapeError, match="smaller block_size"):
        sharded(2 * 32 - 1)


def test_rows_come_back_from_whatever_shards_they_are_in(pool: ShardedPool, twin: BlockPool) -> None:
    filled(pool)
    assert_same(pool, twin)
    for layer in LAYERS:
        for blocks, count in (((5, 1, 4, 2), 14), ((3,), 1), ((2, 3), 8), ((1, 2, 3, 4, 5), 20), ((), 0)):
            found, wanted = (each.gather(layer, blocks, count, as_is) for each in (pool, twin))
            for mine, theirs in zip(found, wanted, strict=True):
                assert torch.equal(mine, theirs)


def test_a_read_shares_no_memory_with_the_pool(pool: ShardedPool) -> None:
    filled(pool)
    key, value = pool.gather(0, [1], 3, as_is)
    key.zero_()
    value.zero_()
    again = pool.gather(0, [1], 3, as_is)
    assert all(tensor.all() for tensor in again)


def test_unwanted_writes_change_no_block(pool: ShardedPool, twin: BlockPool) -> None:
    filled(pool)
    for layer in LAYERS:
        pool.write(layer, torch.full((3,), pool.trash_slot), *rows(layer, 3, seed=7))
    assert_same(pool, twin)


def test_a_copy_between_shards_takes_the_asked_rows_and_nothing_else(pool: ShardedPool, twin: BlockPool) -> None:
    filled(pool)
    copies = [BlockCopy(source=1, target=5, rows=3), BlockCopy(source=4, target=3, rows=4)]
    for each in (pool, twin):
        each.copy_rows(copies, as_is)
        each.copy_rows([BlockCopy(source=2, target=1, rows=0)], as_is)
    assert_same(pool, twin)


def test_zeroing_spares_all_other_rows(pool: ShardedPool, twin: BlockPool) -> None:
    filled(pool)
    for each in (pool, twin):
        each.zero([BlockRows(1, 0, 4), BlockRows(3, 2, 4), BlockRows(5, 0, 1)], as_is)
        each.zero([], as_is)
    assert_same(pool, twin)


def test_a_written_null_block_is_found(pool: ShardedPool) -> None:
    filled(pool)
    assert list(pool.nonzero_null_layers()) == []
    pool.write(3, torch.tensor([2]), *rows(3, 1))
    assert list(pool.nonzero_null_layers()) == [3]


def test_a_layer_in_several_tensors_is_handed_out_as_none() -> None:
    with pytest.raises(WouldCopy, match="3 tensors"):
        sharded().key(0)
    with pytest.raises(WouldCopy, match="3 tensors"):
        sharded().value_slots(3)
    assert sharded(None).key(0).shape == (BLOCKS + 2, SIZE, 2, 4)
    assert sharded(None).value_slots(3).shape == ((BLOCKS + 2) * SIZE, 1, 2)


def test_a_pool_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        pool = sharded()
    filled(pool)


def test_its_bytes_are_those_of_its_tensors_and_it_gives_them_up(pool: ShardedPool) -> None:
    blocks = BLOCKS + 1 + pool.num_shards
    assert pool.nbytes == 4 * blocks * SIZE * (2 * 2 * 8 + 8)
    pool.clear()
    assert pool.nbytes == 0


def test_slots_of_any_part_of_a_sequence() -> None:
    assert slots_of((7, 2, 5), 4, 0, 10).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]
    assert slots_of((7, 2, 5), 4, 5, 9).tolist() == [9, 10, 11, 20]
    assert slots_of((7, 2, 5), 4, 8, 8).tolist() == []
