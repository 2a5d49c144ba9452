"""Reservations: blocks taken, shared blocks copied, and the way back."""

from __future__ import annotations

import pytest

from kvcache_core.allocator import BlockAllocator
from kvcache_core.books import Books
from kvcache_core.observing import EventQueue
from kvcache_core.reservation import Reservation
from kvcache_core.sequence import CachedSequence
from tests.caches import StorageFailed, failing, make_spec
from tests.storages.paged import PagedStorage


class Setting:
    """A sequence of `tokens` tokens in blocks of 4, whose blocks at `shared` somebody else names too."""

    def __init__(self, tokens: int, shared: tuple[int, ...] = (), reserved: int = 0) -> None:
        self.storage = PagedStorage(make_spec())
        self.books = Books(BlockAllocator(16, 4), self.storage, EventQueue("cache"), scrub=False)
        blocks = self.books.take(-(-tokens // 4) + reserved, purpose="for a test")
        self.books.share([blocks[index] for index in shared])
        self.sequence = CachedSequence("kv-1", "chat", 64, 0, 0, None, blocks, num_tokens=tokens)

    def reservation(self, count: int) -> Reservation:
        start = self.sequence.num_tokens
        return Reservation(self.books, self.sequence, start, start + count)

    def apply(self, reservation: Reservation) -> None:
        reservation.apply(self.books, self.storage, self.books.take(reservation.needed, purpose="for a test"))

    @property
    def free(self) -> int:
        return self.books.available_blocks


@pytest.mark.parametrize(
    ("tokens", "shared", "reserved", "count", "needed"),
    [
        (0, (), 0, 0, 0),
        (0, (), 0, 1, 1),
        (6, (), 0, 2, 0),
        (6, (), 0, 3, 1),
        (8, (), 0, 1, 1),
        (6, (), 2, 10, 0),
        (6, (1,), 0, 0, 0),
        (6, (1,), 0, 1, 1),
        (6, (1,), 0, 3, 2),
        (6, (1,), 1, 3, 1),
        (6, (0,), 0, 1, 0),
        (8, (0, 1), 0, 1, 1),
    ],
)
def test_only_new_blocks_and_a_shared_block_that_is_written_are_needed(
    tokens: int, shared: tuple[int, ...], reserved: int, count: int, needed: int
) -> None:
    setting = Setting(tokens, shared, reserved)
    assert setting.reservation(count).needed == needed


@pytest.mark.parametrize(("shared", "held"), [((), ()), ((1,), (2,))])
def test_undoing_restores_table_and_counts(shared: tuple[int, ...], held: tuple[int, ...]) -> None:
    setting = Setting(6, shared)
    blocks, free = list(setting.sequence.blocks), setting.free
    reservation = setting.reservation(7)
    setting.apply(reservation)
    assert reservation.held_blocks == held
    assert setting.sequence.blocks != blocks
    reservation.undo(setting.books)
    assert (setting.sequence.blocks, setting.free) == (blocks, free)
    assert [setting.books.is_shared(block) for block in blocks] == [False, bool(shared)]


@pytest.mark.parametrize("shared", [(), (1,)])
def test_a_storage_that_fails_leaves_the_table_and_the_blocks_to_the_caller(shared: tuple[int, ...]) -> None:
    setting = Setting(6, shared)
    blocks = list(setting.sequence.blocks)
    reservation = setting.reservation(7)
    taken = setting.books.take(reservation.needed, purpose="for a test")
    with failing(setting.storage, "reserve"), pytest.raises(StorageFailed):
        reservation.apply(setting.books, setting.storage, taken)
    assert setting.sequence.blocks == blocks
    assert not set(taken) & set(blocks)


@pytest.mark.parametrize(("kept", "excess"), [(7, 0), (6, 1), (3, 1), (2, 2), (0, 2)])
def test_settling_returns_what_the_kept_tokens_do_not_need(kept: int, excess: int) -> None:
    setting = Setting(6)
    reservation = setting.reservation(7)
    setting.apply(reservation)
    assert len(reservation.settle(4, 6 + kept)) == excess
    assert len(setting.sequence.blocks) == 4 - excess


def test_settling_returns_the_name_of_the_block_that_was_copied() -> None:
    setting = Setting(6, (1,))
    reservation = setting.reservation(1)
    setting.apply(reservation)
    assert reservation.settle(4, 7) == [2]
    assert setting.sequence.blocks == [1, 3]


def test_settling_keeps_room_that_was_there_before() -> None:
    setting = Setting(6, reserved=3)
    reservation = setting.reservation(20)
    setting.apply(reservation)
    assert len(reservation.settle(4, 7)) == 2
    assert len(setting.sequence.blocks) == 5
