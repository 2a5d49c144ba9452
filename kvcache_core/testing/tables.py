"""Block tables, sizes and other values that a handle hands out.

Faults of other caches that these tests are named after: `mlx-lm#1097` (numbers handed out change afterwards),
`claude-code-local#47` (sizes of different meaning taken for each other), `flashinfer#320` (impossible tables
accepted).
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_core.errors import CacheFullError, HandleError, KvCacheError, ShapeError, StepError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.testing.conformance import Conformance

__all__ = ["TableConformance"]


class TableConformance(Conformance):
    """What is handed out is a value; what extends a table cannot break it."""

    def test_mlx_lm_1097_what_a_handle_hands_out_never_changes(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            length, table, stats, ids = handle.num_tokens, handle.block_table, handle.stats(), handle.token_ids
            whole, listed = cache.stats(), cache.list_handles()
            physical = table.physical_blocks
            self.feed(cache, {handle: self.tokens(2 * self.block_size)})
            handle.truncate(1)
            other = self.filled(cache, 1)
            assert (length, ids) == (3, tuple(tokens))
            assert (table.sequence_length, table.physical_blocks) == (3, physical)
            assert (stats.tokens_stored, whole.tokens_stored, whole.active_caches) == (3, 3, 1)
            assert listed == [handle]
            assert other[0].num_tokens == 1
            assert type(length) is int

    def test_mlx_lm_1097_changing_what_was_handed_out_does_not_change_the_cache(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, self.block_size + 1)
            handle.block_table.logical_to_physical.clear()
            cache.list_handles().clear()
            handle_ids = handle.token_ids
            assert isinstance(handle_ids, tuple)
            assert cache.audit() == ()
            self.assert_holds(handle, tokens)

    def test_claude_code_local_47_sizes_keep_their_relations(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            handle = cache.allocate()
            fork = None
            for length in sorted({0, 1, size - 1, size, size + 1, 3 * size}):
                self.feed(cache, {handle: self.tokens(length - handle.num_tokens)})
                self._assert_sizes(cache, handle, length)
                if fork is not None:
                    fork.free()
                fork = handle.fork()
                self._assert_sizes(cache, fork, length)
            for length in (2 * size + 1, size, 1, 0):
                handle.truncate(length)
                self._assert_sizes(cache, handle, length)
            with pytest.raises(CacheFullError):
                cache.begin({handle: 1000 * size})
            self._assert_sizes(cache, handle, 0)

    def _assert_sizes(self, cache: KvCacheManager, handle: KvCacheHandle, length: int) -> None:
        table, stats, size = handle.block_table, handle.stats(), cache.block_size
        assert handle.num_tokens == table.sequence_length == stats.tokens_stored == length
        assert table.num_blocks == stats.blocks_allocated == -(-length // size)
        assert table.capacity == table.num_blocks * size
        assert table.free_tokens == table.capacity - length
        assert stats.total_memory_bytes == table.num_blocks * cache.bytes_per_block
        assert 0 <= stats.memory_bytes <= stats.total_memory_bytes
        assert stats.utilization == (length / table.capacity if length else 0.0)
        assert 0 not in table.physical_blocks
        whole = cache.stats()
        assert whole.used_blocks + whole.loose_blocks + whole.free_blocks <= whole.total_blocks
        assert cache.audit() == ()

    def test_ids_are_never_repeated(self) -> None:
        with self.cache() as cache:
            seen = set()
            for _ in range(20):
                handle = cache.allocate()
                fork = handle.fork()
                seen |= {handle.cache_id, fork.cache_id}
                handle.free()
                fork.free()
            assert len(seen) == 40

    # -- the mutable table -------------------------------------------------------------------------------

    def test_the_mutable_table_extends_capacity_only(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            before = handle.block_table
            with handle.block_table_mut() as table:
                table.extend_sequence(4 * self.block_size)
                assert handle.block_table == before, "the table takes effect on exit"
            grown = handle.block_table
            assert grown.sequence_length == 3
            assert grown.free_tokens >= 4 * self.block_size
            more = self.tokens(4 * self.block_size)
            self.feed(cache, {handle: more})
            assert handle.block_table.physical_blocks == grown.physical_blocks
            self.assert_holds(handle, tokens + more)
            own = cache.block_allocator.allocate_blocks(1)
            with handle.block_table_mut() as table:
                table.add_blocks(own)
            assert handle.block_table.physical_blocks == (*grown.physical_blocks, *own)

    def test_flashinfer_320_an_impossible_table_is_refused_and_changes_nothing(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, self.block_size)
            other, others_tokens = self.filled(cache, self.block_size)
            mine, theirs = handle.block_table.physical_blocks[0], other.block_table.physical_blocks[0]
            loose = cache.block_allocator.allocate_blocks(1)
            free = cache.stats().free_blocks
            too_many = -(-handle.max_tokens // self.block_size)
            for blocks in ([mine], [theirs], [0], [-1], [10**6], loose * 2, [None], too_many):
                with pytest.raises(KvCacheError), handle.block_table_mut() as table:
                    table.add_blocks(blocks)  # type: ignore[arg-type]
                assert handle.block_table.physical_blocks == (mine,)
                assert cache.stats().free_blocks == free
                assert cache.audit() == ()
            for count in (-1, True, 1.5, None):
                with pytest.raises((ShapeError, TypeError)), handle.block_table_mut() as table:
                    table.extend_sequence(count)  # type: ignore[arg-type]
            cache.block_allocator.free_blocks(loose)
            self.assert_holds(handle, tokens)
            self.assert_holds(other, others_tokens)

    def test_an_exception_while_a_table_is_edited_changes_nothing(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 1)
            free = cache.stats().free_blocks
            with pytest.raises(KeyError), handle.block_table_mut() as table:
                table.add_blocks(3)
                raise KeyError
            assert handle.block_table.num_blocks == 1
            assert cache.stats().free_blocks == free
            with pytest.raises(HandleError), handle.block_table_mut() as table:
                table.add_blocks(1)
                handle.free()
            assert cache.stats().free_blocks == cache.stats().total_blocks

    @pytest.mark.parametrize("blocks", [[0], [1], [1, 1], [10**6], [None]])
    def test_blocks_that_are_not_the_callers_cannot_be_freed(self, blocks: list[Any]) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, self.block_size)
            assert handle.block_table.physical_blocks == (1,)
            with pytest.raises((HandleError, ShapeError)):
                cache.block_allocator.free_blocks(blocks)
            loose = cache.block_allocator.allocate_blocks(2)
            with pytest.raises(HandleError):
                cache.block_allocator.free_blocks([loose[0], loose[0]])
            cache.block_allocator.free_blocks(loose)
            with pytest.raises(HandleError):
                cache.block_allocator.free_blocks(loose)
            self.assert_holds(handle, tokens)

    def test_a_table_is_not_edited_during_a_step(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 1)
            step = cache.begin({handle: 1})
            with pytest.raises(StepError), handle.block_table_mut():
                pass
            step.abort()
