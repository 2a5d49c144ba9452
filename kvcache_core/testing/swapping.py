"""Swapping, where the backend declares it.

Faults of other caches that these tests are named after: `sglang#22811` (a swapped sequence is read) and `vllm#546` (a
full host tier loses what did not fit).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache_core.errors import CacheFullError, HandleError, StepError, UnsupportedError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.sequence import HandleState
from kvcache_core.testing.conformance import Conformance

__all__ = ["SwapConformance"]


class SwapConformance(Conformance):
    """A sequence that went to the host tier comes back as it was, or stays there."""

    def require_tier(self, cache: KvCacheManager) -> None:
        """Skip the running test unless the backend swaps with these options."""
        self.require("swap")
        handle, _ = self.filled(cache, 1)
        try:
            cache.swap_out(handle)
        except UnsupportedError:
            pytest.skip("with these options the backend has no host tier to swap to")
        except CacheFullError:
            pytest.skip("with these options the host tier holds not even one block")
        finally:
            handle.free()

    def test_a_swapped_sequence_comes_back_as_it_was_and_its_blocks_serve_others(self) -> None:
        size = self.block_size
        for length in (0, 1, size, size + 1):
            with self.cache(num_blocks=4) as cache:
                self.require_tier(cache)
                handle, tokens = self.filled(cache, length)
                cache.swap_out(handle)
                assert handle.state is HandleState.SWAPPED
                assert cache.stats().free_blocks == cache.stats().total_blocks
                assert cache.audit() == ()
                other, _ = self.filled(cache, 4 * size)
                other.free()
                cache.swap_in(handle)
                cache.swap_in(handle)  # changes nothing
                assert handle.is_valid
                self.assert_holds(handle, tokens)
                assert list(handle.token_ids) == tokens
                new = self.tokens(size)
                with cache.step({handle: new}) as step:
                    self.write(step, {handle: new})
                    for layer in self.attending_layers(cache):
                        spec = self.layer_spec(cache, layer)
                        self.assert_attends(step, layer, self.random(size, spec.num_kv_heads, spec.head_dim))
                self.assert_holds(handle, tokens + new)

    def test_sglang_22811_a_swapped_sequence_cannot_be_used(self) -> None:
        with self.cache() as cache:
            self.require_tier(cache)
            handle, tokens = self.filled(cache, 2)
            clone = handle.clone_handle()
            cache.swap_out(handle)
            uses: list[Callable[[], object]] = [
                lambda: handle.num_tokens,
                lambda: handle.kv_cache(0),
                lambda: handle.block_table,
                handle.fork,
                lambda: clone.truncate(1),
                lambda: cache.begin({clone: 1}),
                lambda: cache.swap_out(clone),
            ]
            for use in uses:
                with pytest.raises(HandleError) as caught:
                    use()
                assert caught.value.reason == "swapped"
            cache.swap_in(clone)
            self.assert_holds(handle, tokens)

    def test_a_sequence_in_an_open_step_stays_where_it_is(self) -> None:
        with self.cache() as cache:
            self.require_tier(cache)
            handle, tokens = self.filled(cache, 2)
            new = self.tokens(1)
            with cache.step({handle: new}) as step:
                with pytest.raises(StepError):
                    cache.swap_out(handle)
                self.write(step, {handle: new})
            self.assert_holds(handle, tokens + new)

    def test_neither_side_of_a_fork_notices_that_the_other_is_swapped(self) -> None:
        size = self.block_size
        with self.cache(scrub=True) as cache:
            self.require_tier(cache)
            parent, tokens = self.filled(cache, size + 1)
            fork = parent.fork()
            for swapped, other in ((parent, fork), (fork, parent)):
                held = list(other.token_ids)
                cache.swap_out(swapped)
                self.assert_holds(other, held)
                more = self.tokens(size)
                self.feed(cache, {other: more})
                cache.swap_in(swapped)
                self.assert_holds(other, held + more)
                assert cache.audit() == ()
            self.assert_holds(fork, list(fork.token_ids))
            assert list(parent.token_ids)[: size + 1] == tokens
            self.assert_holds(parent, list(parent.token_ids))

    def test_a_sequence_without_room_stays_swapped_and_loses_nothing(self) -> None:
        size = self.block_size
        with self.cache(num_blocks=2) as cache:
            self.require_tier(cache)
            handle, tokens = self.filled(cache, size)
            cache.swap_out(handle)
            other, others = self.filled(cache, 2 * size)
            with pytest.raises(CacheFullError):
                cache.swap_in(handle)
            assert handle.state is HandleState.SWAPPED
            self.assert_holds(other, others)
            other.free()
            cache.swap_in(handle)
            self.assert_holds(handle, tokens)

    def test_vllm_546_a_full_tier_leaves_a_sequence_where_it_is(self) -> None:
        with self.cache() as cache:
            self.require_tier(cache)
            swapped: list[tuple[KvCacheHandle, list[int]]] = []
            kept: tuple[KvCacheHandle, list[int]] | None = None
            while kept is None and cache.stats().free_blocks and len(swapped) < 256:
                handle, tokens = self.filled(cache, self.block_size)
                try:
                    cache.swap_out(handle)
                    swapped.append((handle, tokens))
                except CacheFullError:
                    kept = handle, tokens
            if kept is not None:
                self.assert_holds(*kept)
                assert cache.audit() == ()
                kept[0].free()
            for handle, tokens in swapped:
                cache.swap_in(handle)
                self.assert_holds(handle, tokens)
                handle.free()

    def test_what_is_freed_or_brought_back_gives_up_its_place(self) -> None:
        with self.cache() as cache:
            self.require_tier(cache)
            for round_number in range(300):  # more than a tier of the kit's size holds
                handle, tokens = self.filled(cache, 1)
                cache.swap_out(handle)
                if round_number % 2:
                    cache.swap_in(handle)
                    self.assert_holds(handle, tokens)
                handle.free()
            handle, _ = self.filled(cache, 1)
            cache.swap_out(handle)
            cache.reset()
            assert cache.audit() == ()
