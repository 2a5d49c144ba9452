"""Failures of the storage itself, injected into every call in turn.

Whatever call fails, the operation that made it either has not happened or has happened whole: books, lengths and data
say the same, nothing leaks, and the next operation works. Faults of other caches: `kvcached#364` (a half-done
operation keeps what it took), `sglang#16067` (resources taken before a step is found impossible are not given back).
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.geometry import CacheGeometry
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.storage import Storage
from kvcache_core.testing.conformance import Conformance
from kvcache_core.testing.failing import CALLS, CALLS_THAT_MAY_FAIL_LATE, FailingStorage, InjectedFault

__all__ = ["FaultConformance"]


class InjectedInterrupt(KeyboardInterrupt):
    """A Ctrl-C that arrives in the middle of a call."""


class Witness:
    """What must be true of a cache, whatever fails: each live handle with the tokens it holds."""

    def __init__(self, kit: Conformance, cache: KvCacheManager, storage: FailingStorage) -> None:
        self.kit = kit
        self.cache = cache
        self.storage = storage
        self.held: dict[KvCacheHandle, list[int]] = {}
        self.failures = 0

    def check(self) -> None:
        """Compare books, lengths and data with what is known; no call fails meanwhile."""
        with self._unfailing():
            assert self.cache.audit() == ()
            assert set(self.cache.list_handles()) == set(self.held)
            used = {block for handle in self.held for block in handle.block_table.physical_blocks}
            stats = self.cache.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks - len(used)
            for handle, tokens in self.held.items():
                self.kit.assert_holds(handle, tokens)
                assert list(handle.token_ids) == tokens

    @contextmanager
    def _unfailing(self) -> Iterator[None]:
        calls, fail_at = self.storage.calls, self.storage.fail_at
        self.storage.calls, self.storage.fail_at = [], None
        try:
            yield
        finally:
            self.storage.calls, self.storage.fail_at = calls, fail_at

    def succeeds(self, operation: Callable[[], object]) -> bool:
        """Do something, and tell whether it got through without an injected failure."""
        try:
            operation()
        except (InjectedFault, InjectedInterrupt):
            self.failures += 1
            return False
        return True

    def attempt(self, operation: Callable[[], object]) -> None:
        """Do something that has not happened when it fails; then do it again."""
        if not self.succeeds(operation):
            self.check()
            operation()

    # -- operations --------------------------------------------------------------------------------------

    def allocate(self, room: int) -> KvCacheHandle:
        """Open a sequence."""
        made: list[KvCacheHandle] = []
        self.attempt(lambda: made.append(self.cache.allocate(num_tokens=room)))
        self.held[made[0]] = []
        return made[0]

    def prompt(self, tokens: list[int]) -> KvCacheHandle:
        """Open a sequence for a prompt and store it, or what of it is not found."""
        made: list[KvCacheHandle] = []
        self.attempt(lambda: made.append(self.cache.allocate(token_ids=tokens)))
        found = made[0].num_tokens
        self.held[made[0]] = tokens[:found]
        self.step({made[0]: tokens[found:]}, {})
        return made[0]

    def fork(self, source: KvCacheHandle) -> KvCacheHandle:
        """Fork a sequence."""
        made: list[KvCacheHandle] = []
        self.attempt(lambda: made.append(source.fork()))
        self.held[made[0]] = list(self.held[source])
        return made[0]

    def truncate(self, handle: KvCacheHandle, length: int) -> None:
        """Truncate; a failure may come before the cut or after it."""
        done = self.succeeds(lambda: handle.truncate(length))
        assert handle.num_tokens in (length, len(self.held[handle]))
        self.held[handle] = self.held[handle][: handle.num_tokens]
        if not done:
            self.check()
            handle.truncate(length)
            self.held[handle] = self.held[handle][:length]

    def step(self, new: Mapping[KvCacheHandle, Sequence[int]], accept: Mapping[KvCacheHandle, int]) -> None:
        """Do a whole step with attention; after a failure all handles have the new tokens, or none has."""
        kept = {handle: tokens[: accept.get(handle, len(tokens))] for handle, tokens in new.items()}

        def whole() -> None:
            with self.cache.step(new) as step:
                for layer in self.cache.geometry.caching_layers:
                    parts = [(tokens, handle.num_tokens) for handle, tokens in new.items()]
                    step.write(layer, *self.kit.rows(self.cache, layer, parts))
                    spec = self.cache.own_spec(layer)
                    query = self.kit.random(step.num_new_tokens, spec.num_kv_heads, spec.head_dim)
                    assert torch.isfinite(step.attend(layer, query)).all()
                    assert len(step.gather(layer, step.handles[0])[0]) == step.seq_lens[0]
                for handle, count in accept.items():
                    step.accept(handle, count)

        if self.succeeds(whole):
            self._note(kept)
            return
        moved = {handle.num_tokens == len(self.held[handle]) + len(kept[handle]) for handle in new if kept[handle]}
        assert len(moved) == 1, "some lengths moved and others did not"
        if moved == {True}:
            self._note(kept)
        self.check()
        if moved == {False}:
            whole()
            self._note(kept)

    def _note(self, kept: Mapping[KvCacheHandle, Sequence[int]]) -> None:
        for handle, tokens in kept.items():
            self.held[handle] = [*self.held[handle], *tokens]

    def abort(self, new: Mapping[KvCacheHandle, Sequence[int]]) -> None:
        """Begin, write and abort a step; even an abort that fails has undone it."""

        def write_and_abort() -> None:
            step = self.cache.begin(new)
            try:
                self.kit.write(step, new)
            finally:
                step.abort()

        self.succeeds(write_and_abort)
        self.check()

    def free(self, handle: KvCacheHandle) -> None:
        """Free a handle; even a free that fails has freed it."""
        self.succeeds(handle.free)
        assert not handle.is_valid
        del self.held[handle]
        self.check()

    def reset(self) -> None:
        """Drop everything; even a reset that fails has done it."""
        self.succeeds(self.cache.reset)
        assert not any(handle.is_valid for handle in self.held)
        self.held.clear()
        self.check()


class FaultConformance(Conformance):
    """A storage call that raises never leaves a cache in between."""

    def go_through_everything(self, witness: Witness) -> None:
        """Go through every operation of a cache."""
        size, tokens = self.block_size, self.tokens
        first, second = witness.allocate(size), witness.allocate(0)
        witness.step({first: tokens(size + 2), second: tokens(3)}, {})
        fork = witness.fork(first)
        witness.step({first: tokens(1), fork: tokens(2), second: tokens(size)}, {})
        witness.abort({fork: tokens(size + 1), second: tokens(1), first: tokens(2)})
        witness.step({second: tokens(size + 1), fork: tokens(size + 1)}, {second: 1, fork: 2})
        witness.truncate(fork, size + 1)
        again = witness.fork(fork)
        witness.truncate(second, 1)
        witness.step({again: tokens(1), second: tokens(2 * size)}, {})
        witness.free(fork)
        witness.check()
        witness.free(first)
        witness.step({again: tokens(2)}, {})
        prompt = tokens(2 * size + 1)
        for rest in (1, size, 1):
            witness.free(witness.prompt([*prompt, *tokens(rest)]))
        witness.prompt(tokens(18 * size))
        witness.reset()
        last = witness.allocate(3)
        witness.step({last: tokens(3)}, {})

    @pytest.mark.parametrize("kind", ["error", "late error", "interrupt", "error with reuse"])
    def test_kvcached_364_no_call_that_fails_leaves_a_trace(self, kind: str) -> None:
        calls = self.calls_of_everything(fail_at=None, kind=kind)
        always = {"open", "fork", "reserve", "truncate", "close", "write", "attend", "context"}
        assert always <= set(calls) <= CALLS
        for fail_at, name in enumerate(calls):
            if kind.startswith("error") or (name in CALLS_THAT_MAY_FAIL_LATE) == (kind == "late error"):
                self.calls_of_everything(fail_at=fail_at, kind=kind)

    def calls_of_everything(self, *, fail_at: int | None, kind: str) -> list[str]:
        """Go through everything with one call that fails, and return the storage calls made."""
        made: list[FailingStorage] = []

        def wrap(storage: Storage) -> Storage:
            error = InjectedInterrupt if kind == "interrupt" else InjectedFault
            made.append(FailingStorage(storage, fail_at=fail_at, late=kind == "late error", error=error))
            return cast("Storage", made[0])

        geometry = CacheGeometry.uniform(1, 2, self.head_dim)
        prefix = PrefixCacheConfig(enabled=kind == "error with reuse", namespace="model", max_prefixes=2)
        with self.cache(geometry, wrap=wrap, prefix=prefix, scrub=kind != "interrupt", num_blocks=24) as cache:
            witness = Witness(self, cache, made[0])
            try:
                self.go_through_everything(witness)
            except BaseException as problem:
                raise AssertionError(f"after the failure of call {fail_at}, {made[0].failed}: {problem!r}") from problem
            assert witness.failures == (fail_at is not None), f"the failure of {made[0].failed} was swallowed"
            calls, made[0].fail_at = list(made[0].calls), None
        return calls

    def test_sglang_16067_a_close_that_fails_has_closed(self) -> None:
        with self.failing_cache() as (cache, storage):
            handles = [self.filled(cache, 3)[0] for _ in range(3)]
            storage.fail_at = len(storage.calls)
            with pytest.raises(InjectedFault):
                cache.close()
            assert cache.closed
            assert not any(handle.is_valid for handle in handles)
            assert storage.calls.count("close") == 3

    def test_sglang_16067_a_dropped_step_that_cannot_be_undone_leaves_the_books_right(self) -> None:
        with self.failing_cache() as (cache, storage):
            handle, tokens = self.filled(cache, 3)
            other = cache.allocate()
            step = cache.begin({handle: 2})
            storage.fail_at = len(storage.calls)
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                unraisable: list[object] = []
                hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
                try:
                    del step
                    gc.collect()
                finally:
                    sys.unraisablehook = hook
            assert storage.calls[-1] == "truncate"
            assert cache.audit() == ()
            self.assert_holds(handle, tokens)
            more = self.tokens(self.block_size)
            self.feed(cache, {handle: more, other: more})
            self.assert_holds(handle, tokens + more)

    @contextmanager
    def failing_cache(self) -> Iterator[tuple[KvCacheManager, FailingStorage]]:
        """Open a cache over a storage that can be told to fail."""
        made: list[FailingStorage] = []

        def wrap(storage: Storage) -> Storage:
            made.append(FailingStorage(storage))
            return cast("Storage", made[0])

        with self.cache(wrap=wrap) as cache:
            yield cache, made[0]
