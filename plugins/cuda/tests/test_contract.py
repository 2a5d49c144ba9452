"""The contract on the paged pool: rows of faults that other caches shipped, each over a real configuration."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvcache_core import CacheFullError, CacheGeometry, HandleError, KvCacheHandle, KvCacheManager
from kvcache_core.attention import attend_dense
from kvcache_core.config import PrefixCacheConfig
from kvcache_cuda.storage import CudaStorage
from plugins.cuda.tests.caches import spec_of

NewCache = Callable[..., KvCacheManager]


def tagged(start: int, stop: int, tag: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows that say which layer, position, role and sequence they are of."""
    positions = torch.arange(start, stop, dtype=torch.float32).view(-1, 1, 1).expand(-1, 2, 8)
    return [(positions + 1000 * tag + layer / 4, -positions - 1000 * tag - layer / 4) for layer in range(2)]


def grow(handle: KvCacheHandle, count: int, tag: int = 0, ids: Any = None) -> None:
    handle.append(tagged(handle.num_tokens, handle.num_tokens + count, tag), ids)


def holds(handle: KvCacheHandle, *pieces: tuple[int, int]) -> bool:
    """Whether a handle holds rows up to each `stop` with each `tag`, in order."""
    wanted, start = [], 0
    for stop, tag in pieces:
        wanted.append(tagged(start, stop, tag))
        start = stop
    for layer in range(2):
        both = handle.kv_cache(layer)
        assert both is not None
        for role in range(2):
            if not torch.equal(both[role], torch.cat([piece[layer][role] for piece in wanted])):
                return False
    return handle.num_tokens == start


def poisoned(**changes: Any) -> KvCacheManager:
    """A cache whose memory is NaN until it is written, with prefix reuse."""
    storage = CudaStorage(spec_of(**changes))
    for section in storage.pool.sections:
        section[:, 1:] = float("nan")
    return KvCacheManager(storage, prefix=PrefixCacheConfig(enabled=True, namespace="m"))


# -- append ------------------------------------------------------------------------------------------------


def test_mlx_lm_1097_what_was_handed_out_does_not_change_and_what_was_taken_is_a_copy(new_cache: NewCache) -> None:
    with new_cache().allocate() as handle:
        grow(handle, 5)
        table, count, keys = handle.block_table, handle.num_tokens, handle.key_cache(0)
        rows = tagged(5, 9)
        handle.append(rows)
        for key, value in rows:
            key.data.untyped_storage().fill_(0)
            value.data.untyped_storage().fill_(0)
        assert (table.sequence_length, count, len(keys)) == (5, 5, 5)  # type: ignore[arg-type]
        assert holds(handle, (9, 0))
        keys.zero_()  # type: ignore[union-attr]
        assert holds(handle, (9, 0))


def test_kvcached_364_an_append_that_fails_half_way_takes_nothing(new_cache: NewCache) -> None:
    cache = new_cache(budget="8 blocks")
    first, second = cache.allocate(), cache.allocate()
    grow(first, 20)
    with pytest.raises(CacheFullError):
        grow(second, 20, 1)
    assert cache.block_allocator.free_block_count == 3
    assert second.num_tokens == 0
    grow(second, 12, 1)
    assert holds(first, (20, 0))
    assert holds(second, (12, 1))
    first.free()
    second.free()


