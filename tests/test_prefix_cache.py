"""Reuse across requests: what is published, what a prompt finds, what is kept, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvcache_core import CacheFullError, CacheGeometry, HandleError, KvCacheManager, ShapeError, StepError
from kvcache_core.config import PrefixCacheConfig
from tests.caches import GEOMETRY, MIXED, StorageFailed, failing, raising
from tests.prompts import (
    STORAGES,
    assert_reads,
    explain,
    fill,
    hit,
    layers_for,
    make_prefix_cache,
    peek,
    publish,
    stored,
)
from tests.storages.paged import PagedStorage

MakeCache = Callable[..., KvCacheManager]

# Rows of the faults in this area that do not apply, and why:
# - sglang#29860, out-of-window freeing: windows only mask, every row stays readable (a hit under a window is tested);
# - vllm#58119, events whose parent was never announced: events name sequences, and no blocks or their parents.


@pytest.fixture(params=STORAGES)
def new_cache(request: pytest.FixtureRequest) -> Iterator[MakeCache]:
    """Makes caches with prefix reuse over each storage; their books are sound in the end."""
    with ExitStack() as stack:
        made: list[KvCacheManager] = []

        def make(**named: Any) -> KvCacheManager:
            made.append(stack.enter_context(make_prefix_cache(STORAGES[request.param], **named)))
            return made[-1]

        yield make
        for cache in made:
            if not cache.closed:
                assert cache.audit() == ()


@pytest.fixture
def cache(new_cache: MakeCache) -> KvCacheManager:
    """16 blocks of 4 tokens."""
    return new_cache()


@pytest.fixture
def paged() -> Iterator[KvCacheManager]:
    with make_prefix_cache(PagedStorage) as made:
        yield made
        assert made.audit() == ()


def on(**settings: Any) -> PrefixCacheConfig:
    return PrefixCacheConfig(enabled=True, **settings)


PROMPT = tuple(range(100, 110))


# -- what a prompt finds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_alive", [True, False], ids=["live", "freed"])
def test_a_prompt_starts_with_what_an_earlier_one_stored(cache: KvCacheManager, keep_alive: bool) -> None:
    first = stored(cache, PROMPT)
    if not keep_alive:
        first.free()
    again = cache.allocate(token_ids=PROMPT)
    assert again.num_tokens == 8
    assert again.token_ids == PROMPT[:8]
    assert_reads(again, PROMPT[:8])
    fill(again, PROMPT)
    assert_reads(again, PROMPT)


def test_reuse_is_off_unless_switched_on() -> None:
    with make_prefix_cache(prefix=PrefixCacheConfig(enabled=False)) as cache:
        publish(cache, PROMPT)
        assert hit(cache, PROMPT) == 0
        assert explain(cache, PROMPT).reason == "disabled"
        assert (cache.stats().hit_rate, cache.stats().cached_blocks) == (0.0, 0)


def test_keys_that_depend_on_the_length_of_the_prompt_are_never_reused() -> None:
    geometry = CacheGeometry.model_validate({**GEOMETRY.model_dump(), "prefix_reusable": False})
    with make_prefix_cache(geometry=geometry) as cache:
        cache.enable_prefix_caching()
        publish(cache, PROMPT)
        assert hit(cache, PROMPT) == 0
        assert "depend on how long the prompt is" in explain(cache, PROMPT).message
        assert cache.stats().free_blocks == 16


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 9])
def test_the_last_prompt_token_is_always_left_to_compute(cache: KvCacheManager, length: int) -> None:
    publish(cache, PROMPT)
    assert hit(cache, PROMPT[:length]) == max(0, length - 1) // 4 * 4


def test_vllm_11186_hits_are_as_long_the_third_time_as_the_second(new_cache: MakeCache) -> None:
    for length in (15, 16, 17, 32, 33):
        cache = new_cache(block_size=16)
        prompt = list(range(length))
        publish(cache, prompt)
        expected = (length - 1) // 16 * 16
        for tokens, found in ((prompt, expected), ([*prompt, 99], length // 16 * 16)):
            lengths = []
            for _ in range(2):
                handle = cache.allocate(token_ids=tokens)
                lengths.append(handle.num_tokens)
                fill(handle, tokens)
                assert_reads(handle, tokens)
                handle.free()
            assert lengths == [found, found]


def test_sglang_23387_prompts_around_a_block_of_each_size(new_cache: MakeCache) -> None:
    for size in (1, 2, 16, 64):
        lengths = sorted({0, 1, size - 1, size, size + 1})
        cache = new_cache(block_size=size, num_blocks=8, max_sequence_length=4 * size)
        for length in lengths:
            tokens = list(range(length))
            assert hit(cache, tokens) == peek(cache, tokens) == 0
            cache.allocate(token_ids=tokens).free()
            assert (cache.stats().cached_blocks, cache.stats().cached_prefixes) == (0, 0)
            publish(cache, tokens)
            kept = length // size
            assert cache.stats().cached_blocks == kept
            assert cache.stats().cached_prefixes == (kept > 0)
            assert hit(cache, [*tokens, 7]) == peek(cache, [*tokens, 7]) == kept * size
            assert cache.reset_prefix_cache() == kept
            assert cache.stats().free_blocks == 8
            assert cache.audit() == ()


def test_mlx_lm_1495_a_prompt_of_one_block_is_found(new_cache: MakeCache) -> None:
    cache = new_cache(block_size=1)
    publish(cache, [7])
    assert hit(cache, [7, 8]) == 1


def test_tokens_alone_do_not_match_in_the_middle_of_a_prompt(cache: KvCacheManager) -> None:
    publish(cache, PROMPT)
    assert hit(cache, [*PROMPT[4:], 1, 2, 3]) == 0
    assert hit(cache, [1, 2, 3, 4, *PROMPT]) == 0


def test_room_is_taken_for_the_whole_prompt_and_only_for_what_is_not_shared(paged: KvCacheManager) -> None:
    publish(paged, PROMPT)
    handle = paged.allocate(token_ids=PROMPT, num_tokens=20)
    assert handle.block_table.num_blocks == 5
    stats = paged.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (5, 0, 11)


def test_a_hit_copies_nothing_where_memory_can_be_shared(new_cache: MakeCache) -> None:
    cache = new_cache()
    first = stored(cache, PROMPT)
    again = cache.allocate(token_ids=PROMPT)
    if cache.storage.shared_tokens(first.sequence.slot, 8) == 8:
        assert again.block_table.physical_blocks[:2] == first.block_table.physical_blocks[:2]
        assert again.stats().shared_blocks == 2
    else:
        assert not set(again.block_table.physical_blocks) & set(first.block_table.physical_blocks)


def test_writing_after_a_hit_disturbs_nobody(cache: KvCacheManager) -> None:
    first = stored(cache, PROMPT)
    tails = [stored(cache, [*PROMPT[:8], 50 + number, 60 + number]) for number in range(3)]
    fill(first, [*PROMPT, 1, 2, 3])
    assert_reads(first, [*PROMPT, 1, 2, 3])
    for number, tail in enumerate(tails):
        assert_reads(tail, [*PROMPT[:8], 50 + number, 60 + number])


def test_mlx_vlm_1715_layers_of_all_kinds_are_found_together(new_cache: MakeCache) -> None:
    window = 3
    cache = new_cache(geometry=MIXED)
    prompt = list(range(4 * window))
    publish(cache, prompt)
    for length in (window // 2, window, window + 3, 2 * window - 1, 4 * window):
        continued = [*prompt[:length], 70, 71, 72, 73, 74]
        handle = cache.allocate(token_ids=continued)
        assert handle.num_tokens == min(length // 4 * 4, len(prompt))
        cold = cache.allocate(token_ids=continued, salt="cold")
        torch.testing.assert_close(
            _attended(cache, handle, continued), _attended(cache, cold, continued), rtol=1e-5, atol=0
        )
        handle.free()
        cold.free()


def _attended(cache: KvCacheManager, handle: Any, tokens: list[int]) -> torch.Tensor:
    """What the last 5 tokens attend to in a layer that sees all and in one with a window, after a whole step."""
    new = tokens[handle.num_tokens :]
    out = []
    with cache.step({handle: new}) as step:
        layers = layers_for(cache, tokens, handle.num_tokens)
        for layer, (key, value) in zip(cache.geometry.caching_layers, layers, strict=True):
            step.write(layer, key, value)
            spec = cache.own_spec(layer)
            query = torch.full((len(new), spec.num_kv_heads, spec.head_dim), 1e-5)
            out.append(step.attend(layer, query)[-5:].flatten())
    return torch.cat(out)


def test_tenstorrent_415_a_hit_attends_as_a_miss_does(new_cache: MakeCache) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 4):
        cache = new_cache(block_size=size, num_blocks=64)
        prompt = list(range(13))
        spec = cache.own_spec(0)
        shape = (len(prompt), spec.num_kv_heads, spec.head_dim)
        data = [torch.randn(*shape, generator=generator) for _ in range(3)]
        cold = None
        for found in sorted({0, size, 2 * size, (len(prompt) - 1) // size * size}):
            if found:
                with cache.allocate(token_ids=prompt[:found], salt=str(found)) as first:
                    pair = (data[0][:found], data[1][:found])
                    first.append([pair] * 3, prompt[:found])
            with cache.allocate(token_ids=prompt, salt=str(found)) as handle:
                assert handle.num_tokens == found
                key, value, query = (tensor[found:] for tensor in data)
                with cache.step({handle: prompt[found:]}) as step:
                    for layer in range(3):
                        step.write(layer, key, value)
                    out = step.attend(1, query)
            cold = out if cold is None else cold
            torch.testing.assert_close(out, cold[found:], rtol=1e-5, atol=1e-5)


def test_requests_may_differ_in_how_long_they_may_grow(new_cache: MakeCache) -> None:
    cache = new_cache()
    publish(cache, PROMPT, max_sequence_length=12)
    assert hit(cache, [*PROMPT[:8], *range(30)]) == 8
    long = stored(cache, [*PROMPT[:8], *range(30)])
    assert_reads(long, [*PROMPT[:8], *range(30)])
    short = cache.allocate(token_ids=PROMPT, max_sequence_length=12)
    assert (short.num_tokens, short.max_tokens) == (8, 12)
    with pytest.raises(CacheFullError, match="more than the 12"):
        fill(short, [*PROMPT, 1, 2, 3])


def test_memory_that_was_opened_for_fewer_tokens_serves_no_longer_request(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=PrefixCacheConfig(enabled=False))
    short = cache.allocate(max_sequence_length=12)
    cache.enable_prefix_caching()
    fill(short, PROMPT)
    for longest, found in ((12, 8), (None, 8 if cache.storage.placement == "paged" else 0)):
        assert hit(cache, PROMPT, max_sequence_length=longest) == found
    long = stored(cache, [*PROMPT[:8], *range(30)])
    assert_reads(long, [*PROMPT[:8], *range(30)])


# -- what is published ---------------------------------------------------------------------------------------


def test_tokens_without_ids_are_not_found_nor_what_follows_them(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    for new in (PROMPT[:4], 2, PROMPT[6:]):
        start = handle.num_tokens
        count = new if isinstance(new, int) else len(new)
        layers = layers_for(cache, PROMPT[: start + count], start)
        with cache.step({handle: new}) as step:
            for layer, (key, value) in zip(cache.geometry.caching_layers, layers, strict=True):
                step.write(layer, key, value)
    assert handle.token_ids == PROMPT[:4]
    assert peek(cache, PROMPT) == 4
    handle.free()
    assert hit(cache, PROMPT) == 4
    assert cache.stats().cached_blocks == 1


def test_naming_goes_on_once_what_had_no_ids_is_gone(cache: KvCacheManager) -> None:
    handle = stored(cache, PROMPT[:6])
    handle.append(layers_for(cache, [*PROMPT[:6], 1], 6))
    handle.truncate(6)
    fill(handle, PROMPT)
    assert peek(cache, PROMPT) == 8


def test_nothing_is_found_before_its_step_commits(cache: KvCacheManager) -> None:
    handle = cache.allocate(token_ids=PROMPT)
    step = cache.begin({handle: PROMPT})
    layers = layers_for(cache, PROMPT)
    for layer, (key, value) in zip(cache.geometry.caching_layers, layers, strict=True):
        step.write(layer, key, value)
        assert peek(cache, PROMPT) == 0
    step.commit()
    assert peek(cache, PROMPT) == 8


def test_an_aborted_step_publishes_nothing(cache: KvCacheManager) -> None:
    handle = cache.allocate(token_ids=PROMPT)
    with pytest.raises(KeyError), cache.step({handle: PROMPT}):
        raise KeyError
    assert peek(cache, PROMPT) == 0
    handle.free()
    assert hit(cache, PROMPT) == 0


def test_only_accepted_tokens_are_published(cache: KvCacheManager) -> None:
    handle = stored(cache, PROMPT[:2])
    draft = [*PROMPT[:7], 1, 2, 3]
    with cache.step({handle: draft[2:]}) as step:
        for layer, (key, value) in enumerate(layers_for(cache, draft, 2)):
            step.write(layer, key, value)
        step.accept(handle, 5)
    assert handle.token_ids == PROMPT[:7]
    assert peek(cache, draft) == 4
    fill(handle, PROMPT)
    assert peek(cache, PROMPT) == 8
    assert peek(cache, draft) == 4
    handle.free()
    assert hit(cache, PROMPT) == 8
    assert hit(cache, draft) == 4


def test_vllm_5188_a_block_is_named_only_when_full_and_never_by_what_it_held_before(new_cache: MakeCache) -> None:
    cache = new_cache(block_size=16, num_blocks=12)
    old = list(range(40))
    handle = stored(cache, old[:20])
    assert peek(cache, old) == 16
    fill(handle, old)
    assert peek(cache, old) == 32
    reader = cache.allocate(token_ids=old)
    handle.truncate(18)
    new = [*old[:18], *range(200, 222)]
    fill(handle, new)
    assert_reads(handle, new)
    assert_reads(reader, old[:32])
    assert (peek(cache, old), peek(cache, new)) == (32, 32)
    reader.free()
    assert hit(cache, old) == 32
    assert hit(cache, new) == 32
    handle.free()
    assert hit(cache, old) == 32
    assert hit(cache, new) == 32


def test_a_truncated_block_is_no_longer_found_when_nobody_else_holds_it(cache: KvCacheManager) -> None:
    handle = stored(cache, PROMPT)
    handle.truncate(7)
    assert peek(cache, PROMPT) == 4
    fill(handle, [*PROMPT[:7], 1, 2])
    assert peek(cache, PROMPT) == 4
    assert peek(cache, [*PROMPT[:7], 1, 2]) == 8


def test_mlx_engine_188_ids_and_rows_cannot_part(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    for count in (7, 9):
        with pytest.raises(ShapeError):
            handle.append(layers_for(cache, range(8)), range(count))
    assert (handle.num_tokens, handle.token_ids, peek(cache, range(9))) == (0, (), 0)
    fill(handle, range(8))
    handle.truncate(3)
    assert handle.token_ids == (0, 1, 2)
    fill(handle, [0, 1, 2, 9])
    assert peek(cache, range(9)) == 0
    assert peek(cache, [0, 1, 2, 9, 9]) == 4


# -- forks, clones and shared prefixes -----------------------------------------------------------------------


def test_a_fork_publishes_what_it_adds(cache: KvCacheManager) -> None:
    first = stored(cache, PROMPT[:6])
    fork = first.fork()
    fill(fork, [*PROMPT[:6], 1, 2, 3])
    fill(first, PROMPT)
    assert peek(cache, PROMPT) == 8
    assert peek(cache, [*PROMPT[:6], 1, 2, 3]) == 8
    first.free()
    assert hit(cache, [*PROMPT[:6], 1, 2, 3]) == 8
    fork.free()
    assert hit(cache, PROMPT) == 8
    assert hit(cache, [*PROMPT[:6], 1, 2, 3]) == 8


def test_a_sequence_is_kept_when_its_last_reference_is_freed(cache: KvCacheManager) -> None:
    first = stored(cache, PROMPT)
    clone = first.clone_handle()
    first.free()
    assert cache.stats().cached_prefixes == 0
    clone.free()
    assert cache.stats().cached_prefixes == 1


def test_a_deallocated_or_dropped_sequence_is_kept_too(cache: KvCacheManager) -> None:
    stored(cache, PROMPT, request_id="chat")
    cache.deallocate("chat")
    assert hit(cache, PROMPT) == 8


def test_a_kept_handle_stays_freed(cache: KvCacheManager) -> None:
    handle = stored(cache, PROMPT)
    handle.free()
    assert not handle.is_valid
    for act in (handle.free, lambda: handle.num_tokens, handle.fork):
        with raising(HandleError, "freed", reason="freed"):
            act()
    assert cache.list_handles() == []
    assert cache.stats().active_caches == 0


@pytest.mark.parametrize("count", [0, 3, 4, 7, 10])
def test_a_shared_prefix_is_exact_to_the_token_and_can_be_found(cache: KvCacheManager, count: int) -> None:
    source, target = stored(cache, PROMPT), cache.allocate()
    cache.share_prefix(source, target, count)
    assert_reads(target, PROMPT[:count])
    source.truncate(0)
    assert peek(cache, PROMPT) == count // 4 * 4
    fill(target, [*PROMPT[:count], *range(8)])
    target.free()
    assert hit(cache, [*PROMPT[:count], *range(9)]) == (count + 8) // 4 * 4


def test_what_follows_a_prefix_shared_across_salts_is_found_by_nobody(cache: KvCacheManager) -> None:
    source, target = stored(cache, PROMPT, salt="a"), cache.allocate(salt="b")
    cache.share_prefix(source, target, 8)
    tokens = [*PROMPT[:8], 1, 2, 3, 4, 5]
    target.append(layers_for(cache, tokens, 8), tokens[8:])
    for salt in ("a", "b", None):
        assert peek(cache, tokens, salt=salt) == (8 if salt == "a" else 0)
    target.free()
    source.free()
    assert peek(cache, tokens, salt="b") == peek(cache, tokens) == 0
    assert hit(cache, tokens, salt="a") == 8


def test_sharing_nothing_leaves_the_key_of_the_target_alone(cache: KvCacheManager) -> None:
    source, target = stored(cache, PROMPT, salt="a"), cache.allocate(salt="b")
    cache.share_prefix(source, target, 0)
    fill(target, PROMPT, salt="b")
    assert peek(cache, PROMPT, salt="b") == 8


def test_sharing_a_prefix_uses_the_room_that_the_target_has(new_cache: MakeCache) -> None:
    cache = new_cache(num_blocks=6)
    source, target = stored(cache, PROMPT), cache.allocate(num_tokens=12)
    assert cache.stats().free_blocks == 0
    cache.share_prefix(source, target, 10)
    assert_reads(target, PROMPT)
    assert target.block_table.num_blocks == 3


def test_sharing_a_prefix_with_a_sequence_that_may_grow_further_is_refused_where_memory_cannot(
    new_cache: MakeCache,
) -> None:
    cache = new_cache(prefix=PrefixCacheConfig(enabled=False))
    source, target = stored(cache, PROMPT, max_sequence_length=12), cache.allocate()
    if cache.storage.placement == "paged":
        cache.share_prefix(source, target, 8)
        fill(target, range(100, 120))
    else:
        with raising(ShapeError, "may hold 48 tokens", "only 12"):
            cache.share_prefix(source, target, 8)
        assert target.num_tokens == 0


# -- what is kept --------------------------------------------------------------------------------------------


def test_a_kept_sequence_holds_its_full_named_blocks_and_no_more(cache: KvCacheManager) -> None:
    handle = stored(cache, PROMPT)
    cache.extend(handle, 20)
    handle.free()
    stats = cache.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2, 14)
    assert (stats.cached_prefixes, stats.active_caches, stats.tokens_stored) == (1, 0, 0)


def test_one_sequence_is_kept_for_all_that_are_a_prefix_of_it(cache: KvCacheManager) -> None:
    publish(cache, PROMPT[:5])
    publish(cache, PROMPT)
    assert (cache.stats().cached_prefixes, cache.stats().cached_blocks) == (1, 2)
    publish(cache, PROMPT[:5])
    publish(cache, PROMPT)
    assert (cache.stats().cached_prefixes, cache.stats().cached_blocks) == (1, 2)
    assert hit(cache, PROMPT) == 8


def test_many_short_questions_after_a_live_prompt_are_kept_once(cache: KvCacheManager) -> None:
    live = stored(cache, PROMPT)
    for question in range(5):
        publish(cache, [*PROMPT[:8], question])
    assert cache.stats().cached_prefixes == 1
    live.free()
    assert cache.stats().cached_prefixes == 1


def test_sglang_jax_982_holding_and_freeing_around_a_block_boundary(new_cache: MakeCache) -> None:
    cache = new_cache(block_size=16)
    handle = stored(cache, range(31))
    for length in (31, 32, 33):
        fill(handle, range(length))
        assert peek(cache, range(40)) == length // 16 * 16
        reader = cache.allocate(token_ids=range(40))
        assert reader.num_tokens == length // 16 * 16
        reader.free()
        assert cache.audit() == ()
    handle.free()
    stats = cache.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2, 14)


def test_no_more_prefixes_are_kept_than_allowed(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=on(max_prefixes=2))
    for first in range(4):
        publish(cache, [first, *PROMPT])
    assert cache.stats().cached_prefixes == 2
    assert [peek(cache, [first, *PROMPT]) for first in range(4)] == [0, 0, 8, 8]
    assert cache.stats().evictions == 4


def test_nothing_is_kept_where_no_prefix_may_be(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=on(max_prefixes=0))
    live = stored(cache, PROMPT)
    assert hit(cache, PROMPT) == 8  # what is live is shared all the same
    live.free()
    assert hit(cache, PROMPT) == 0
    assert cache.stats().free_blocks == 16


def test_short_prefixes_are_neither_kept_nor_found(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=on(min_prefix_length=8))
    live = stored(cache, PROMPT[:7])
    assert hit(cache, PROMPT) == 0
    assert explain(cache, PROMPT).reason == "below-minimum"
    live.free()
    assert cache.stats().cached_blocks == 0
    publish(cache, PROMPT)
    assert hit(cache, PROMPT) == 8


def test_a_prefix_outlives_its_time_only_while_it_is_used(
    new_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    cache = new_cache(prefix=on(prefix_ttl_seconds=10))
    other = [*range(8), 9]
    publish(cache, PROMPT)
    publish(cache, other)
    now += 6
    assert hit(cache, PROMPT) == 8
    now += 6
    assert peek(cache, other) == 0
    assert hit(cache, PROMPT) == 8
    assert cache.stats().cached_prefixes == 1
    now += 10
    assert peek(cache, PROMPT) == 8  # not yet longer than its time
    now += 0.1
    assert hit(cache, PROMPT) == 0
    assert explain(cache, PROMPT).reason == "evicted"
    assert cache.stats().free_blocks == 16


def test_time_does_not_drop_what_a_handle_holds(new_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    cache = new_cache(prefix=on(prefix_ttl_seconds=10))
    publish(cache, PROMPT)
    holder = cache.allocate(token_ids=PROMPT)
    now += 100
    assert_reads(holder, PROMPT[:8])
    assert hit(cache, PROMPT) == 8
    holder.free()
    assert hit(cache, PROMPT) == 8


def test_gc_gives_back_what_has_outlived_its_time(new_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    cache = new_cache(prefix=on(prefix_ttl_seconds=10))
    publish(cache, PROMPT)
    assert cache.gc().freed_bytes == 0
    now += 11
    assert cache.gc().freed_bytes == 2 * cache.bytes_per_block
    assert cache.stats().free_blocks == 16


def test_without_sharing_across_requests_only_the_same_request_finds_its_prefix(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=on(enable_cross_request_sharing=False))
    publish(cache, PROMPT, request_id="a")
    assert hit(cache, PROMPT, request_id="b") == 0
    assert hit(cache, PROMPT) == 0
    assert "no id of its own" in explain(cache, PROMPT).message
    assert hit(cache, PROMPT, request_id="a", extra_keys={"request_id": "b", "request": "b"}) == 0
    assert hit(cache, PROMPT, request_id="a") == 8
    for _ in range(2):
        publish(cache, PROMPT)  # nobody can ask for a made-up id again
    assert cache.stats().cached_prefixes == 1


# -- switching, resetting, closing ---------------------------------------------------------------------------


def test_switching_off_drops_what_is_kept_and_switching_on_begins_anew(cache: KvCacheManager) -> None:
    live = stored(cache, PROMPT)
    publish(cache, range(9))
    cache.enable_prefix_caching(False)
    assert cache.stats().cached_blocks == 0
    assert hit(cache, range(9)) == hit(cache, PROMPT) == 0
    cache.enable_prefix_caching()
    assert hit(cache, range(9)) == hit(cache, PROMPT) == 0
    fill(live, [*PROMPT, *range(10)])
    live.free()
    assert cache.stats().free_blocks == 16
    publish(cache, PROMPT)
    assert hit(cache, PROMPT) == 8


def test_vllm_12284_a_reset_tells_the_truth_and_reaches_what_is_in_use(cache: KvCacheManager) -> None:
    publish(cache, range(9))
    live = stored(cache, PROMPT)
    sharer = cache.allocate(token_ids=PROMPT)
    assert cache.reset_prefix_cache() == 4
    assert cache.reset_prefix_cache() == 0
    for tokens in (PROMPT, range(9)):
        assert hit(cache, list(tokens)) == 0
    assert_reads(live, PROMPT)
    fill(live, [*PROMPT, *range(10)])
    fill(sharer, PROMPT)
    fork = live.fork()
    for handle in (live, sharer, fork):
        handle.free()
        assert peek(cache, [*PROMPT, *range(10)]) == 0
    assert cache.stats().cached_blocks == 0
    publish(cache, PROMPT)
    assert hit(cache, PROMPT) == 8


def test_a_reset_within_an_open_step_keeps_its_commit_unpublished(cache: KvCacheManager) -> None:
    handle = cache.allocate(token_ids=PROMPT)
    with cache.step({handle: PROMPT}) as step:
        for layer, (key, value) in enumerate(layers_for(cache, PROMPT)):
            step.write(layer, key, value)
        cache.reset_prefix_cache()
    assert_reads(handle, PROMPT)
    assert peek(cache, PROMPT) == 0


def test_lmdeploy_4917_another_model_finds_nothing_of_this_one() -> None:
    with make_prefix_cache(prefix=on(namespace="weights-1")) as cache:
        publish(cache, PROMPT)
        settings = cache.store.prefixes.settings
        cache.store.prefixes.settings = on(namespace="weights-2")
        assert hit(cache, PROMPT) == 0
        cache.store.prefixes.settings = settings
        assert hit(cache, PROMPT) == 8
        assert hit(cache, PROMPT, adapter="lora") == 0
        cache.reset_prefix_cache()  # what to do when the weights changed in place
        assert hit(cache, PROMPT) == 0


def test_resetting_or_closing_the_cache_drops_what_is_kept(cache: KvCacheManager) -> None:
    publish(cache, PROMPT)
    live = stored(cache, PROMPT)
    cache.reset()
    assert not live.is_valid
    assert hit(cache, PROMPT) == 0
    assert cache.stats().free_blocks == 16
    publish(cache, PROMPT)
    cache.close()
    with raising(HandleError, "closed", reason="closed"):
        cache.explain(token_ids=PROMPT)


# -- identical blocks ----------------------------------------------------------------------------------------


def _twice(cache: KvCacheManager) -> tuple[Any, Any]:
    """Two sequences that have computed the same prompt, neither having found the other's."""
    one, two = cache.allocate(), cache.allocate()
    fill(one, PROMPT)
    fill(two, PROMPT)
    assert not set(one.block_table.physical_blocks) & set(two.block_table.physical_blocks)
    return one, two


