"""The blocks: which are never handed out, what is copied and zeroed, and whose memory it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache_core import CacheGeometry, LayerGroup, ShapeError
from kvcache_core.paged import BlockPool
from kvcache_core.plugin import BlockCopy, BlockRows

GEOMETRY = CacheGeometry(
    num_layers=4,
    groups=(
        LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=4),
        LayerGroup(layers=(3,), num_kv_heads=1, head_dim=6, value_head_dim=2),
    ),
)
LAYERS = (0, 2, 3)


def as_is(indices: torch.Tensor) -> torch.Tensor:
    return indices


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(GEOMETRY, 4, 5, torch.zeros)


def both(pool: BlockPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.key(layer), pool.value(layer)


def number_everything(pool: BlockPool) -> None:
    """Give every element a number of its own."""
    for memory in pool.memory:
        memory.copy_(torch.arange(len(memory), dtype=torch.float32) + 1)


def test_the_null_block_and_the_trash_block_are_two_and_outside_what_is_handed_out(pool: BlockPool) -> None:
    assert pool.null_block == 0
    assert pool.trash_block == 6
    assert pool.key(0).shape == (7, 4, 2, 4)
    assert pool.trash_slot == 24


def test_one_allocation_holds_a_layer_group(pool: BlockPool) -> None:
    assert len(pool.memory) == 2
    storages = {tensor.untyped_storage().data_ptr() for layer in (0, 2) for tensor in both(pool, layer)}
    assert storages == {pool.memory[0].untyped_storage().data_ptr()}


def test_slots_are_the_rows_of_blocks(pool: BlockPool) -> None:
    number_everything(pool)
    for layer in LAYERS:
        assert torch.equal(pool.key_slots(layer)[3 * 4 + 2], pool.key(layer)[3, 2])
        assert torch.equal(pool.value_slots(layer)[3 * 4 + 2], pool.value(layer)[3, 2])
        assert pool.key_slots(layer).data_ptr() == pool.key(layer).data_ptr()


def test_the_described_layout_is_where_the_blocks_are(pool: BlockPool) -> None:
    number_everything(pool)
    for layer, group in ((0, 0), (2, 0), (3, 1)):
        for described, blocks in zip(pool.layout(layer), both(pool, layer), strict=True):
            assert torch.equal(pool.memory[group].as_strided(*described), blocks)


def test_a_copy_takes_the_asked_rows_in_every_layer_and_nothing_else(pool: BlockPool) -> None:
    number_everything(pool)
    before = {layer: [blocks.clone() for blocks in both(pool, layer)] for layer in LAYERS}
    pool.copy_rows([BlockCopy(source=2, target=5, rows=3)], as_is)
    for layer in LAYERS:
        for blocks, old in zip(both(pool, layer), before[layer], strict=True):
            old[5, :3] = old[2, :3]
            assert torch.equal(blocks, old)


def test_zeroing_spares_all_other_rows(pool: BlockPool) -> None:
    number_everything(pool)
    before = {layer: [blocks.clone() for blocks in both(pool, layer)] for layer in LAYERS}
    pool.zero([BlockRows(1, 0, 4), BlockRows(3, 2, 4), BlockRows(5, 0, 4)], as_is)
    for layer in LAYERS:
        for blocks, old in zip(both(pool, layer), before[layer], strict=True):
            old[[1, 5]] = 0
            old[3, 2:] = 0
            assert torch.equal(blocks, old)


def test_zeroing_nothing_is_no_error(pool: BlockPool) -> None:
    number_everything(pool)
    pool.zero([], as_is)
    assert pool.key(0).count_nonzero() == pool.key(0).numel()


def test_a_pool_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        pool = BlockPool(GEOMETRY, 4, 5, torch.zeros)
    pool.key_slots(0).index_copy_(0, torch.tensor([4]), torch.ones(1, 2, 4))
    assert pool.key(0)[1, 0].sum() == 8


def test_what_was_handed_out_stays_readable_after_the_pool_is_cleared(pool: BlockPool) -> None:
    number_everything(pool)
    key = pool.key(2)
    expected = key.clone()
    pool.clear()
    assert pool.nbytes == 0
    assert torch.equal(key, expected)


def test_a_written_null_block_is_found(pool: BlockPool) -> None:
    assert list(pool.nonzero_null_layers()) == []
    pool.value(3)[0, 1] = 1
    assert list(pool.nonzero_null_layers()) == [3]


@pytest.mark.parametrize("make", [lambda count: torch.zeros(count, 2)[:, 0], lambda count: torch.zeros(count + 1)])
def test_lmcache_5166_memory_that_is_not_in_a_row_is_refused(make: Callable[[int], torch.Tensor]) -> None:
    with pytest.raises(ShapeError, match="elements in a row"):
        BlockPool(GEOMETRY, 4, 5, make)