def test_transformers_30377_rows_of_zeros_are_tokens(new_cache: NewCache) -> None:
    with new_cache().allocate() as handle:
        for _ in range(3):
            handle.append([(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))] * 2)
        grow(handle, 2)
        assert handle.num_tokens == 5
        with handle.fork() as fork:
            fork.truncate(3)
            assert torch.equal(fork.key_cache(1), torch.zeros(3, 2, 8))


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
@pytest.mark.parametrize("capacity", [27, 32, 200])
def test_transformers_30400_results_do_not_depend_on_capacity_or_block_size(block_size: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(27, 2, 8, generator=generator) for _ in range(3))
    blocks = -(-capacity // block_size)
    with poisoned(geometry=CacheGeometry.uniform(1, 2, 8), block_size=block_size, num_blocks=blocks) as cache:
        handle, start, out = cache.allocate(), 0, []
        for count in (7, *([1] * 20)):
            rows = slice(start, start + count)
            with cache.step({handle: count}) as step:
                step.write(0, key[rows], value[rows])
                out.append(step.attend(0, query[rows]))
            start += count
        torch.testing.assert_close(torch.cat(out), attend_dense(query, key, value, scale=8**-0.5))
        handle.free()


def test_mlx_lm_1141_members_of_a_batch_keep_their_own_counts(new_cache: NewCache) -> None:
    cache = new_cache()
    handles = [cache.allocate() for _ in range(3)]
    for handle, count, tag in zip(handles, (0, 17, 9), range(3), strict=True):
        grow(handle, count, tag)
    rows = [tagged(0, 4, 0), tagged(17, 17, 1), tagged(9, 12, 2)]
    with cache.step(dict(zip(handles, (4, 0, 3), strict=True))) as step:
        for layer in range(2):
            step.write(layer, *(torch.cat([each[layer][role] for each in rows]) for role in range(2)))
    assert holds(handles[0], (4, 0))
    assert holds(handles[1], (17, 1))
    assert holds(handles[2], (12, 2))
    with cache.step(dict.fromkeys(handles, 0)):
        pass
    for handle in handles:
        handle.free()


# -- fork and truncate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 4, 16, 21])
def test_xllm_1984_diverging_sequences_keep_their_common_tokens(length: int) -> None:
    with poisoned() as cache:
        parent = cache.allocate()
        grow(parent, length)
        child = parent.fork()
        assert cache.stats().used_blocks == -(-length // 4)
        grow(parent, 1, 1)
        grow(child, 1, 2)
        assert holds(parent, (length, 0), (length + 1, 1))
        assert holds(child, (length, 0), (length + 1, 2))
        parent.free()
        assert holds(child, (length, 0), (length + 1, 2))
        child.free()


@pytest.mark.parametrize("pattern", [[0, 0, 1, 3], [2, 2, 2, 2], [3, 2, 1, 0], [0, 1, 2, 3]])
def test_vllm_417_beams_follow_their_own_lineage(pattern: list[int]) -> None:
    with poisoned(num_blocks=40) as cache:
        beams = [cache.allocate() for _ in range(4)]
        lineage: list[list[tuple[int, int]]] = [[] for _ in beams]
        for turn in range(9):
            if turn:
                survivors = [beams[parent].fork() for parent in pattern]
                lineage = [list(lineage[parent]) for parent in pattern]
                for beam in beams:
                    beam.free()
                beams = survivors
            for number, beam in enumerate(beams):
                tag = 10 * turn + number
                grow(beam, 1, tag)
                lineage[number].append((turn + 1, tag))
            for beam, pieces in zip(beams, lineage, strict=True):
                assert holds(beam, *pieces)
        assert cache.audit() == ()
        for beam in beams:
            beam.free()
        assert cache.stats().used_blocks == 0


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_sglang_31616_rejected_drafts_leave_no_block_behind(block_size: int) -> None:
    blocks = 400 // block_size + 2
    with poisoned(block_size=block_size, num_blocks=blocks, max_sequence_length=400) as cache:
        handle, source = cache.allocate(), torch.Generator().manual_seed(0)
        for _ in range(120):
            drafts = int(torch.randint(1, 8, (1,), generator=source))
            if handle.num_tokens + drafts > 300:
                handle.truncate(3)
            before = handle.num_tokens
            grow(handle, drafts)
            handle.truncate(before + int(torch.randint(0, drafts + 1, (1,), generator=source)))
            assert len(handle.block_table) == -(-handle.num_tokens // block_size)
            assert cache.stats().used_blocks == len(handle.block_table)
        handle.free()
        assert cache.block_allocator.free_block_count == blocks


def test_mlx_lm_1437_positions_after_a_rollback_are_those_of_a_fresh_run() -> None:
    geometry = CacheGeometry.uniform(1, 2, 8, window=8)
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(13, 2, 8, generator=generator) for _ in range(3))
    with poisoned(geometry=geometry) as cache:
        handle = cache.allocate()
        handle.append([(torch.cat([key[:10], key[:2] + 9]), torch.cat([value[:10], value[:2] - 9]))])
        handle.truncate(10)
        with cache.step({handle: 3}) as step:
            assert step.positions.tolist() == [10, 11, 12]
            step.write(0, key[10:], value[10:])
            got = step.attend(0, query[10:])
        torch.testing.assert_close(got, attend_dense(query[10:], key, value, scale=8**-0.5, window=8))
        handle.free()


# -- prefixes and tenants ----------------------------------------------------------------------------------


def test_vllm_mlx_385_a_shorter_match_shows_nothing_of_the_longer_ones_tail() -> None:
    with poisoned(scrub=False) as cache:
        first = cache.allocate(token_ids=range(24))
        grow(first, 24, 7, range(24))
        first.free()
        prompt = [*range(10), 99, 98, 97]
        with cache.allocate(token_ids=prompt) as second:
            assert second.num_tokens == 8
            assert holds(second, (8, 7))
            grow(second, 5, 3, prompt[8:])
            assert holds(second, (8, 7), (13, 3))
        with cache.allocate(token_ids=range(25)) as again:
            assert again.num_tokens == 24
            assert holds(again, (24, 7))


def test_vllm_16016_another_salt_finds_nothing_and_the_same_salt_does() -> None:
    with poisoned() as cache:
        mine = cache.allocate(token_ids=range(12), salt="a")
        grow(mine, 12, 1, range(12))
        mine.free()
        for salt, found in (("b", 0), (None, 0), ("a", 8)):
            with cache.allocate(token_ids=range(12), salt=salt) as handle:
                assert handle.num_tokens == found


def test_vllm_37076_a_match_pins_its_blocks_against_whoever_needs_room() -> None:
    with poisoned(num_blocks=4) as cache:
        first = cache.allocate(token_ids=range(16))
        grow(first, 16, 1, range(16))
        first.free()
        with cache.allocate(token_ids=range(13)) as matched:
            assert matched.num_tokens == 12
            with pytest.raises(CacheFullError):
                cache.allocate(num_tokens=8)
            assert holds(matched, (12, 1))


# -- threads and lifetimes ---------------------------------------------------------------------------------


def test_lmcache_1858_threads_that_append_fork_and_free_leave_the_books_sound() -> None:
    with poisoned(num_blocks=64) as cache:

        def work(tag: int) -> None:
            for _ in range(12):
                try:
                    with cache.allocate() as handle:
                        grow(handle, 6, tag)
                        with handle.fork() as fork:
                            grow(fork, 3, tag + 1)
                            assert holds(fork, (6, tag), (9, tag + 1))
                        assert holds(handle, (6, tag))
                except CacheFullError:
                    continue

        with ThreadPoolExecutor(6) as threads:
            for done in [threads.submit(work, 10 * number) for number in range(1, 7)]:
                done.result()
        assert cache.audit() == ()
        assert cache.stats().used_blocks == 0


def test_tensors_outlive_the_handle_and_the_cache(new_cache: NewCache) -> None:
    cache = new_cache()
    handle = cache.allocate()
    grow(handle, 6)
    keys = handle.key_cache(0)
    pool = handle.as_any().pool(0)[0]
    table = handle.block_table.physical_blocks
    handle.free()
    cache.close()
    del cache
    gc.collect()
    assert torch.equal(keys, tagged(0, 6)[0][0])
    assert torch.equal(pool[list(table)].flatten(0, 1)[:6], tagged(0, 6)[0][0])
    with pytest.raises(HandleError):
        handle.as_any().pool(0)