def test_identical_blocks_are_kept_once_from_the_next_step_on(paged: KvCacheManager) -> None:
    one, two = _twice(paged)
    assert paged.stats().used_blocks == 6
    fill(two, [*PROMPT, 1])
    assert two.block_table.physical_blocks[:2] == one.block_table.physical_blocks[:2]
    assert two.block_table.physical_blocks[2:] != one.block_table.physical_blocks[2:]
    assert paged.stats().used_blocks == 4
    assert (one.stats().shared_blocks, two.stats().shared_blocks) == (2, 2)
    one.free()
    assert_reads(two, [*PROMPT, 1])
    two.free()
    assert (paged.stats().cached_blocks, paged.stats().free_blocks) == (2, 14)


def test_identical_blocks_are_kept_once_when_one_is_freed(paged: KvCacheManager) -> None:
    one, two = _twice(paged)
    two.free()
    assert (paged.stats().used_blocks, paged.stats().cached_blocks) == (3, 0)
    one.free()
    assert (paged.stats().used_blocks, paged.stats().cached_blocks) == (0, 2)


def test_what_is_computed_anew_after_a_truncate_is_merged_too(paged: KvCacheManager) -> None:
    one, two = _twice(paged)
    fill(two, [*PROMPT, 1])
    two.truncate(0)
    fill(two, PROMPT)
    assert paged.stats().used_blocks == 6
    fill(two, [*PROMPT, 1])
    assert two.block_table.physical_blocks[:2] == one.block_table.physical_blocks[:2]
    assert paged.stats().used_blocks == 4


