"""Forks: independent sequences over shared memory.

Faults of other caches that these tests are named after: `xllm#1984` (a block to write to is taken but the shared
rows are not copied), `MemOS#2301` (a stored prompt grows with every use), `vllm#417` (survivors of different parents
mixed up), `vllm-mlx#385` (a shorter view still shows the longer entry's tail), `llama.cpp#3825` (of two pending
adjustments only the last is applied).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from kvcache_core.errors import CacheFullError, HandleError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.testing.conformance import Conformance

__all__ = ["ForkConformance"]


class ForkConformance(Conformance):
    """Whatever one side writes, truncates or frees, the other does not see."""

    @pytest.mark.parametrize("extra", [0, 1, 5])
    def test_xllm_1984_both_sides_of_a_fork_diverge_and_keep_what_they_had(self, extra: int) -> None:
        for length in (extra and extra + self.block_size, 2 * self.block_size):
            for parent_first in (True, False):
                with self.cache() as cache:
                    parent, tokens = self.filled(cache, length)
                    fork = parent.fork()
                    assert fork.cache_id != parent.cache_id
                    self.assert_holds(fork, tokens)
                    assert fork.token_ids == parent.token_ids
                    history = {parent: list(tokens), fork: list(tokens)}
                    order = [parent, fork] if parent_first else [fork, parent]
                    for handle in order + order:
                        more = self.tokens(self.block_size - 1 or 1)
                        self.feed(cache, {handle: more})
                        history[handle] += more
                        for reader, held in history.items():
                            self.assert_holds(reader, held)
                    assert cache.audit() == ()

    def test_xllm_1984_both_sides_may_diverge_in_one_step(self) -> None:
        with self.cache() as cache:
            parent, tokens = self.filled(cache, self.block_size + 1)
            forks = [parent.fork() for _ in range(3)]
            new = {handle: self.tokens(index + 1) for index, handle in enumerate([parent, *forks])}
            self.feed(cache, new)
            for handle, more in new.items():
                self.assert_holds(handle, tokens + more)

    def test_a_fork_shares_memory_and_only_a_partial_block_is_copied(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            parent, tokens = self.filled(cache, 3 * size + 1)
            fork = parent.fork()
            if fork.stats().shared_blocks == 0:
                return  # this backend's forks are copies, and say so
            assert cache.stats().used_blocks == 4
            assert fork.block_table.physical_blocks == parent.block_table.physical_blocks
            assert fork.stats().memory_bytes == 2 * cache.bytes_per_block
            assert fork.stats().total_memory_bytes == 4 * cache.bytes_per_block
            new = self.tokens(1)
            self.feed(cache, {fork: new})
            partial = 1 if (3 * size + 1) % size else 0
            assert cache.stats().used_blocks == 4 + 1
            assert fork.block_table.physical_blocks[: 4 - partial] == parent.block_table.physical_blocks[: 4 - partial]
            assert fork.block_table.physical_blocks[4 - partial :] != parent.block_table.physical_blocks[4 - partial :]
            fork.free()
            assert cache.stats().used_blocks == 4
            self.assert_holds(parent, tokens)

    def test_forks_of_forks_are_independent(self) -> None:
        with self.cache(num_blocks=64) as cache:
            history: dict[KvCacheHandle, list[int]] = {}
            handle, tokens = self.filled(cache, self.block_size + 2)
            history[handle] = tokens
            for depth in range(4):
                fork = handle.fork()
                history[fork] = list(history[handle])
                for writer in (fork, handle)[: 1 + depth % 2]:
                    more = self.tokens(depth + 1)
                    self.feed(cache, {writer: more})
                    history[writer] += more
                handle = fork
            for reader, held in history.items():
                self.assert_holds(reader, held)
            for reader in list(history)[::2]:
                reader.free()
                del history[reader]
            for reader, held in history.items():
                self.assert_holds(reader, held)
                reader.free()
            assert cache.stats().free_blocks == 64

    def test_the_parent_may_go_first(self) -> None:
        with self.cache() as cache:
            parent, tokens = self.filled(cache, self.block_size + 2)
            forks = [parent.fork() for _ in range(2)]
            parent.free()
            other, others_tokens = self.filled(cache, 2 * self.block_size)
            for fork in forks:
                more = self.tokens(2)
                self.feed(cache, {fork: more})
                self.assert_holds(fork, tokens + more)
            self.assert_holds(other, others_tokens)

    def test_an_aborted_step_of_a_fork_leaves_the_sharing_as_it_was(self) -> None:
        with self.cache() as cache:
            parent, tokens = self.filled(cache, self.block_size + 1)
            fork = parent.fork()
            before, used = fork.block_table, cache.stats().used_blocks
            for handle in (fork, parent, fork):
                new = {handle: self.tokens(self.block_size)}
                step = cache.begin(new)
                self.write(step, new)
                step.abort()
                assert fork.block_table == before
                assert cache.stats().used_blocks == used
                for reader in (parent, fork):
                    self.assert_holds(reader, tokens)

    @pytest.mark.parametrize("way", ["fork", "copy", "deepcopy"])
    def test_memos_2301_deriving_from_a_stored_prompt_never_changes_it(self, way: str) -> None:
        ways: dict[str, Callable[[KvCacheHandle], KvCacheHandle]]
        ways = {"fork": lambda handle: handle.fork(), "copy": copy.copy, "deepcopy": copy.deepcopy}
        with self.cache() as cache:
            prompt, tokens = self.filled(cache, self.block_size + 2)
            table, stats = prompt.block_table, prompt.stats()
            new = self.tokens(8)
            runs = []
            for _ in range(3):
                run = ways[way](prompt)
                for token in new:
                    self.feed(cache, {run: [token]})
                self.assert_holds(run, tokens + new)
                runs.append(run)
                assert prompt.block_table == table
                self.assert_holds(prompt, tokens)
            for run in runs:
                self.assert_holds(run, tokens + new)
                run.free()
            assert prompt.stats().memory_bytes == stats.memory_bytes
            assert cache.stats().used_blocks == table.num_blocks

    @pytest.mark.parametrize("index_type", ["int", "int32 tensor"])
    def test_vllm_417_beams_read_the_history_of_their_own_lineage(self, index_type: str) -> None:
        patterns = [[0, 0, 1, 3], [2, 2, 2, 2], [3, 2, 1, 0], [0, 1, 2, 3], [1, 1, 0, 0]]
        with self.cache(num_blocks=64) as cache:
            first, tokens = self.filled(cache, self.block_size + 1)
            beams = [first, *(first.fork() for _ in range(3))]
            history = [list(tokens) for _ in beams]
            for pattern in patterns:
                parents = torch.tensor(pattern, dtype=torch.int32).tolist() if "tensor" in index_type else pattern
                survivors = [beams[parent].fork() for parent in parents]
                for beam in beams:
                    beam.free()
                new = {beam: self.tokens(1) for beam in survivors}
                self.feed(cache, new)
                beams, history = survivors, [history[p] + new[b] for p, b in zip(parents, survivors, strict=True)]
                for beam, held in zip(beams, history, strict=True):
                    self.assert_holds(beam, held)
                assert cache.audit() == ()
            for beam in beams:
                beam.free()
            assert cache.stats().free_blocks == 64

    def test_vllm_mlx_385_a_shorter_fork_shows_nothing_of_the_longer_ones_tail(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            longer, tokens = self.filled(cache, 6 * size)
            table = longer.block_table
            for kept in (2 * size + 2, 2 * size, 1, 0):
                shorter = longer.fork()
                shorter.truncate(kept)
                self.assert_holds(shorter, tokens[:kept])
                assert shorter.block_table.num_blocks == -(-kept // size)
                new = self.tokens(1)
                with cache.step({shorter: new}) as step:
                    self.write(step, {shorter: new})
                    for layer in self.attending_layers(cache):
                        key, value = step.gather(layer, shorter)
                        assert key.shape[0] == value.shape[0] == kept + 1
                    assert step.seq_lens.tolist() == [kept + 1]
                    assert step.block_tables.shape[1] == kept // size + 1
                self.assert_holds(shorter, tokens[:kept] + new)
                self.assert_holds(longer, tokens)
                shorter.free()
            assert longer.block_table == table

    def test_llama_cpp_3825_pending_operations_compose(self) -> None:
        size = self.block_size
        with self.cache() as lazy_cache, self.cache() as eager_cache:
            tokens, more = self.tokens(4 * size), self.tokens(size)
            handles = [lazy_cache.allocate(), eager_cache.allocate()]
            for cache, handle, eager in zip((lazy_cache, eager_cache), list(handles), (False, True), strict=True):
                self.feed(cache, {handle: tokens})
                for length in (3 * size + 1, 3 * size, size + 1):
                    handle.truncate(length)
                    if eager:
                        self.assert_holds(handle, tokens[:length])
                with handle.fork() as first:
                    fork = first.fork()
                if eager:
                    self.assert_holds(fork, tokens[: size + 1])
                fork.truncate(size)
                self.feed(cache, {fork: more})
                self.assert_holds(fork, tokens[:size] + more)
                self.assert_holds(handle, tokens[: size + 1])
                fork.free()

    def test_forks_of_an_empty_sequence_and_at_every_length_around_a_block(self) -> None:
        with self.cache() as cache:
            for length in (0, 1, self.block_size - 1, self.block_size, self.block_size + 1):
                parent, tokens = self.filled(cache, length)
                fork = parent.fork(request_id=f"fork at {length}")
                assert fork.request_id == f"fork at {length}"
                new = self.tokens(1)
                self.feed(cache, {fork: new})
                self.assert_holds(fork, tokens + new)
                self.assert_holds(parent, tokens)
                with pytest.raises(HandleError) as caught:
                    parent.fork(request_id=f"fork at {length}")
                assert caught.value.reason == "in-use"
                parent.free()
                fork.free()

    def test_a_step_that_has_no_room_for_its_copies_changes_nothing(self) -> None:
        with self.cache(num_blocks=2) as cache:
            parent, tokens = self.filled(cache, self.block_size + 1)
            try:
                fork = parent.fork()
            except CacheFullError:
                return  # this backend's forks are copies, for which there is no room either
            if self.block_size == 1:
                return
            with pytest.raises(CacheFullError):
                cache.begin({fork: 1})
            self.assert_holds(fork, tokens)
            fork.free()
            more = self.tokens(1)
            self.feed(cache, {parent: more})
            self.assert_holds(parent, tokens + more)
