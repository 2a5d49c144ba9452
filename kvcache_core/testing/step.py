"""The step: a transaction over one forward pass. What it accepts of drafted tokens is in the truncate part.

A test is named after a fault of another cache: `mlx-lm#1097` (a change of a returned tensor reaches the cache).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch

from kvcache_core.errors import CacheFullError, HandleError, StepError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.testing.conformance import Conformance

__all__ = ["StepConformance"]


class StepConformance(Conformance):
    """All lengths of a step move together, or none does."""

    # -- begin -------------------------------------------------------------------------------------------

    def test_begin_reserves_for_all_handles_or_for_none(self) -> None:
        with self.cache(num_blocks=8) as cache:
            first, tokens = self.filled(cache, 3 * self.block_size)
            second, third = cache.allocate(), cache.allocate()
            with pytest.raises(CacheFullError):
                cache.begin({first: 1, second: 2 * self.block_size, third: 3 * self.block_size})
            assert cache.stats().free_blocks == 5
            for handle, held in ((first, tokens), (second, []), (third, [])):
                self.assert_holds(handle, held)
            self.feed(cache, {second: self.tokens(2 * self.block_size), third: self.tokens(3 * self.block_size)})

    def test_a_sequence_is_named_once_in_a_step(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            clone = handle.clone_handle()
            with pytest.raises(StepError, match="same sequence"):
                cache.begin({handle: 1, clone: 1})
            step = cache.begin({handle: 1})
            with pytest.raises(StepError):
                cache.begin({clone: 1})
            step.abort()
            self.assert_holds(clone, tokens)

    def test_a_handle_in_an_open_step_cannot_be_changed_otherwise(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            clone, new = handle.clone_handle(), self.tokens(2)
            step = cache.begin({handle: new})
            changes: list[Callable[[], object]] = [
                handle.free,
                clone.free,
                handle.fork,
                lambda: clone.truncate(1),
                lambda: cache.extend(handle, 9),
                lambda: cache.deallocate(handle.request_id),
            ]
            for change in changes:
                with pytest.raises(StepError):
                    change()
            self.write(step, {handle: new})
            self.assert_holds(clone, tokens)
            step.commit()
            self.assert_holds(clone, tokens + new)

    def test_metadata_describes_the_packed_batch(self) -> None:
        with self.cache() as cache:
            size = self.block_size
            held = [self.filled(cache, length)[0] for length in (size + 1, 0, 2 * size)]
            step = cache.begin({held[0]: 2, held[1]: 0, held[2]: size + 1})
            assert step.num_new_tokens == size + 3
            positions = [size + 1, size + 2, *range(2 * size, 3 * size + 1)]
            assert step.positions.tolist() == positions
            assert step.cu_seqlens_q.tolist() == [0, 2, 2, size + 3]
            assert step.seq_lens.tolist() == [size + 3, 0, 3 * size + 1]
            assert step.last_token_index.tolist() == [1, -1, size + 2]
            tables = [handle.block_table for handle in held]
            slots = [tables[0].slot(p) for p in positions[:2]] + [tables[2].slot(p) for p in positions[2:]]
            assert step.slot_mapping.tolist() == slots
            assert len(set(slots)) == len(slots)
            width = step.block_tables.shape[1]
            for row, table in zip(step.block_tables.tolist(), tables, strict=True):
                used = list(table.physical_blocks)
                assert row == used + [0] * (width - len(used))
            for tensor, dtype in (
                (step.positions, torch.int64),
                (step.slot_mapping, torch.int64),
                (step.block_tables, torch.int32),
                (step.seq_lens, torch.int32),
                (step.cu_seqlens_q, torch.int32),
                (step.last_token_index, torch.int64),
            ):
                assert (tensor.dtype, tensor.device) == (dtype, cache.device)
            step.abort()

    def test_mlx_lm_1097_a_caller_may_change_the_metadata_it_was_given(self) -> None:
        with self.cache() as cache:
            victim, victims_tokens = self.filled(cache, self.block_size)
            handle, tokens = self.filled(cache, 2)
            new = self.tokens(self.block_size)
            with cache.step({handle: new}) as step:
                for given in (step.positions, step.slot_mapping, step.block_tables, step.seq_lens, step.cu_seqlens_q):
                    given.fill_(victim.block_table.slot(0))
                self.write(step, {handle: new})
                self.assert_holds(victim, victims_tokens)
            self.assert_holds(handle, tokens + new)
            self.assert_holds(victim, victims_tokens)

    # -- write and commit --------------------------------------------------------------------------------

    def test_nothing_of_a_step_is_visible_before_it_commits(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3)
            other, others_tokens = self.filled(cache, self.block_size)
            new = {handle: self.tokens(2), other: self.tokens(self.block_size)}
            step = cache.begin(new)
            self.write(step, new)
            self.assert_holds(handle, tokens)
            self.assert_holds(other, others_tokens)
            step.commit()
            self.assert_holds(handle, tokens + new[handle])
            self.assert_holds(other, others_tokens + new[other])

    def test_commit_refuses_while_a_layer_is_unwritten_and_the_step_goes_on(self) -> None:
        with self.cache() as cache:
            handle, new = cache.allocate(), self.tokens(3)
            step = cache.begin({handle: new})
            for layer in reversed(cache.geometry.caching_layers):
                with pytest.raises(StepError, match="missing"):
                    step.commit()
                assert handle.num_tokens == 0
                step.write(layer, *self.rows(cache, layer, [(new, 0)]))
                with pytest.raises(StepError, match="already written"):
                    step.write(layer, *self.rows(cache, layer, [(new, 0)]))
            step.commit()
            self.assert_holds(handle, new)

    def test_leaving_a_with_block_with_a_layer_unwritten_aborts(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 1)
            with pytest.raises(StepError, match="missing"), cache.step({handle: 1}):
                pass
            self.feed(cache, {handle: (new := self.tokens(1))})
            self.assert_holds(handle, tokens + new)

    def test_an_ended_step_takes_nothing_more(self) -> None:
        with self.cache() as cache:
            handle = cache.allocate()
            for end in ("commit", "abort"):
                new = self.tokens(1)
                step = cache.begin({handle: new})
                self.write(step, {handle: new})
                getattr(step, end)()
                assert step.state == ("committed" if end == "commit" else "aborted")
                uses: list[Callable[[], object]] = [
                    step.commit,
                    step.abort,
                    lambda step=step: step.accept(handle, 0),  # type: ignore[misc]
                    lambda step=step: step.write(0, *self.rows(cache, 0, [([1], 0)])),  # type: ignore[misc]
                ]
                for use in uses:
                    with pytest.raises(StepError):
                        use()
            assert handle.num_tokens == 1

    def test_steps_over_distinct_handles_may_interleave(self) -> None:
        with self.cache() as cache:
            held = [self.filled(cache, length) for length in (2, self.block_size, 0)]
            new = [self.tokens(3) for _ in held]
            steps = [cache.begin({handle: more}) for (handle, _), more in zip(held, new, strict=True)]
            for layer in cache.geometry.caching_layers:
                for step, (handle, _), more in zip(steps, held, new, strict=True):
                    step.write(layer, *self.rows(cache, layer, [(more, handle.num_tokens)]))
            steps[1].abort()
            steps[2].commit()
            steps[0].commit()
            self.assert_holds(held[0][0], held[0][1] + new[0])
            self.assert_holds(held[1][0], held[1][1])
            self.assert_holds(held[2][0], new[2])

    # -- abort -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["abort", "exception", "dropped"])
    def test_an_abort_restores_lengths_tables_data_and_free_counts(self, way: str) -> None:
        with self.cache() as cache:
            held = [self.filled(cache, length) for length in (0, 3, self.block_size)]
            shared = held[1][0].fork()
            held.append((shared, held[1][1]))
            before = [(handle.block_table, handle.stats().blocks_allocated) for handle, _ in held]
            free = cache.stats().free_blocks
            self._give_up(cache, {handle: self.tokens(self.block_size + 1) for handle, _ in held}, way)
            assert cache.stats().free_blocks == free
            assert [(handle.block_table, handle.stats().blocks_allocated) for handle, _ in held] == before
            assert cache.audit() == ()
            for handle, tokens in held:
                self.assert_holds(handle, tokens)
                more = self.tokens(self.block_size)
                self.feed(cache, {handle: more})
                self.assert_holds(handle, tokens + more)

    def _give_up(self, cache: KvCacheManager, new: dict[KvCacheHandle, list[int]], way: str) -> None:
        if way == "exception":
            with pytest.raises(KeyError), cache.step(new) as step:
                self.write(step, new)
                raise KeyError
            return
        step = cache.begin(new)
        self.write(step, new)
        if way == "abort":
            step.abort()
            return
        with pytest.warns(ResourceWarning, match="rolled back"):
            del step
            gc.collect()

    def test_reset_and_close_end_open_steps(self) -> None:
        with self.cache() as cache:
            handle = cache.allocate()
            step = cache.begin({handle: 1})
            cache.reset()
            with pytest.raises(HandleError) as caught:
                step.write(0, *self.rows(cache, 0, [([1], 0)]))
            assert caught.value.reason == "stale"
            for new in ({cache.allocate(): 1}, {}):
                with pytest.raises(KeyError), cache.step(new):
                    cache.reset()
                    raise KeyError
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step = cache.begin({})
                cache.reset()
                del step  # has nothing left to roll back
            assert cache.stats().free_blocks == cache.stats().total_blocks
            step = cache.begin({cache.allocate(): 1})
            cache.close()
            for use in (step.commit, step.abort, lambda: step.attend(0, torch.zeros(1, 2, self.head_dim))):
                with pytest.raises(HandleError) as caught:
                    use()
                assert caught.value.reason == "closed"

    # -- reading -----------------------------------------------------------------------------------------

    def test_a_step_reads_its_own_new_tokens_until_its_handles_change(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 3)
            new = self.tokens(self.block_size)
            query = self.random(len(new), 2, self.head_dim)
            step = cache.begin({handle: new})
            with pytest.raises(StepError, match="not written"):
                step.attend(0, query)
            with pytest.raises(StepError, match="not written"):
                step.gather(0)
            self.write(step, {handle: new})
            before = self.assert_attends(step, 0, query)
            step.commit()
            assert torch.equal(step.attend(0, query), before)
            key, value = step.gather(0, handle)
            both = handle.kv_cache(0)
            assert both is not None
            assert torch.equal(key, both[0])
            assert torch.equal(value, both[1])
            self.feed(cache, {handle: self.tokens(1)})
            for read in (lambda: step.attend(0, query), lambda: step.gather(0)):
                with pytest.raises(StepError, match="changed"):
                    read()

    def test_a_committed_step_cannot_read_what_its_commit_dropped(self) -> None:
        with self.cache() as cache:
            handle, new = cache.allocate(), self.tokens(2 * self.block_size)
            step = cache.begin({handle: new})
            self.write(step, {handle: new})
            step.accept(handle, 1)
            step.commit()
            other, tokens = self.filled(cache, 3 * self.block_size)
            for read in (
                lambda: step.gather(0, handle),
                lambda: step.attend(0, self.random(len(new), 2, self.head_dim)),
            ):
                with pytest.raises(StepError, match="dropped"):
                    read()
            self.assert_holds(other, tokens)

    def test_gather_wants_to_know_whose_rows(self) -> None:
        with self.cache() as cache:
            first, second, third = (cache.allocate() for _ in range(3))
            new = {first: self.tokens(1), second: self.tokens(2)}
            step = cache.begin(new)
            self.write(step, new)
            with pytest.raises(StepError, match="name a handle"):
                step.gather(0)
            with pytest.raises(StepError, match="not part"):
                step.gather(0, third)
            assert step.gather(0, second)[0].shape[0] == 2
            step.abort()
            with pytest.raises(StepError):
                step.gather(0, second)
