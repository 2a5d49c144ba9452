"""The block books: room, refusals with numbers, sharing, and scrubbing what nobody names any more."""

from __future__ import annotations

import pytest

from kvcache_core import CacheFullError
from kvcache_core.allocator import BlockAllocator
from kvcache_core.books import Books
from kvcache_core.observing import EventQueue
from kvcache_core.plugin import BlockRows
from tests.caches import StorageFailed, failing, make_spec
from tests.storages.paged import PagedStorage


@pytest.fixture
def storage() -> PagedStorage:
    return PagedStorage(make_spec(num_blocks=6))


@pytest.fixture
def books(storage: PagedStorage) -> Books:
    return Books(BlockAllocator(6, 4), storage, EventQueue("cache"), scrub=True)


def test_taking_and_releasing_moves_blocks_between_free_and_used(books: Books) -> None:
    blocks = books.take(4, purpose="for a test")
    assert (books.used_blocks, books.available_blocks) == (4, 2)
    books.share(blocks[:1])
    assert [books.is_shared(block) for block in blocks[:2]] == [True, False]
    books.release(blocks)
    assert (books.used_blocks, books.available_blocks) == (1, 5)
    books.release(blocks[:1])
    assert (books.used_blocks, books.available_blocks) == (0, 6)


def test_a_refusal_says_what_for_and_counts(books: Books) -> None:
    books.take(4, purpose="for a test")
    with pytest.raises(
        CacheFullError, match=r"^no room for 9 new tokens: 3 more blocks of 4 tokens are needed, 2 of 6"
    ):
        books.take(3, purpose="for 9 new tokens")
    assert (books.failures, books.available_blocks) == (1, 2)


def test_what_could_be_evicted_is_room_and_is_evicted_only_when_needed(books: Books) -> None:
    kept = books.take(4, purpose="for a test")
    books.retain(kept)
    assert (books.used_blocks, books.available_blocks, books.allocator.free_block_count) == (0, 6, 2)
    asked: list[int] = []

    def evict(count: int) -> None:
        asked.append(count)
        books.release_retained(kept)

    books.make_room = evict
    books.take(2, purpose="for a test")
    assert asked == []
    books.take(4, purpose="for a test")
    assert asked == [4]
    assert books.available_blocks == 0


def test_a_policy_that_spares_everything_makes_a_refusal_not_a_block_that_does_not_exist(books: Books) -> None:
    books.retain(books.take(4, purpose="for a test"))
    books.make_room = lambda count: None
    with pytest.raises(CacheFullError, match="2 of 6 are free and 4 can be evicted") as caught:
        books.take(3, purpose="for a test")
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 4)
    assert books.take(2, purpose="for a test") == [5, 6]


def test_only_rows_that_nobody_names_are_scrubbed(
    books: Books, storage: PagedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrubbed: list[list[BlockRows]] = []
    monkeypatch.setattr(storage, "scrub", scrubbed.append)
    blocks = books.take(3, purpose="for a test")
    books.share(blocks[:2])
    books.release(blocks)
    assert scrubbed == [[BlockRows(3, 0, 4)]]
    books.scrub_tail(blocks[:2], 6)
    assert scrubbed.pop() == [BlockRows(2, 2, 4)]
    books.share([2])
    books.scrub_tail(blocks[:2], 6)
    books.scrub_tail(blocks[:2], 8)
    assert len(scrubbed) == 1


def test_blocks_are_free_even_when_scrubbing_them_fails(books: Books, storage: PagedStorage) -> None:
    blocks = books.take(6, purpose="for a test")
    with failing(storage, "scrub"), pytest.raises(StorageFailed):
        books.release(blocks)
    assert (books.used_blocks, books.available_blocks) == (0, 6)
    assert sorted(books.allocator.free_ids()) == [1, 2, 3, 4, 5, 6]