def test_a_fork_keeps_the_block_that_its_source_gave_up(paged: KvCacheManager) -> None:
    one, two = _twice(paged)
    fork = two.fork()
    fill(two, [*PROMPT, 1])
    assert_reads(fork, PROMPT)
    one.free()
    two.free()
    assert_reads(fork, PROMPT)
    fork.free()
    assert paged.stats().used_blocks == 0


def test_a_finished_step_attends_no_more_once_its_blocks_were_merged(paged: KvCacheManager) -> None:
    one, two = paged.allocate(), paged.allocate()
    fill(one, PROMPT)
    step = paged.begin({two: PROMPT})
    for layer, (key, value) in enumerate(layers_for(paged, PROMPT)):
        step.write(layer, key, value)
    step.commit()
    query = torch.full((len(PROMPT), 2, 8), 1e-5)
    assert step.attend(0, query).shape == query.shape
    other = paged.begin({two: 0})
    with raising(StepError, "attend is not possible any more", "changed"):
        step.attend(0, query)
    other.commit()
    stranger = paged.allocate(token_ids=range(8))
    fill(stranger, range(8))  # takes the blocks that were given up
    with raising(StepError, "attend is not possible any more", "changed"):
        step.attend(0, query)


def test_copies_that_cannot_be_merged_live_side_by_side_and_one_is_kept(new_cache: MakeCache) -> None:
    cache = new_cache()
    one, two = _twice(cache)
    fill(two, [*PROMPT, 1])
    assert cache.stats().used_blocks == (4 if cache.storage.placement == "paged" else 6)
    one.free()
    two.free()
    assert (cache.stats().cached_prefixes, cache.stats().cached_blocks) == (1, 2)
    assert hit(cache, PROMPT) == 8


