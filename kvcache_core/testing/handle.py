"""The handle: identity, lifetime, and what it says about itself.

A test is named after a fault of another cache: `transformers#32946` (an operation found missing only when it is
needed).
"""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_core.errors import HandleError, ShapeError, UnsupportedError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.sequence import HandleState
from kvcache_core.storage import CAPABILITIES
from kvcache_core.testing.conformance import Conformance

__all__ = ["HandleConformance"]

#: Everything one can do with a handle that needs it to be valid.
USES: dict[str, Callable[[KvCacheManager, KvCacheHandle], Any]] = {
    "num_tokens": lambda cache, handle: handle.num_tokens,
    "token_ids": lambda cache, handle: handle.token_ids,
    "max_tokens": lambda cache, handle: handle.max_tokens,
    "device": lambda cache, handle: handle.device,
    "dtype": lambda cache, handle: handle.dtype,
    "num_layers": lambda cache, handle: handle.num_layers,
    "layer_spec": lambda cache, handle: handle.layer_spec(0),
    "block_table": lambda cache, handle: handle.block_table,
    "block_table_mut": lambda cache, handle: handle.block_table_mut().__enter__(),
    "dense_is_view": lambda cache, handle: handle.dense_is_view,
    "key_cache": lambda cache, handle: handle.key_cache(0),
    "value_cache": lambda cache, handle: handle.value_cache(0),
    "kv_cache": lambda cache, handle: handle.kv_cache(0),
    "append": lambda cache, handle: handle.append([]),
    "truncate": lambda cache, handle: handle.truncate(0),
    "clone_handle": lambda cache, handle: handle.clone_handle(),
    "fork": lambda cache, handle: handle.fork(),
    "copy": lambda cache, handle: copy.copy(handle),
    "deepcopy": lambda cache, handle: copy.deepcopy(handle),
    "free": lambda cache, handle: handle.free(),
    "stats": lambda cache, handle: handle.stats(),
    "with": lambda cache, handle: handle.__enter__(),
    "begin": lambda cache, handle: cache.begin({handle: 1}),
    "extend": lambda cache, handle: cache.extend(handle, 1),
}


