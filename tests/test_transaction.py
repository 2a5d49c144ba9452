"""What a step does to the books, apart from its data."""

from __future__ import annotations

import time

import pytest

from kvcache_core import CacheFullError, KvCacheHandle, KvCacheManager, StepError
from kvcache_core.new_tokens import NewTokens, pack
from kvcache_core.transaction import Transaction
from tests.caches import NewCache, StorageFailed, failing, filled, raising


def reserve(cache: KvCacheManager, *wanted: tuple[KvCacheHandle, NewTokens]) -> Transaction:
    return cache.store.reserve([handle.sequence for handle, _ in wanted], pack([new for _, new in wanted]))


def test_versions_are_those_after_a_commit_that_kept_every_token(cache: KvCacheManager) -> None:
    one, two = filled(cache, 3), filled(cache, 5, "b")
    store = cache.store
    transaction = reserve(cache, (one, 0), (two, []))
    assert transaction.versions is None
    store.finish(transaction, keep=True)
    assert transaction.state == "committed"
    assert transaction.versions == [one.sequence.version, two.sequence.version]
    two.truncate(2)
    assert transaction.versions != transaction.current_versions()


def test_accepting_fewer_tokens_moves_the_stops(cache: KvCacheManager) -> None:
    one, two = filled(cache, 3), filled(cache, 5, "b")
    transaction = reserve(cache, (one, 4), (two, 6))
    assert transaction.final_stops == [7, 11]
    transaction.accepted[1] = 2
    assert transaction.final_stops == [7, 7]
    cache.store.finish(transaction, keep=True)
    assert (one.num_tokens, two.num_tokens) == (7, 7)
    assert transaction.versions is None
    assert cache.audit() == ()


def test_an_undone_transaction_cannot_be_committed_and_undoing_twice_is_harmless(cache: KvCacheManager) -> None:
    one = filled(cache, 3)
    transaction = reserve(cache, (one, 9))
    cache.store.finish(transaction, keep=False)
    cache.store.finish(transaction, keep=False)
    with raising(StepError, "commit needs an open step; this one is aborted"):
        cache.store.finish(transaction, keep=True)
    assert (one.num_tokens, one.sequence.transaction) == (3, None)


def test_a_commit_notes_one_time_for_all(cache: KvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = [filled(cache, 3, name) for name in "ab"]
    times = iter(range(2000, 3000))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    cache.store.finish(reserve(cache, *((handle, 0) for handle in handles)), keep=True)
    assert len({handle.sequence.last_access for handle in handles}) == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_nothing_is_reserved_when_the_storage_fails_for_one_of_many(cache: KvCacheManager, at: int) -> None:
    handles = [filled(cache, 3, name) for name in "abc"]
    before = [handle.block_table for handle in handles]
    with failing(cache.storage, "reserve", at=at), pytest.raises(StorageFailed):
        reserve(cache, *((handle, 6) for handle in handles))
    assert [handle.block_table for handle in handles] == before
    assert all(handle.sequence.transaction is None for handle in handles)
    assert cache.audit() == ()


@pytest.mark.parametrize(("error", "third"), [(StepError, "open"), (StepError, "twice"), (CacheFullError, "too long")])
def test_where_one_sequence_is_refused_the_others_are_free_for_the_next_step(
    cache: KvCacheManager, error: type[Exception], third: str
) -> None:
    one, two, other = (filled(cache, 3, name) for name in "abc")
    if third == "open":
        reserve(cache, (other, 1))
    last = {"open": (other, 1), "twice": (one, 1), "too long": (other, 1000)}[third]
    with pytest.raises(error):
        reserve(cache, (one, 1), (two, 1), last)
    assert (one.sequence.transaction, two.sequence.transaction) == (None, None)
    cache.store.finish(reserve(cache, (one, 1), (two, 1)), keep=True)
    assert (one.num_tokens, two.num_tokens) == (4, 4)


def test_without_room_for_all_none_is_reserved(new_cache: NewCache) -> None:
    cache = new_cache(num_blocks=4)
    one, two = filled(cache, 3), filled(cache, 3, "b")
    with raising(CacheFullError, "for 13 new tokens"):
        reserve(cache, (one, 5), (two, 8))
    assert cache.stats().free_blocks == 2
    assert (one.sequence.transaction, two.sequence.transaction) == (None, None)
    assert cache.audit() == ()
