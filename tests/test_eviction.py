"""What goes when room is needed: in which order, how much of it, and never what is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from kvcache_core import CacheFullError, KvCacheManager
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.eviction import EVICTION_POLICIES, EvictionCandidate, LruPolicy, PriorityLruPolicy
from tests.caches import StorageFailed, failing
from tests.prompts import STORAGES, assert_reads, fill, hit, layers_for, make_prefix_cache, peek, publish, stored
from tests.storages.paged import PagedStorage

MakeCache = Callable[..., KvCacheManager]


@pytest.fixture(params=STORAGES)
def new_cache(request: pytest.FixtureRequest) -> Iterator[MakeCache]:
    """Makes caches with prefix reuse over each storage; their books are sound in the end."""
    with ExitStack() as stack:
        made: list[KvCacheManager] = []

        def make(num_blocks: int, **named: Any) -> KvCacheManager:
            made.append(stack.enter_context(make_prefix_cache(STORAGES[request.param], num_blocks=num_blocks, **named)))
            return made[-1]

        yield make
        for cache in made:
            assert cache.audit() == ()


def prompt(name: int, blocks: int) -> list[int]:
    """So many blocks of 4 tokens that no other name has."""
    return [name * 100 + index for index in range(4 * blocks)]


def longer(tokens: list[int]) -> list[int]:
    """A prompt that may find all of these."""
    return [*tokens, -1]


def take(cache: KvCacheManager, blocks: int) -> Any:
    """A sequence that holds so many blocks and publishes nothing."""
    return cache.allocate(num_tokens=4 * blocks)


# -- policies by themselves ----------------------------------------------------------------------------------


def candidates(**priorities: int) -> dict[str, EvictionCandidate]:
    return {name: EvictionCandidate(name, 1, priority) for name, priority in priorities.items()}


def test_lru_names_the_least_recently_used_first() -> None:
    policy = LruPolicy()
    for name in "abcab":
        policy.record_access(name)
    assert list(policy.select_eviction_candidates(candidates(a=0, b=0, c=0))) == ["c", "a", "b"]
    policy.forget("a")
    policy.forget("never seen")
    assert list(policy.select_eviction_candidates(candidates(b=0, c=0))) == ["c", "b"]


def test_the_priority_policy_names_the_lowest_first_and_the_least_recently_used_among_equals() -> None:
    policy = PriorityLruPolicy()
    known = candidates(a=1, b=0, c=1, d=-1, e=0)
    for name in "abcde":
        policy.record_access(name)
    assert list(policy.select_eviction_candidates(known)) == ["d", "b", "e", "a", "c"]
    policy.record_access("a")
    policy.record_access("b")
    policy.forget("d")
    policy.forget("never seen")
    assert list(policy.select_eviction_candidates(known)) == ["e", "b", "c", "a"]
    policy.record_access("f")
    policy.forget("f")
    assert list(policy.select_eviction_candidates(known)) == ["e", "b", "c", "a"]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_policy_has_the_name_that_configures_it_and_begins_empty(name: str) -> None:
    one, other = EVICTION_POLICIES[name](), EVICTION_POLICIES[name]()
    assert one.name == name
    one.record_access("a")
    assert list(other.select_eviction_candidates({})) == []


# -- order ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_only_as_much_as_is_needed(new_cache: MakeCache) -> None:
    cache = new_cache(9)
    prompts = [prompt(name, 3) for name in range(3)]
    for tokens in prompts:
        publish(cache, tokens)
    lengths = []
    for _ in range(9):
        take(cache, 1)
        lengths.append([peek(cache, longer(tokens)) for tokens in prompts])
    assert lengths == [
        [8, 12, 12],
        [4, 12, 12],
        [0, 12, 12],
        [0, 8, 12],
        [0, 4, 12],
        [0, 0, 12],
        [0, 0, 8],
        [0, 0, 4],
        [0, 0, 0],
    ]
    assert cache.stats().evictions == 9


def test_nothing_is_evicted_while_blocks_are_free(new_cache: MakeCache) -> None:
    cache = new_cache(8)
    publish(cache, prompt(1, 3))
    take(cache, 5)
    assert (cache.stats().evictions, peek(cache, longer(prompt(1, 3)))) == (0, 12)


def test_mlx_lm_1495_a_hit_refreshes_and_a_miss_does_not(new_cache: MakeCache) -> None:
    cache = new_cache(16, prefix=PrefixCacheConfig(enabled=True, max_prefixes=3))
    hot, *others = [prompt(name, 1) for name in range(6)]
    publish(cache, hot)
    publish(cache, others[0])
    publish(cache, others[1])
    for tokens in others[2:]:
        assert hit(cache, longer(hot)) == 4
        assert hit(cache, [-5, *hot]) == 0
        assert hit(cache, others[-1][:3]) == 0
        publish(cache, tokens)
    assert [peek(cache, longer(tokens)) for tokens in (hot, *others)] == [4, 0, 0, 0, 4, 4]


def test_storing_the_same_again_refreshes_it(new_cache: MakeCache) -> None:
    cache = new_cache(8)
    publish(cache, prompt(1, 2))
    publish(cache, prompt(2, 2))
    again = cache.allocate()  # without ids, so nothing is looked up
    fill(again, prompt(1, 2))
    again.free()
    take(cache, 6)
    assert (peek(cache, longer(prompt(1, 2))), peek(cache, longer(prompt(2, 2)))) == (8, 0)


def test_a_failed_allocation_refreshes_nothing(new_cache: MakeCache) -> None:
    cache = new_cache(8)
    publish(cache, prompt(1, 2))
    publish(cache, prompt(2, 2))
    with pytest.raises(CacheFullError):
        cache.allocate(token_ids=longer(prompt(1, 2)), num_tokens=36)
    take(cache, 6)
    assert (peek(cache, longer(prompt(1, 2))), peek(cache, longer(prompt(2, 2)))) == (0, 8)


def test_lmcache_1116_tails_go_before_heads_and_nothing_unreachable_is_left(new_cache: MakeCache) -> None:
    cache = new_cache(4)
    chain = prompt(1, 4)
    publish(cache, chain)
    for _ in range(3):
        assert hit(cache, chain) == 12  # the last block is computed again
        publish(cache, chain)
    lengths = []
    for _ in range(4):
        take(cache, 1)
        lengths.append(peek(cache, longer(chain)))
        cached = cache.stats().cached_blocks
        assert cached * 4 == lengths[-1]
    assert lengths == [12, 8, 4, 0]


def test_a_shared_head_outlives_the_tails_that_grew_from_it(new_cache: MakeCache) -> None:
    cache = new_cache(16)
    head = prompt(1, 2)
    tails = [[*head, *prompt(name, 2)] for name in range(2, 5)]
    for tokens in tails:
        publish(cache, tokens)
    total = cache.stats().cached_blocks
    lengths = []
    for _ in range(total):
        cache.store.books.make_room(cache.stats().free_blocks + 1)
        lengths.append([peek(cache, longer(tokens)) for tokens in tails])
    assert all(len(set(now)) <= 2 or min(now) >= 8 for now in lengths)
    assert lengths[-1] == [0, 0, 0]
    assert cache.stats().evictions == total
    heads = [max(now) for now in lengths]
    assert heads == sorted(heads, reverse=True)
    assert next(now for now in lengths if min(now) < 8)[2] <= 8  # the head went last


def test_the_long_tail_of_whoever_stored_a_hot_head_first_ages(new_cache: MakeCache) -> None:
    cache = new_cache(16)
    head = prompt(1, 2)
    first = [*head, *prompt(2, 6)]
    publish(cache, first)
    for name in range(3, 6):
        publish(cache, [*head, *prompt(name, 1)])
    assert hit(cache, longer(head)) == 8
    take(cache, cache.stats().free_blocks + 3)
    assert peek(cache, longer(first)) < 32
    assert [peek(cache, longer([*head, *prompt(name, 1)])) for name in range(3, 6)] == [12, 12, 12]


def test_a_remainder_that_another_sequence_keeps_too_is_not_kept_twice() -> None:
    with make_prefix_cache(STORAGES["int8"], num_blocks=25, block_size=1) as cache:
        publish(cache, [0, 1, 0, 0, 0, 1])
        publish(cache, [0, 1, 0, 0, 0])
        publish(cache, longer := [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        publish(cache, longer)  # a copy, for which three blocks have to go
        assert cache.stats().cached_prefixes == 1
        assert peek(cache, [*longer, -1]) == 11


def test_the_lowest_priority_goes_first_where_the_policy_says_so(new_cache: MakeCache) -> None:
    cache = new_cache(8, settings={"eviction_policy": PriorityLruPolicy()})
    publish(cache, prompt(1, 2), priority=1)
    publish(cache, prompt(2, 2), priority=0)
    publish(cache, prompt(3, 2), priority=2)
    take(cache, 2)
    take(cache, 3)
    assert [peek(cache, longer(prompt(name, 2))) for name in (1, 2, 3)] == [4, 0, 8]


def test_what_several_requests_stored_has_the_highest_of_their_priorities(new_cache: MakeCache) -> None:
    cache = new_cache(9, settings={"eviction_policy": PriorityLruPolicy()})
    publish(cache, prompt(1, 2), priority=5)
    publish(cache, [*prompt(1, 2), *prompt(2, 1)], priority=0)  # continues it
    publish(cache, prompt(3, 2), priority=0)
    publish(cache, prompt(3, 2), priority=4)  # is the same
    publish(cache, prompt(4, 3), priority=3)
    take(cache, 1 + 3)
    assert peek(cache, longer(prompt(4, 3))) == 0
    assert peek(cache, longer([*prompt(1, 2), *prompt(2, 1)])) == 12
    assert peek(cache, longer(prompt(3, 2))) == 8


def test_a_newcomer_that_the_policy_values_least_is_not_kept(new_cache: MakeCache) -> None:
    prefix = PrefixCacheConfig(enabled=True, max_prefixes=1)
    cache = new_cache(8, prefix=prefix, settings={"eviction_policy": PriorityLruPolicy()})
    publish(cache, prompt(1, 2), priority=1)
    publish(cache, prompt(2, 2), priority=0)
    assert [peek(cache, longer(prompt(name, 2))) for name in (1, 2)] == [8, 0]
    assert (cache.stats().cached_prefixes, cache.stats().cached_blocks) == (1, 2)


# -- what is in use ------------------------------------------------------------------------------------------


def test_dynamo_12108_a_match_is_held_before_room_is_made_for_the_rest(new_cache: MakeCache) -> None:
    for suffix in (3, 4, 5):
        cache = new_cache(8)
        old, young = prompt(1, 4), prompt(2, 4)
        publish(cache, old)
        publish(cache, young)
        tokens = [*old, *prompt(3, suffix)]
        if cache.storage.placement == "paged" and suffix == 5:
            with pytest.raises(CacheFullError) as caught:
                cache.allocate(token_ids=tokens)
            assert (caught.value.needed, caught.value.free, caught.value.evictable) == (5, 0, 4)
            assert (peek(cache, longer(old)), peek(cache, longer(young))) == (16, 16)
        elif cache.storage.placement == "paged":
            handle = stored(cache, tokens)
            assert_reads(handle, tokens)
            assert peek(cache, longer(young)) == 16 - 4 * suffix
        else:  # a copy of the match needs room of its own, for which the match itself may go
            try:
                handle = stored(cache, tokens)
            except CacheFullError:
                assert suffix == 5
            else:
                assert_reads(handle, tokens)


def test_vllm_37076_nobody_takes_what_was_matched_between_match_and_use(new_cache: MakeCache) -> None:
    for wanted in (4, 1):
        cache = new_cache(4)
        publish(cache, prompt(1, 2))
        publish(cache, prompt(2, 2))
        match = cache.allocate(token_ids=longer(prompt(1, 2))[:8])
        assert match.num_tokens == 4
        other = cache.allocate()
        canaries = prompt(9, wanted)
        if wanted > 2:
            with pytest.raises(CacheFullError):
                fill(other, canaries)
        else:
            fill(other, canaries)
            assert_reads(other, canaries)
        assert_reads(match, prompt(1, 1))
        fill(match, prompt(1, 2))
        assert_reads(match, prompt(1, 2))


def test_what_a_handle_holds_is_not_evicted_and_can_not_starve_others_once_freed(new_cache: MakeCache) -> None:
    cache = new_cache(6)
    publish(cache, prompt(1, 3))
    pin = stored(cache, longer(prompt(1, 3)))
    before = cache.stats()
    with pytest.raises(CacheFullError) as caught:
        take(cache, 6)
    assert caught.value.needed == 6
    assert caught.value.free == before.free_blocks
    assert caught.value.evictable == before.cached_blocks
    assert_reads(pin, longer(prompt(1, 3)))
    pin.free()
    assert take(cache, 6).block_table.num_blocks == 6


def test_a_prefix_that_is_in_use_is_left_alone_when_dropping_it_frees_nothing() -> None:
    with make_prefix_cache(PagedStorage, num_blocks=8) as cache:
        publish(cache, prompt(1, 3))
        publish(cache, prompt(2, 3))
        pin = cache.allocate(token_ids=longer(prompt(1, 3)))
        take(cache, 4)
        assert cache.stats().cached_prefixes == 1
        pin.truncate(0)
        assert peek(cache, longer(prompt(1, 3))) == 12
        assert peek(cache, longer(prompt(2, 3))) == 0


def test_sglang_32459_room_that_was_only_reserved_costs_no_prefix_for_long(new_cache: MakeCache) -> None:
    cache = new_cache(102, max_sequence_length=400)
    for name in range(1, 21):
        publish(cache, prompt(name, 3))
    handles = [cache.allocate(salt=number) for number in range(8)]
    for round_ in range(20):
        for handle in handles:
            draft = [*handle.token_ids, *range(1000 + round_, 1005 + round_)]
            handle.append(layers_for(cache, draft, handle.num_tokens), draft[handle.num_tokens :])
            handle.truncate(handle.num_tokens - 4)
            assert handle.num_tokens == round_ + 1
    needed = sum(handle.block_table.num_blocks for handle in handles)
    stats = cache.stats()
    assert needed == 8 * 5
    assert stats.used_blocks == needed
    assert stats.cached_blocks == 60
    assert stats.evictions == 0
    cache.extend(handles[0], 80)
    assert cache.stats().evictions == 18
    handles[0].truncate(20)
    assert cache.stats().free_blocks == 20


def test_a_step_and_a_fork_evict_too(new_cache: MakeCache) -> None:
    cache = new_cache(7)
    publish(cache, prompt(1, 3))
    handle = stored(cache, prompt(2, 3)[:-1], salt="own")
    fork = handle.fork()
    fill(fork, [*prompt(2, 3)[:-1], 7, 8, 9], salt="own")
    assert_reads(fork, [*prompt(2, 3)[:-1], 7, 8, 9], salt="own")
    assert_reads(handle, prompt(2, 3)[:-1], salt="own")
    assert peek(cache, longer(prompt(1, 3))) < 12


def test_can_allocate_counts_what_can_be_evicted(new_cache: MakeCache) -> None:
    cache = new_cache(4)
    publish(cache, prompt(1, 3))
    assert cache.can_allocate(num_tokens=16)
    assert not cache.can_allocate(num_tokens=17)
    pin = stored(cache, longer(prompt(1, 3)))
    assert not cache.can_allocate(num_tokens=16)
    pin.free()
    assert cache.can_allocate(num_tokens=16)


def test_cached_blocks_are_no_pressure(new_cache: MakeCache) -> None:
    cache = new_cache(4)
    publish(cache, prompt(1, 4))
    assert (cache.stats().cached_blocks, cache.stats().pressure.value) == (4, "low")


# -- blocks that come back -----------------------------------------------------------------------------------


def test_vllm_4761_an_evicted_block_is_never_found_again(new_cache: MakeCache) -> None:
    cache = new_cache(4)
    first = prompt(1, 2)
    publish(cache, first)
    for name in (2, 3, 4):
        publish(cache, prompt(name, 2))
        assert cache.audit() == ()
    assert hit(cache, longer(first)) == 0
    assert hit(cache, [*first[:4], -1]) == 0
    cache.reset_prefix_cache()
    assert hit(cache, longer(first)) == 0
    assert cache.stats().free_blocks == 4
    publish(cache, first)
    assert hit(cache, longer(first)) == 8


def test_vllm_42571_shared_blocks_come_back_once(new_cache: MakeCache) -> None:
    cache = new_cache(20)
    first = stored(cache, prompt(1, 3))
    forks = [first.fork() for _ in range(2)]
    reader = cache.allocate(token_ids=longer(prompt(1, 3)))
    for handle in (first, reader, *forks):
        handle.free()
        assert cache.audit() == ()
    assert cache.stats().cached_blocks == 3
    cache.store.books.make_room(20)
    assert sorted(cache.block_allocator.free_ids()) == list(range(1, 21))


def test_blocks_of_a_sequence_whose_prefix_was_found_return_with_it(new_cache: MakeCache) -> None:
    cache = new_cache(8)
    for round_ in range(30):
        tokens = [*prompt(1, 1), *prompt(2 + round_ % 3, 2), round_]
        handle = stored(cache, tokens)
        assert_reads(handle, tokens)
        handle.free()
        assert cache.audit() == ()
        stats = cache.stats()
        assert stats.used_blocks == 0
        assert stats.cached_blocks + stats.free_blocks == 8


# -- policies of others --------------------------------------------------------------------------------------


class Recording:
    """A policy that writes down what it is told, and evicts in the order it is given."""

    name = "recording"

    def __init__(self, order: Callable[[list[str]], Iterable[str]] = list) -> None:
        self.told: list[tuple[str, str]] = []
        self.seen: list[EvictionCandidate] = []
        self._order = order

    def record_access(self, cache_id: str) -> None:
        self.told.append(("access", cache_id))

    def forget(self, cache_id: str) -> None:
        self.told.append(("forget", cache_id))

    def select_eviction_candidates(self, known: Mapping[str, EvictionCandidate]) -> Iterable[str]:
        self.seen = list(known.values())
        return self._order(list(known))


def test_a_policy_is_told_what_is_stored_found_and_gone(new_cache: MakeCache) -> None:
    policy = Recording()
    cache = new_cache(8, settings={"eviction_policy": policy})
    one = stored(cache, prompt(1, 2))
    cache_id = one.cache_id
    one.free()
    assert hit(cache, longer(prompt(1, 2))) == 8
    assert set(policy.told) == {("access", cache_id)}
    assert len(policy.told) >= 2
    publish(cache, prompt(2, 1), priority=5)
    take(cache, 6)
    assert [(each.num_blocks, each.priority) for each in policy.seen] == [(2, 0), (1, 5)]
    assert policy.seen[0].cache_id == cache_id
    take(cache, 1)
    take(cache, 1)
    assert policy.told.count(("forget", cache_id)) == 1


def test_a_prefix_that_live_sequences_hold_entirely_counts_as_used_when_room_is_needed() -> None:
    policy = Recording()
    with make_prefix_cache(PagedStorage, num_blocks=8, settings={"eviction_policy": policy}) as cache:
        first = stored(cache, prompt(1, 2))
        cache_id = first.cache_id
        first.free()
        pin = cache.allocate(token_ids=longer(prompt(1, 2)))
        publish(cache, prompt(2, 2))
        policy.told.clear()
        take(cache, 4)
        assert policy.told == [("access", cache_id)]
        pin.free()


def test_a_policy_may_spare_and_may_name_what_is_gone(new_cache: MakeCache) -> None:
    spared: list[str] = []
    policy = Recording(lambda known: ["gone", *(each for each in known if each not in spared)])
    cache = new_cache(4, settings={"eviction_policy": policy})
    one = stored(cache, prompt(1, 2))
    spared.append(one.cache_id)
    one.free()
    publish(cache, prompt(2, 2))
    take(cache, 2)
    with pytest.raises(CacheFullError) as caught:
        take(cache, 1)
    assert (caught.value.free, caught.value.evictable) == (0, 2)
    assert peek(cache, longer(prompt(1, 2))) == 8
    spared.clear()
    take(cache, 2)


def test_a_policy_that_spares_all_does_not_lift_the_limit(new_cache: MakeCache) -> None:
    policy = Recording(lambda known: [])
    prefix = PrefixCacheConfig(enabled=True, max_prefixes=1)
    cache = new_cache(8, prefix=prefix, settings={"eviction_policy": policy})
    publish(cache, prompt(1, 2))
    publish(cache, prompt(2, 2))
    assert [peek(cache, longer(prompt(name, 2))) for name in (1, 2)] == [0, 8]


@pytest.mark.parametrize("method", ["record_access", "forget", "select_eviction_candidates"])
def test_sglang_16067_a_policy_that_raises_loses_nothing(
    new_cache: MakeCache, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Recording()
    cache = new_cache(6, settings={"eviction_policy": policy})
    publish(cache, prompt(1, 2))
    publish(cache, prompt(2, 2))

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError(method)

    for act in (
        lambda: take(cache, 6),
        lambda: cache.allocate(token_ids=longer(prompt(1, 2)), num_tokens=20),
        lambda: stored(cache, prompt(3, 2)).free(),
        lambda: stored(cache, [*prompt(1, 2), *prompt(4, 1)]).free(),
        cache.reset_prefix_cache,
    ):
        monkeypatch.setattr(policy, method, broken)
        with suppress(ZeroDivisionError):
            act()
        monkeypatch.undo()
        for handle in cache.list_handles():
            handle.free()
        assert cache.audit() == ()
        stats = cache.stats()
        assert stats.used_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == 6
    cache.reset_prefix_cache()
    assert cache.stats().free_blocks == 6


@pytest.mark.parametrize("method", ["truncate", "close", "fork", "open", "reserve"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_sglang_16067_a_storage_that_fails_while_room_is_made_loses_nothing(
    new_cache: MakeCache, method: str, at: int
) -> None:
    cache = new_cache(6)
    publish(cache, prompt(1, 2))
    publish(cache, prompt(2, 2))
    live = stored(cache, prompt(5, 2))
    for act in (
        lambda: cache.allocate(token_ids=longer(prompt(1, 2)), num_tokens=12).free(),
        lambda: fill(live, [*prompt(5, 2), *prompt(6, 1)]),
        lambda: live.fork().free(),
        lambda: stored(cache, prompt(3, 3)).free(),
        lambda: stored(cache, prompt(4, 3)).free(),
    ):
        tokens = live.token_ids
        try:
            with failing(cache.storage, method, at=at):
                act()
        except (StorageFailed, CacheFullError):
            assert live.token_ids == tokens
        except AssertionError as error:
            assert "times only" in str(error)  # noqa: PT017 - the failure was never reached
        for handle in cache.list_handles():
            if handle is not live:
                handle.free()
        assert cache.audit() == ()
        assert_reads(live, live.token_ids)
        assert cache.stats().used_blocks == live.block_table.num_blocks