def test_vllm_55092_dropping_one_of_two_copies_leaves_the_other_findable(new_cache: MakeCache) -> None:
    cache = new_cache()
    one, two = _twice(cache)
    one.truncate(0)
    assert hit(cache, PROMPT) == 8
    two.truncate(0)
    assert hit(cache, PROMPT) == 8  # the probe itself was kept
    cache.reset_prefix_cache()
    assert hit(cache, PROMPT) == 0


# -- memory that a step is writing to ------------------------------------------------------------------------


def test_contiguous_memory_that_a_step_writes_to_is_not_shared_meanwhile(cache: KvCacheManager) -> None:
    live = stored(cache, PROMPT)
    step = cache.begin({live: 3})
    if cache.storage.placement == "paged":
        assert peek(cache, PROMPT) == 8
        assert hit(cache, PROMPT) == 8
    else:
        told = explain(cache, PROMPT)
        assert (told.num_tokens, told.reason) == (0, "busy")
        assert hit(cache, PROMPT) == 0
    step.abort()
    assert hit(cache, PROMPT) == 8


def test_another_holder_serves_while_one_is_in_a_step(cache: KvCacheManager) -> None:
    live = stored(cache, PROMPT)
    fork = live.fork()
    step = cache.begin({live: 3})
    assert hit(cache, PROMPT) == 8
    step.abort()
    step = cache.begin({fork: 3})
    assert hit(cache, PROMPT) == 8
    step.abort()


