"""What a paged handle shows of the pool, and what it refuses to show without a copy."""

from __future__ import annotations

import pytest
import torch

from kvcache_core import HandleError, KvCacheManager, ShapeError, WouldCopy
from kvcache_core.paged import PagedKvCacheHandle
from tests.caches import assert_holds, filled, grow, rows


def paged(handle: object) -> PagedKvCacheHandle:
    assert isinstance(handle, PagedKvCacheHandle)
    return handle


def test_the_pool_and_the_table_lead_to_the_tokens(cache: KvCacheManager) -> None:
    other, handle = filled(cache, 3, "b"), paged(filled(cache, 5))
    grow(other, 6, "b")
    grow(handle, 4)
    ids = handle.block_ids()
    assert ids.dtype is torch.int32
    key, value = handle.pool(1)
    assert torch.equal(key[ids.long()].flatten(0, 1)[:9], rows(cache, 1, 0, 9)[0])
    assert torch.equal(value[ids.long()].flatten(0, 1)[:9], rows(cache, 1, 0, 9)[1])


def test_the_pool_never_moves(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 1))
    before = handle.pool(2)[0].data_ptr()
    grow(handle, 30)
    assert handle.pool(2)[0].data_ptr() == before


def test_reserved_blocks_are_not_among_the_ids(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 4))
    cache.extend(handle, 9)
    assert len(handle.block_table) == 4
    assert len(handle.block_ids()) == 1


def test_neighbouring_blocks_are_shown_as_they_are(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 10))
    key, value = handle.dense(1)
    assert key.shape == (10, 2, 8)
    assert torch.equal(key, rows(cache, 1, 0, 10)[0])
    assert torch.equal(value, rows(cache, 1, 0, 10)[1])
    assert key.untyped_storage().data_ptr() == handle.pool(1)[0].untyped_storage().data_ptr()


def test_scattered_blocks_would_have_to_be_copied(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 4))
    between = filled(cache, 4, "b")
    grow(handle, 1)
    with pytest.raises(WouldCopy, match="block 1 is followed by block 3; use kv_cache") as caught:
        handle.dense(0)
    assert caught.value.export == "dense"
    assert_holds(handle, a=5)
    assert paged(between).dense(0)[0].shape == (4, 2, 8)


def test_an_empty_sequence_shows_nothing(cache: KvCacheManager) -> None:
    handle = paged(cache.allocate(num_tokens=9))
    assert handle.dense(0)[0].shape == (0, 2, 8)
    assert handle.block_ids().shape == (0,)
    assert handle.key_cache(0).shape == (0, 2, 8)


def test_waybarrios_vllm_mlx_385_no_gathered_tensor_carries_anothers_tail(cache: KvCacheManager) -> None:
    source, target = filled(cache, 24), cache.allocate()
    cache.share_prefix(source, target, 10)
    key = target.key_cache(0)
    assert key.shape[0] == 10
    assert key.untyped_storage().nbytes() == key.nbytes
    assert_holds(target, a=10)


def test_freed_handles_show_nothing(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 4))
    handle.free()
    for look in (lambda: handle.pool(0), lambda: handle.dense(0), handle.block_ids):
        with pytest.raises(HandleError):
            look()


def test_layers_that_do_not_exist_are_refused(cache: KvCacheManager) -> None:
    handle = paged(filled(cache, 4))
    for look in (handle.pool, handle.dense):
        with pytest.raises(ShapeError, match="from 0 to 2"):
            look(3)
