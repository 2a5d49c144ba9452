"""The audit finds each kind of inconsistency, one planted at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache_core import HandleState, KvCacheHandle, KvCacheManager
from kvcache_core.allocator import BlockAllocator
from tests.caches import NewCache, filled, make_cache

Plant = Callable[[KvCacheManager, KvCacheHandle, BlockAllocator], object]


def _sequence_gone(cache: KvCacheManager, handle: KvCacheHandle, allocator: BlockAllocator) -> None:
    del cache.store.live[handle.request_id]


def _free_while_named(cache: KvCacheManager, handle: KvCacheHandle, allocator: BlockAllocator) -> None:
    allocator.give_back(handle.sequence.blocks[:1])


def _lost(cache: KvCacheManager, handle: KvCacheHandle, allocator: BlockAllocator) -> None:
    allocator.unreference(allocator.take(2))


def _ended_step(cache: KvCacheManager, handle: KvCacheHandle, allocator: BlockAllocator) -> None:
    step = cache.begin({handle: 1})
    step.abort()
    handle.sequence.transaction = step._transaction


PLANTED: dict[str, tuple[Plant, str]] = {
    "one reference too many": (lambda c, h, a: a.share(h.sequence.blocks[:1]), "block 1 counts 2 references and 1"),
    "one reference too few": (lambda c, h, a: a.unreference(h.sequence.blocks[1:]), "block 2 counts 0 references"),
    "a name too many": (lambda c, h, a: h.sequence.blocks.append(9), "block 9 counts 0 references and 1 tables"),
    "a block named twice by one table": (lambda c, h, a: h.sequence.blocks.append(1), "names a block twice"),
    "the null block in a table": (lambda c, h, a: h.sequence.blocks.append(0), "block 0 does not exist but is named"),
    "a block beyond the last": (lambda c, h, a: h.sequence.blocks.append(17), "block 17 does not exist but is named"),
    "a free block that does not exist": (lambda c, h, a: a.give_back([17]), "block 17 does not exist but is free"),
    "a block free twice": (lambda c, h, a: a.give_back([16]), "block 16 is free twice"),
    "a block both free and named": (_free_while_named, "block 1 is free and named"),
    "blocks that nobody has": (_lost, "blocks [3, 4] are neither free nor named"),
    "a loose block that was never taken": (lambda c, h, a: a._loose.add(16), "block 16 is free and named"),
    "a sequence that is gone": (_sequence_gone, "block 1 counts 1 references and 0 tables name it"),
    "more tokens than room": (lambda c, h, a: setattr(h.sequence, "num_tokens", 9), "9 tokens do not fit 2 blocks"),
    "more tokens than allowed": (lambda c, h, a: setattr(h.sequence, "max_tokens", 5), "exceed its maximum of 5"),
    "more token ids than tokens": (lambda c, h, a: h.sequence.token_ids.append(7), "7 token ids are known of 6 tokens"),
    "no reference left": (lambda c, h, a: setattr(h.sequence, "references", 0), "is live with 0 references"),
    "freed but live": (lambda c, h, a: setattr(h.sequence, "state", HandleState.FREED), "live though it was freed"),
    "held by a step that ended": (_ended_step, "is held by a step that was aborted"),
    "a retention that nobody has": (
        lambda c, h, a: (a._names.__setitem__(3, 1), a._retentions.__setitem__(3, 1)),
        "block 3 counts 1 retentions and 0",
    ),
    "a wrong count of cached blocks": (lambda c, h, a: setattr(a, "_cached", 2), "cached count is 2 but 0 blocks"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_audit_finds(name: str) -> None:
    plant, finding = PLANTED[name]
    cache = make_cache()
    handle = filled(cache, 6)
    assert cache.audit() == ()
    plant(cache, handle, cache.block_allocator)
    found = cache.audit()
    cache.store.closed = True  # past repair
    assert any(finding in line for line in found), found


def test_the_audit_reports_every_problem_and_whose_it_is(new_cache: NewCache) -> None:
    cache = new_cache()
    one, two = filled(cache, 6, request_id="one"), filled(cache, 6, "b", request_id="two")
    one.sequence.references = 0
    two.sequence.references = -1
    assert cache.audit() == ("one: is live with 0 references", "two: is live with -1 references")
    one.sequence.references = two.sequence.references = 1


def test_the_audit_includes_what_the_storage_finds(cache: KvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.storage, "audit", lambda: ["slot 3 is nobody's"])
    assert cache.audit() == ("slot 3 is nobody's",)
    monkeypatch.undo()


def test_the_audit_changes_nothing_and_knows_open_steps(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    fork = handle.fork()
    step = cache.begin({fork: 5, handle: 3})
    before = cache.stats()
    assert cache.audit() == ()
    assert cache.stats() == before
    step.abort()


def test_a_wrong_free_count_is_found(new_cache: NewCache) -> None:
    cache = new_cache()
    allocator = cache.block_allocator
    allocator._total = 17
    allocator._names.append(0)
    allocator._retentions.append(0)
    free_ids = allocator.free_ids
    allocator.free_ids = lambda: free_ids()[:-1]  # type: ignore[method-assign]
    assert "free count is 17 but 16 blocks are free" in cache.audit()
    assert "blocks [17] are neither free nor named by anybody" in cache.audit()