# -- explanations and numbers --------------------------------------------------------------------------------


def test_an_explanation_says_what_allocate_would_find_and_why_not_more(cache: KvCacheManager) -> None:
    publish(cache, PROMPT)
    cases: list[tuple[Any, str, int, int | None, str]] = [
        (PROMPT, "hit", 8, None, "8 of 10 tokens are cached; the rest is always computed"),
        (PROMPT[:4], "shorter-than-a-block", 0, None, "4 tokens hold no full block of 4 besides the last token"),
        ([*PROMPT[:6], 0, 0, 0], "diverged", 4, 6, "4 of 9 tokens are cached; what is cached differs from token 6 on"),
        ([*PROMPT[:8], *range(5)], "never-stored", 8, None, "the block at token 8 was never stored"),
        (range(9), "never-stored", 0, None, "the block at token 0 was never stored"),
    ]
    for tokens, reason, found, diverged_at, words in cases:
        told = explain(cache, tokens)
        assert (told.reason, told.num_tokens, told.diverged_at) == (reason, found, diverged_at)
        assert words in told.message
        assert hit(cache, list(tokens)) == found
    cache.store.books.make_room(16)
    assert explain(cache, PROMPT).reason == "evicted"
    cache.enable_prefix_caching(False)
    assert explain(cache, PROMPT).reason == "disabled"