class HandleConformance(Conformance):
    """A handle is one reference to one sequence, and true about it."""

    def test_declared_capabilities_are_the_storages(self) -> None:
        with self.cache() as cache:
            assert cache.capabilities == self.capabilities
            assert all(name in CAPABILITIES or name.startswith("export.") for name in self.capabilities)

    def test_transformers_32946_an_undeclared_capability_is_refused_at_once(self) -> None:
        with self.cache() as cache:
            for capability in CAPABILITIES - self.capabilities:
                with pytest.raises(UnsupportedError) as caught:
                    cache.require_capability(capability)
                assert caught.value.capability == capability

    def test_a_new_handle_is_empty_and_valid(self) -> None:
        with self.cache() as cache:
            handle = cache.allocate(request_id="new")
            assert (handle.is_valid, handle.state, handle.num_tokens) == (True, HandleState.ACTIVE, 0)
            assert handle.request_id == "new"
            assert handle.block_table.num_blocks == 0
            self.assert_holds(handle, [])

    def test_a_handle_describes_the_cache(self) -> None:
        with self.cache() as cache:
            handle = cache.allocate()
            assert (handle.device, handle.dtype) == (cache.device, cache.dtype)
            assert str(handle.dtype) == f"torch.{self.dtypes[0]}"
            assert handle.device.type == torch.device(self.device).type
            assert handle.num_layers == cache.geometry.num_layers
            assert handle.max_tokens == cache.max_sequence_length
            for layer in range(handle.num_layers):
                assert handle.layer_spec(layer) == cache.geometry.layer_spec(layer)

    def test_single_numbers_raise_where_layers_differ(self) -> None:
        with self.cache(self.geometry("uniform")) as cache:
            handle = cache.allocate()
            spec = self.layer_spec(cache, 0)
            assert (handle.num_heads, handle.num_kv_heads) == (spec.num_kv_heads, spec.num_kv_heads)
            assert (handle.head_dim, handle.value_head_dim) == (spec.head_dim, spec.value_head_dim)
        with self.cache(self.geometry("mixed")) as cache:
            handle = cache.allocate()
            for name in ("num_heads", "num_kv_heads", "head_dim", "value_head_dim"):
                with pytest.raises(ShapeError, match="layer_spec"):
                    getattr(handle, name)

    def test_the_handle_is_of_the_backends_own_type(self) -> None:
        with self.cache() as cache:
            handle = cache.allocate()
            own = type(handle)
            assert own is cache.storage.handle_type
            assert own is not KvCacheHandle
            assert handle.unwrap(own) is handle
            assert handle.as_any() is handle
            with handle.clone_handle() as clone, handle.fork() as fork:
                assert type(clone) is type(fork) is own

            class OtherHandle(KvCacheHandle):
                pass

            with pytest.raises(HandleError) as caught:
                handle.unwrap(OtherHandle)
            assert caught.value.reason == "foreign"

    def test_reads_show_exactly_the_stored_tokens_in_every_layer(self, shape: str) -> None:
        with self.cache(self.geometry(shape)) as cache:
            for count in (0, 1, self.block_size - 1, self.block_size, self.block_size + 1, 3 * self.block_size):
                handle, tokens = self.filled(cache, count)
                self.assert_holds(handle, tokens)
                assert list(handle.token_ids) == tokens
                handle.free()

    def test_a_layer_that_caches_nothing_reads_as_none_and_a_shared_one_as_its_producer(self) -> None:
        with self.cache(self.geometry("mixed")) as cache:
            handle, _ = self.filled(cache, 3)
            assert (handle.key_cache(3), handle.value_cache(3), handle.kv_cache(3)) == (None, None, None)
            for mine, producers in (
                (handle.key_cache(2), handle.key_cache(0)),
                (handle.value_cache(2), handle.value_cache(0)),
            ):
                assert mine is not None
                assert producers is not None
                assert torch.equal(mine, producers)

    @pytest.mark.parametrize("layer", [-1, 5, True, 1.0, "0", None])
    def test_a_layer_that_does_not_exist_is_refused(self, layer: Any) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 2)
            for read in (handle.key_cache, handle.value_cache, handle.kv_cache, handle.layer_spec):
                with pytest.raises(ShapeError, match="layer"):
                    read(layer)

    def test_free_ends_every_use_with_a_typed_error(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 5)
            name, cache_id = handle.request_id, handle.cache_id
            handle.free()
            assert (handle.is_valid, handle.state) == (False, HandleState.FREED)
            assert (handle.request_id, handle.cache_id) == (name, cache_id)
            assert "freed" in repr(handle)
            self._assert_unusable(cache, handle, "freed")

    def _assert_unusable(self, cache: KvCacheManager, handle: KvCacheHandle, reason: str) -> None:
        assert not handle.is_valid
        for name, use in USES.items():
            with pytest.raises(HandleError) as caught:
                use(cache, handle)
            assert caught.value.reason == reason, f"{name}: {caught.value.reason}"

    def test_freeing_twice_raises_and_harms_nobody(self) -> None:
        with self.cache() as cache:
            first, _ = self.filled(cache, 5)
            fork, clone = first.fork(), first.clone_handle()
            first.free()
            other, tokens = self.filled(cache, 7)
            for _ in range(2):
                with pytest.raises(HandleError):
                    first.free()
            assert cache.audit() == ()
            assert clone.num_tokens == fork.num_tokens == 5
            self.assert_holds(other, tokens)

    def test_a_clone_is_the_same_cache_and_keeps_it_alive(self) -> None:
        with self.cache() as cache:
            first, tokens = self.filled(cache, 3)
            clone = first.clone_handle()
            assert clone.cache_id == first.cache_id
            more = self.tokens(self.block_size)
            self.feed(cache, {clone: more})
            self.assert_holds(first, tokens + more)
            first.free()
            assert clone.is_valid
            self.assert_holds(clone, tokens + more)
            clone.free()
            assert cache.stats().free_blocks == cache.stats().total_blocks

    def test_dropped_handles_are_freed_with_a_warning(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 6)
            clone = handle.clone_handle()
            with pytest.warns(ResourceWarning, match="without free"):
                del handle
                gc.collect()
            assert clone.num_tokens == 6
            with pytest.warns(ResourceWarning, match="without free"):
                cycle: list[Any] = [clone]
                cycle.append(cycle)
                del clone, cycle
                cache.gc()
            assert cache.stats().free_blocks == cache.stats().total_blocks

    def test_as_a_context_manager_a_handle_frees_itself(self) -> None:
        with self.cache() as cache:
            with self.filled(cache, 4)[0] as handle:
                assert handle.num_tokens == 4
            assert not handle.is_valid
            with self.filled(cache, 4)[0] as handle:
                handle.free()

    def test_reset_makes_handles_stale_and_close_ends_them(self) -> None:
        with self.cache() as cache:
            stale, _ = self.filled(cache, 5)
            cache.reset()
            assert cache.stats().free_blocks == cache.stats().total_blocks
            self._assert_unusable(cache, stale, "stale")
            last, tokens = self.filled(cache, 5)
            self.assert_holds(last, tokens)
            cache.close()
            self._assert_unusable(cache, last, "closed")
            cache.close()

    def test_a_handle_of_another_cache_is_refused(self) -> None:
        with self.cache() as cache, self.cache() as other:
            foreign, tokens = self.filled(other, 3)
            mine, _ = self.filled(cache, 3)
            for use in (lambda: cache.begin({mine: 1, foreign: 1}), lambda: cache.extend(foreign, 1)):
                with pytest.raises(HandleError) as caught:
                    use()
                assert caught.value.reason == "foreign"
            self.feed(cache, {mine: self.tokens(1)})
            self.assert_holds(foreign, tokens)

    def test_copy_and_deepcopy_are_forks(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 5)
            for derive in (copy.copy, copy.deepcopy):
                with derive(handle) as duplicate:
                    assert duplicate.cache_id != handle.cache_id
                    self.feed(cache, {duplicate: self.tokens(2)})
            self.assert_holds(handle, tokens)

    def test_a_handle_is_not_pickled(self) -> None:
        with self.cache() as cache, cache.allocate() as handle, pytest.raises(HandleError):
            handle.__reduce_ex__(4)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no os.fork")
    def test_a_forked_process_cannot_use_the_cache_and_does_it_no_harm(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of threads, which this child does not need
                child = os.fork()
            if child == 0:
                os._exit(self._exit_code_of_child(cache, handle))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            self.assert_holds(handle, tokens)

    @staticmethod
    def _exit_code_of_child(cache: KvCacheManager, handle: KvCacheHandle) -> int:
        try:
            if handle.is_valid:
                return 1
            for use in (handle.free, lambda: handle.num_tokens, cache.allocate, lambda: cache.begin({handle: 1})):
                try:
                    use()
                except HandleError as error:
                    if error.reason != "forked-process":
                        return 2
                else:
                    return 3
            cache.close()
        except BaseException:  # noqa: BLE001 - a child of a test must end here, whatever happens
            return 4
        return 0
