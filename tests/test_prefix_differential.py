"""Random operations with prefix reuse on tiny pools, against a model; the audit and all data after each operation.

The K and V of a token depend on everything before it and on the key (see `tests.prompts`), so a hit that leads to the
wrong memory, a block that was reused too early or merged wrongly, or a name that outlived its contents shows in the
data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache_core import CacheFullError, CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.eviction import EVICTION_POLICIES
from tests.caches import StorageFailed, StorageMaker
from tests.prompts import STORAGES, assert_reads, explain, key_of, layers_for, make_prefix_cache

GEOMETRY = CacheGeometry.uniform(2, 1, 4)
MAX_TOKENS = 40
#: New tokens of two kinds, so that prompts meet and part; and which earlier prompt to continue, a recent one mostly.
TOKENS = st.tuples(st.integers(0, 12), st.integers(0, 4095)).map(
    lambda drawn: [drawn[1] >> i & 1 for i in range(drawn[0])]
)
RECENT = st.integers(0, 7)
ENDINGS = st.sampled_from(["free", "free", "free", "keep", "leave empty"])


@dataclass(eq=False)
class Live:
    """What the model knows of a handle: its tokens, how many leading ones were named, and who may find them."""

    handle: KvCacheHandle
    request: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    named: int = 0
    findable: bool = True

    def cut(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        self.named = min(self.named, num_tokens)

    def grow(self, new: Sequence[int], *, named: bool) -> None:
        if named and self.named == len(self.tokens):
            self.named += len(new)
        self.tokens += new


class PrefixMachine(RuleBasedStateMachine):
    """One cache, its handles, and the model of them."""

    storage: StorageMaker

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Live] = []
        self.prompts: list[list[int]] = [[]]
        self.now = 1_000_000.0
        self._time = time.time
        time.time = lambda: self.now

    def teardown(self) -> None:
        try:
            if hasattr(self, "cache"):
                self._end()
        finally:
            time.time = self._time

    def _end(self) -> None:
        for each in self.live:
            each.handle.free()
        self.live.clear()
        self.sound()
        assert self.cache.stats().used_blocks == 0
        self.cache.enable_prefix_caching(False)
        stats = self.cache.stats()
        assert (stats.free_blocks, stats.cached_blocks, stats.cached_prefixes) == (stats.total_blocks, 0, 0)
        self.cache.close()

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(12, 40),
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        max_prefixes=st.sampled_from([1000, 1000, 1000, 3, 1, 0]),
        min_prefix_length=st.sampled_from([0, 0, 3]),
        ttl=st.sampled_from([None, 10.0]),
        sharing=st.sampled_from([True, True, True, False]),
        scrub=st.booleans(),
    )
    def open(
        self,
        block_size: int,
        budget: int,
        policy: str,
        max_prefixes: int,
        min_prefix_length: int,
        ttl: float | None,
        sharing: bool,
        scrub: bool,
    ) -> None:
        prefix = PrefixCacheConfig(
            enabled=True,
            max_prefixes=max_prefixes,
            min_prefix_length=min_prefix_length,
            prefix_ttl_seconds=ttl,
            enable_cross_request_sharing=sharing,
        )
        self.cache: KvCacheManager = make_prefix_cache(
            type(self).storage,
            prefix=prefix,
            settings={"eviction_policy": EVICTION_POLICIES[policy]()},
            manager=KvCacheManager,
            geometry=GEOMETRY,
            block_size=block_size,
            num_blocks=budget // block_size,
            max_sequence_length=MAX_TOKENS,
            scrub=scrub,
        )

    # -- operations --------------------------------------------------------------------------------------

    @rule(
        base=RECENT,
        length=st.integers(0, MAX_TOKENS),
        new=TOKENS,
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 1),
        shorter=st.booleans(),
        name=st.sampled_from([None, None, "x", "y"]),
        ending=ENDINGS,
        failure=st.sampled_from([None] * 6 + ["open", "fork", "truncate", "close"]),
    )
    def prompt(self, base: int, length: int, new: list[int], shorter: bool, **fields: Any) -> None:
        longest = MAX_TOKENS - 8 if shorter else None
        self._prompt([*self.prompts[-1 - base % len(self.prompts)][:length], *new], longest, **fields)

    @rule(new=TOKENS, ending=ENDINGS)
    def next_turn(self, new: list[int], ending: str) -> None:
        """The latest prompt again, and more."""
        self._prompt([*self.prompts[-1], *new], None, salt=None, priority=0, name=None, ending=ending, failure=None)

    def _prompt(
        self,
        tokens: list[int],
        longest: int | None,
        *,
        salt: str | None,
        priority: int,
        name: str | None,
        ending: str,
        failure: str | None,
    ) -> None:
        tokens = tokens[: longest or MAX_TOKENS]
        if any(each.handle.request_id == name for each in self.live):
            name = None
        request: dict[str, Any] = {
            "salt": salt,
            "priority": priority,
            "max_sequence_length": longest,
            "request_id": name,
        }
        told = explain(self.cache, tokens, **request).num_tokens
        assert told >= self._least(tokens, request)
        with self._tolerating(failure):
            handle = self.cache.allocate(token_ids=tokens, **request)
            each = Live(handle, request, tokens[: handle.num_tokens], handle.num_tokens)
            self.live.append(each)
            self.prompts.append(tokens)
            assert handle.num_tokens == told
            assert told <= max(0, len(tokens) - 1)
            assert told % self.cache.block_size == 0
            assert_reads(handle, each.tokens, **request)
            if ending == "leave empty":
                return
            new = tokens[told:]
            handle.append(layers_for(self.cache, tokens, told, **request), new)
            each.grow(new, named=True)
            if ending == "free":
                self.live.remove(each)
                handle.free()

    def _least(self, tokens: list[int], request: dict[str, Any]) -> int:
        """What a prompt has to find, because live sequences hold it."""
        prefix, size = self.cache.store.prefixes.settings, self.cache.block_size
        if not prefix.enabled or not prefix.enable_cross_request_sharing:
            return 0
        found = 0
        for each in self.live:
            if (
                each.findable
                and key_of(each.request) == key_of(request)
                and each.request["max_sequence_length"] is None
            ):
                common = 0
                while common < min(each.named, len(tokens) - 1) and each.tokens[common] == tokens[common]:
                    common += 1
                found = max(found, common // size * size)
        return found if found >= prefix.min_prefix_length else 0

    @precondition(lambda self: self.live)
    @rule(
        picks=st.lists(st.integers(0, 100), min_size=1, max_size=3),
        new=TOKENS,
        named=st.sampled_from([True, True, True, False]),
        kept=st.integers(0, 9),
        ending=st.sampled_from(["commit", "commit", "accept", "abort"]),
        failure=st.sampled_from([None] * 6 + ["reserve", "truncate", "close"]),
    )
    def step(self, picks: list[int], new: list[int], named: bool, kept: int, ending: str, failure: str | None) -> None:
        chosen = list({id(each): each for each in (self.live[pick % len(self.live)] for pick in picks)}.values())
        new = new[: MAX_TOKENS - max(len(each.tokens) for each in chosen)]
        stop = min(kept, len(new)) if ending == "accept" else len(new)
        with self._tolerating(failure):
            step = self.cache.begin({each.handle: new if named else len(new) for each in chosen})
            pieces = [layers_for(self.cache, [*each.tokens, *new], len(each.tokens), **each.request) for each in chosen]
            for number, layer in enumerate(self.cache.geometry.caching_layers):
                keys, values = zip(*(piece[number] for piece in pieces), strict=True)
                step.write(layer, _cat(keys), _cat(values))
            self._audited()
            if ending == "abort":
                step.abort()
                return
            if ending == "accept":
                for each in chosen:
                    step.accept(each.handle, stop)
            step.commit()
            for each in chosen:
                each.grow(new[:stop], named=named)
                self.prompts.append(list(each.tokens))

    @precondition(lambda self: self.live)
    @rule(
        what=st.sampled_from(["truncate", "fork", "free", "free", "share"]),
        pick=st.integers(0, 100),
        other=st.integers(0, 100),
        count=st.integers(0, MAX_TOKENS),
        failure=st.sampled_from([None] * 6 + ["truncate", "fork", "close", "scrub"]),
    )
    def change(self, what: str, pick: int, other: int, count: int, failure: str | None) -> None:
        each, giver = self.live[pick % len(self.live)], self.live[other % len(self.live)]
        with self._tolerating(failure):
            if what == "truncate":
                self._truncate(each, min(count, len(each.tokens)))
            elif what == "fork":
                fork = each.handle.fork()
                self.live.append(Live(fork, each.request, list(each.tokens), each.named, each.findable))
            elif what == "free":
                self.live.remove(each)
                each.handle.free()
            elif giver is not each:
                self._truncate(each, 0)
                self._share(giver, each, min(count, len(giver.tokens), each.handle.max_tokens))
        assert each in self.live or not each.handle.is_valid

    def _truncate(self, each: Live, keep: int) -> None:
        try:
            each.handle.truncate(keep)
        finally:  # a storage that fails to scrub or close comes last
            each.cut(each.handle.num_tokens)

    def _share(self, giver: Live, taker: Live, count: int) -> None:
        try:
            self.cache.share_prefix(giver.handle, taker.handle, count)
        finally:
            if taker.handle.num_tokens:
                self._note_shared(giver, taker, taker.handle.num_tokens)

    def _note_shared(self, giver: Live, taker: Live, count: int) -> None:
        taker.tokens, taker.named = giver.tokens[:count], min(giver.named, count)
        same = giver.handle.sequence.prefix_key == taker.handle.sequence.prefix_key
        taker.findable = giver.findable and same
        taker.request = {**giver.request, "max_sequence_length": taker.request["max_sequence_length"]}

    @rule(
        what=st.sampled_from(["wait"] * 9 + ["gc"] * 9 + ["reset", "off and on"]), seconds=st.sampled_from([1, 4, 11])
    )
    def manage(self, what: str, seconds: int) -> None:
        if what == "wait":
            self.now += seconds
        elif what == "gc":
            self.cache.gc()
        elif what == "reset":
            assert self.cache.reset_prefix_cache() >= 0
        else:
            self.cache.enable_prefix_caching(False)
            assert self.cache.stats().cached_prefixes == 0
            self.cache.enable_prefix_caching()
        if what in ("reset", "off and on"):
            assert len(self.cache.store.prefixes.index) == 0
            for each in self.live:
                each.findable = False

    @contextmanager
    def _tolerating(self, failure: str | None) -> Iterator[None]:
        """Let the next call of a storage's method fail; what happens inside may run out of room."""
        storage: Any = self.cache.storage
        try:
            if failure is not None:
                setattr(storage, failure, _fail_once(storage, failure))
            yield
        except (CacheFullError, StorageFailed):
            pass
        finally:
            if failure is not None:
                delattr(storage, failure)

    # -- what always holds -------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self._audited()
        for each in self.live:
            assert_reads(each.handle, each.tokens, **each.request)
            assert list(each.handle.token_ids) == each.tokens[: each.named]
        prefixes = self.cache.store.prefixes
        assert len(prefixes.retained) <= prefixes.settings.max_prefixes
        kept = [(s.prefix_key, list(s.token_ids)) for s in prefixes.retained.values()]
        for key, tokens in kept:
            longer = [other for other_key, other in kept if other_key == key and other[: len(tokens)] == tokens]
            assert len(longer) == 1, "a kept sequence is a prefix of another"
        for kept_sequence in prefixes.retained.values():
            node = kept_sequence.tip
            while node is not None and node.depth:
                assert node.home.is_kept, "a live home may let go of what a kept one holds"
                node = node.parent

    def _audited(self) -> None:
        assert self.cache.audit() == ()


def _cat(tensors: Sequence[Any]) -> Any:
    return torch.cat(list(tensors))


def _fail_once(storage: Any, method: str) -> Callable[..., Any]:
    original = getattr(storage, method)
    calls = iter([True])

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls, False):
            raise StorageFailed(method)
        return original(*arguments, **named)

    return call


def _run(storage: str, max_examples: int) -> None:
    machine = type("Machine", (PrefixMachine,), {"storage": staticmethod(STORAGES[storage])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_prefix_reuse_agrees_with_the_model(storage: str) -> None:
    _run(storage, max_examples=4)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_prefix_reuse_agrees_with_the_model_for_long(storage: str) -> None:
    _run(storage, max_examples=15)