def test_an_explanation_changes_nothing(new_cache: MakeCache) -> None:
    cache = new_cache(prefix=on(max_prefixes=2))
    for first in (1, 2):
        publish(cache, [first, *PROMPT])
    before = cache.stats()
    for _ in range(3):
        explain(cache, [1, *PROMPT])
    assert cache.stats() == before
    publish(cache, [3, *PROMPT])
    assert peek(cache, [1, *PROMPT]) == 0  # it was still the least recently used


def test_the_hit_rate_counts_tokens_of_prompts_that_were_looked_up(cache: KvCacheManager) -> None:
    publish(cache, PROMPT)
    assert cache.stats().hit_rate == 0
    hit(cache, PROMPT)
    assert cache.stats().hit_rate == pytest.approx(8 / 20)
    cache.allocate(num_tokens=4).free()
    assert cache.stats().hit_rate == pytest.approx(8 / 20)
    with pytest.raises(CacheFullError):
        cache.allocate(token_ids=[*PROMPT, *range(38)], num_tokens=4800)
    with pytest.raises(CacheFullError):
        _ = [cache.allocate(token_ids=PROMPT, num_tokens=40) for _ in range(3)]
    found = 8 + 8 * (len(cache.list_handles()))
    assert cache.stats().hit_rate == pytest.approx(found / (20 + 10 * len(cache.list_handles())))


# -- a storage that fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "shared_tokens"])
def test_a_hit_whose_fork_fails_changes_nothing(cache: KvCacheManager, method: str) -> None:
    publish(cache, PROMPT)
    before = cache.stats()
    with failing(cache.storage, method), pytest.raises(StorageFailed):
        cache.allocate(token_ids=PROMPT, request_id="chat")
    assert cache.stats() == before
    assert cache.audit() == ()
    assert hit(cache, PROMPT, request_id="chat") == 8


@pytest.mark.parametrize("method", ["truncate", "close"])
def test_a_sequence_is_freed_whatever_fails_on_the_way(cache: KvCacheManager, method: str) -> None:
    publish(cache, PROMPT[:5])
    handle = stored(cache, PROMPT)
    cache.storage.close, close = cache.storage.close, cache.storage.close  # type: ignore[method-assign]
    with failing(cache.storage, method), pytest.raises(StorageFailed):
        handle.free()
    cache.storage.close = close  # type: ignore[method-assign]
    assert not handle.is_valid
    assert cache.audit() == ()
    assert cache.stats().used_blocks == 0
    assert hit(cache, PROMPT) in (4, 8)


def test_dropping_all_goes_on_when_one_cannot_be_closed(cache: KvCacheManager) -> None:
    for first in range(3):
        publish(cache, [first, *PROMPT])
    with failing(cache.storage, "close", at=2), pytest.raises(StorageFailed):
        cache.reset_prefix_cache()
    assert cache.audit() == ()
    assert cache.stats().free_blocks == 16
    assert hit(cache, [0, *PROMPT]) == 0


def test_scrubbing_that_fails_leaves_the_books_whole() -> None:
    with make_prefix_cache(PagedStorage, scrub=True) as cache:
        handle = stored(cache, PROMPT)
        with failing(cache.storage, "scrub"), pytest.raises(StorageFailed):
            handle.free()
        assert cache.audit() == ()
        assert (cache.stats().used_blocks, cache.stats().cached_blocks) == (0, 2)
        assert hit(cache, PROMPT) == 8
