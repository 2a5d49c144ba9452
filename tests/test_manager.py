"""The manager: opening, reserving, finding and ending sequences, and the cache as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_core import (
    AllocationRequest,
    CacheFullError,
    HandleError,
    KvCacheManager,
    ShapeError,
    StepError,
    UnsupportedError,
)
from tests.caches import (
    MIXED,
    NewCache,
    StorageFailed,
    assert_holds,
    failing,
    filled,
    grow,
    raising,
    refused,
    rows,
    unchanged,
)
from tests.storages.int8 import Int8Storage

# -- allocate ------------------------------------------------------------------------------------------------


def test_a_new_sequence_is_empty_and_has_room_for_its_prompt(cache: KvCacheManager) -> None:
    handle = cache.allocate(token_ids=range(10))
    assert (handle.num_tokens, handle.token_ids, handle.block_table.num_blocks) == (0, (), 3)
    assert cache.allocate(num_tokens=5).block_table.num_blocks == 2
    assert cache.allocate(token_ids=[1], num_tokens=9).block_table.num_blocks == 3
    assert cache.allocate().block_table.num_blocks == 0
    assert cache.allocate().max_tokens == 48


def test_a_request_and_its_fields_are_the_same(cache: KvCacheManager) -> None:
    handle = cache.allocate(AllocationRequest(request_id="chat", num_tokens=5, max_sequence_length=7, priority=3))
    assert (handle.request_id, handle.max_tokens, handle.sequence.priority) == ("chat", 7, 3)
    with raising(TypeError, "either an AllocationRequest or its fields"):
        cache.allocate(AllocationRequest(), num_tokens=5)
    with raising(TypeError, "num_token"):
        cache.allocate(num_token=5)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 3, "num_heads": 2, "head_dim": 8},
        {"device": "cpu", "dtype": "float32"},
        {"device": "cpu:0"},
        {"device": torch.device("cpu"), "dtype": torch.float32},
        {"max_sequence_length": 48},
    ],
)
def test_a_request_that_fits_the_cache_is_accepted(cache: KvCacheManager, fields: dict[str, Any]) -> None:
    assert cache.can_allocate(**fields)
    cache.allocate(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 4}, "num_layers=4 and the cache's is 3"),
        ({"num_heads": 4}, "num_heads=4 and the cache's is 2"),
        ({"head_dim": 4}, "head_dim=4 and the cache's is 8"),
        ({"device": "cuda:0"}, "device=cuda:0 and the cache's is cpu"),
        ({"device": torch.device("meta")}, "device=meta and the cache's is cpu"),
        ({"dtype": torch.bfloat16}, "dtype=bfloat16 and the cache's is float32"),
        ({"dtype": "float16"}, "dtype=float16 and the cache's is float32"),
        ({"max_sequence_length": 49}, "max_sequence_length=49 and the cache's is 48; raise it"),
    ],
)
def test_a_request_for_another_cache_is_refused(cache: KvCacheManager, fields: dict[str, Any], words: str) -> None:
    for ask in (cache.allocate, cache.can_allocate):
        with refused(cache, ShapeError, words):
            ask(**fields)


def test_a_mixed_model_has_no_single_number_to_ask_for(new_cache: NewCache) -> None:
    cache = new_cache(geometry=MIXED)
    for fields in ({"num_heads": 2}, {"head_dim": 8}):
        with refused(cache, ShapeError, "different from layer to layer"):
            cache.allocate(**fields)
    cache.allocate(num_layers=5)


def test_a_prompt_longer_than_the_cache_is_refused(cache: KvCacheManager) -> None:
    with refused(cache, CacheFullError, "49 tokens are more than the 48 that this sequence may hold"):
        cache.allocate(token_ids=range(49))
    with pytest.raises(CacheFullError) as caught:
        cache.allocate(num_tokens=9, max_sequence_length=8)
    assert (caught.value.needed, caught.value.free) == (3, 16)
    assert "raise max_sequence_length" in str(caught.value.hint)
    assert not cache.can_allocate(num_tokens=49)
    with refused(cache, CacheFullError):
        cache.allocate(num_tokens=2**62)


def test_a_full_cache_says_what_is_needed_free_and_would_help(cache: KvCacheManager) -> None:
    filled(cache, 40)
    assert cache.can_allocate(num_tokens=24)
    assert not cache.can_allocate(num_tokens=25)
    with refused(
        cache,
        CacheFullError,
        "no room for a sequence of 25 tokens: 7 more blocks of 4 tokens are needed, 6 of 16 are free",
    ):
        cache.allocate(num_tokens=25)
    with pytest.raises(CacheFullError) as caught:
        cache.allocate(num_tokens=25)
    error = caught.value
    assert (error.needed, error.free, error.evictable) == (7, 6, 0)
    assert str(error).splitlines()[1] == "  free or truncate a handle, or raise the budget"
    assert isinstance(error, MemoryError)
    cache.allocate(num_tokens=24)


def test_a_request_id_belongs_to_one_live_sequence(cache: KvCacheManager) -> None:
    handle = cache.allocate(request_id="chat")
    with refused(cache, HandleError, "'chat' belongs to a live sequence; free it first", reason="in-use"):
        cache.allocate(request_id="chat")
    handle.free()
    assert cache.allocate(request_id="chat").cache_id != handle.cache_id
    assert not handle.is_valid


def test_a_storage_that_fails_to_open_leaves_nothing_taken(cache: KvCacheManager) -> None:
    with unchanged(cache), failing(cache.storage, "open"), pytest.raises(StorageFailed):
        cache.allocate(num_tokens=10, request_id="chat")
    cache.allocate(num_tokens=10, request_id="chat")


def test_a_storage_that_fails_to_fork_leaves_nothing_taken(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache), failing(cache.storage, "fork"), pytest.raises(StorageFailed):
        handle.fork(request_id="draft")
    assert_holds(handle.fork(request_id="draft"), a=6)


def test_a_fork_that_has_to_copy_needs_room(new_cache: NewCache) -> None:
    cache = new_cache(Int8Storage)
    handle = filled(cache, 40)
    with refused(cache, CacheFullError, "no room to fork", "10 more blocks", "6 of 16 are free"):
        handle.fork()


# -- extend and deallocate -----------------------------------------------------------------------------------


def test_extend_reserves_room_beyond_what_is_stored(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    cache.extend(handle, 2)
    assert handle.block_table.num_blocks == 2
    cache.extend("chat", 3)
    assert handle.block_table.num_blocks == 3
    cache.extend(handle, 0)
    cache.extend(handle, 42)
    assert (handle.block_table.num_blocks, handle.num_tokens) == (12, 6)
    free = cache.stats().free_blocks
    grow(handle, 42)
    assert cache.stats().free_blocks == free
    assert_holds(handle, a=48)


@pytest.mark.parametrize("count", [-1, True, 1.0, "1", None, 10**5000], ids=type)
def test_extend_takes_a_count(cache: KvCacheManager, count: Any) -> None:
    handle = filled(cache, 6)
    with refused(cache, ShapeError, "num_tokens must be an int of at least 0"):
        cache.extend(handle, count)


def test_extend_is_refused_beyond_the_maximum_and_beyond_the_room(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with refused(cache, CacheFullError, "49 tokens are more than the 48"):
        cache.extend(handle, 43)
    filled(cache, 40, "b")
    with refused(cache, CacheFullError, "no room to extend by 27 tokens", "7 more blocks", "4 of 16 are free"):
        cache.extend(handle, 27)


@pytest.mark.parametrize("name", ["nobody", "", None, 3, ()])
def test_unknown_names_are_refused_or_not_found(cache: KvCacheManager, name: Any) -> None:
    filled(cache, 3, request_id="chat")
    with refused(cache, HandleError, "no live sequence has the request id", reason="unknown"):
        cache.deallocate(name)
    assert cache.get_handle(name) is None
    with refused(cache, HandleError, reason="unknown" if isinstance(name, str) else "foreign"):
        cache.extend(name, 1)


def test_deallocate_ends_every_handle_of_the_sequence(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    clone, fork = handle.clone_handle(), handle.fork()
    cache.deallocate("chat")
    assert (handle.is_valid, clone.is_valid, fork.is_valid) == (False, False, True)
    assert_holds(fork, a=6)
    with refused(cache, HandleError, reason="unknown"):
        cache.deallocate("chat")


def test_deallocate_and_extend_wait_for_open_steps(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    step = cache.begin({handle: 1})
    with refused(cache, StepError, "cannot deallocate 'chat' while it is part of an open step"):
        cache.deallocate("chat")
    with refused(cache, StepError, "cannot extend 'chat'"):
        cache.extend("chat", 1)
    step.abort()
    cache.deallocate("chat")


# -- finding handles -----------------------------------------------------------------------------------------


def test_handles_are_found_by_name_and_listed_in_order(cache: KvCacheManager) -> None:
    one, two = cache.allocate(request_id="one"), cache.allocate(request_id="two")
    fork = one.fork(request_id="fork")
    assert cache.list_handles() == [one, two, fork]
    assert cache.get_handle("two") is two
    two.free()
    assert cache.get_handle("two") is None
    assert cache.list_handles() == [one, fork]
    assert cache.stats().active_caches == 2


def test_a_found_handle_is_a_usable_one_and_not_a_new_reference(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    clone = handle.clone_handle()
    handle.free()
    assert cache.get_handle("chat") is clone
    assert cache.list_handles() == [clone]
    found = cache.get_handle("chat")
    assert found is not None
    found.free()
    assert cache.stats().active_caches == 0


# -- the whole -----------------------------------------------------------------------------------------------


def test_a_cache_tells_what_it_is(cache: KvCacheManager) -> None:
    assert (cache.block_size, cache.max_sequence_length, cache.backend) == (4, 48, "custom")
    assert (cache.device, cache.dtype) == (torch.device("cpu"), torch.float32)
    assert cache.geometry.num_layers == 3
    assert cache.capabilities == {"unequal_head_dims"}
    filled(cache, 6)
    assert repr(cache) == "<KvCacheManager 'custom', 16 blocks of 4 tokens: 1 sequences>"
    cache.close()
    assert repr(cache) == "<KvCacheManager 'custom', 16 blocks of 4 tokens: closed>"


def test_an_undeclared_capability_is_named_with_those_there_are(cache: KvCacheManager) -> None:
    cache.require_capability("unequal_head_dims")
    with pytest.raises(UnsupportedError, match=r"^backend 'custom' does not declare the capability 'swap'") as caught:
        cache.require_capability("swap")
    assert (caught.value.capability, caught.value.backend) == ("swap", "custom")
    assert str(caught.value).splitlines()[1] == "  it declares: unequal_head_dims"


def test_vllm_12284_reset_drops_everything_and_says_so_to_every_handle(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6, request_id="one"), filled(cache, 4, "b")
    fork, step = one.fork(), cache.begin({two: 3})
    cache.reset()
    assert (cache.stats().free_blocks, cache.stats().active_caches, cache.list_handles()) == (16, 0, [])
    for handle in (one, two, fork):
        with raising(HandleError, "from before the cache was reset", reason="stale"):
            handle.free()
    assert step.state == "aborted"
    again = filled(cache, 5, "c", request_id="one")
    assert_holds(again, c=5)
    assert cache.audit() == ()
    cache.reset()
    cache.reset()
    assert not again.is_valid


def test_closing_twice_is_harmless_and_everything_else_is_refused(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    cache.close()
    cache.close()
    assert cache.closed
    uses: list[Callable[[], Any]] = [
        cache.allocate,
        cache.can_allocate,
        cache.stats,
        cache.gc,
        cache.audit,
        cache.reset,
        cache.list_handles,
        cache.__enter__,
        lambda: cache.begin({}),
        lambda: cache.get_handle("x"),
        lambda: cache.deallocate("x"),
        lambda: cache.extend("x", 1),
        lambda: cache.extend(handle, 1),
        lambda: cache.set_pressure_callback(None),
        lambda: cache.subscribe(print),
        lambda: cache.explain(token_ids=[1]),
        lambda: cache.enable_prefix_caching(True),
        cache.reset_prefix_cache,
        lambda: cache.share_prefix(handle, handle, 1),
    ]
    for use in uses:
        with raising(HandleError, "the cache was closed; open it again", reason="closed"):
            use()


def test_tensors_outlive_the_cache(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    both = handle.kv_cache(1)
    wanted = rows(cache, 1, 0, 6)
    cache.close()
    assert both is not None
    for got, expected in zip(both, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_cache_closes_itself_as_a_context_manager(new_cache: NewCache) -> None:
    with new_cache() as cache:
        filled(cache, 6)
    assert cache.closed
    with raising(KeyError), new_cache() as cache:
        raise KeyError("mine")
    assert cache.closed


@pytest.mark.parametrize("method", ["close", "truncate", "shutdown"])
def test_a_storage_that_fails_while_closing_does_not_keep_the_cache_open(new_cache: NewCache, method: str) -> None:
    cache = new_cache(Int8Storage)
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 3, two: 3})
    with failing(cache.storage, method), pytest.raises(StorageFailed):
        cache.close()
    assert cache.closed
    assert not one.is_valid
    assert step.state == "aborted"
    if method != "shutdown":
        assert cache.storage.nbytes == 0
    cache.close()


@pytest.mark.parametrize("method", ["close", "truncate"])
def test_a_storage_that_fails_while_resetting_leaves_an_empty_cache(new_cache: NewCache, method: str) -> None:
    cache = new_cache(Int8Storage)
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 3, two: 3})
    with failing(cache.storage, method), pytest.raises(StorageFailed):
        cache.reset()
    assert (cache.stats().free_blocks, cache.stats().active_caches, cache.audit()) == (16, 0, ())
    assert step.state == "aborted"
    assert not one.is_valid
    assert not two.is_valid
    assert_holds(filled(cache, 6, "c"), c=6)


def test_a_storage_that_fails_to_close_a_sequence_has_freed_it_all_the_same(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with failing(cache.storage, "close"), pytest.raises(StorageFailed):
        handle.free()
    assert not handle.is_valid
    assert (cache.stats().free_blocks, cache.stats().active_caches, cache.audit()) == (16, 0, ())


def test_a_storage_that_fails_to_truncate_changes_nothing(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache), failing(cache.storage, "truncate"), pytest.raises(StorageFailed):
        handle.truncate(1)


@pytest.mark.parametrize("at", [1, 2])
def test_a_truncate_whose_scrubbing_fails_has_happened(new_cache: NewCache, at: int) -> None:
    cache = new_cache(scrub=True)
    handle = filled(cache, 14)
    with failing(cache.storage, "scrub", at=at), pytest.raises(StorageFailed):
        handle.truncate(6)
    assert_holds(handle, a=6)
    assert (cache.stats().free_blocks, cache.audit()) == (14, ())


def test_freed_and_dropped_rows_are_scrubbed_where_the_cache_is_told_to(new_cache: NewCache) -> None:
    cache = new_cache(scrub=True)
    handle = filled(cache, 14)
    fork = handle.fork()
    keys, blocks = cache.storage.keys[1], handle.block_table.physical_blocks  # type: ignore[attr-defined]
    handle.truncate(6)
    assert_holds(fork, a=14)
    fork.truncate(5)
    assert keys[blocks[1], :2].abs().min() == 1
    assert keys[list(blocks[2:])].eq(0).all()
    fork.free()
    assert_holds(handle, a=6)
    handle.truncate(5)
    assert keys[blocks[1], 1:].eq(0).all()
    assert_holds(handle, a=5)
    handle.free()
    assert keys[list(blocks)].eq(0).all()


def test_aborted_and_rejected_rows_are_scrubbed_too(new_cache: NewCache) -> None:
    cache = new_cache(scrub=True)
    handle = filled(cache, 6)
    keys = cache.storage.keys[1]  # type: ignore[attr-defined]
    for end in ("abort", "reject"):
        step = cache.begin({handle: 7})
        for layer in range(3):
            step.write(layer, *rows(cache, layer, 6, 13, "secret"))
        if end == "abort":
            step.abort()
        else:
            step.accept(handle, 0)
            step.commit()
        written = keys[1:].flatten(0, 1)
        written = written[~written.isnan().any(-1).any(-1)]
        assert int(written.ne(0).any(-1).any(-1).sum()) == 6
    assert_holds(handle, a=6)


def test_gc_reports_what_was_given_back_since_the_last_time(cache: KvCacheManager) -> None:
    filled(cache, 6).free()
    assert dataclasses.astuple(cache.gc()) == (0, 0)


def test_share_prefix_takes_exactly_so_many_tokens(cache: KvCacheManager) -> None:
    source, target = filled(cache, 10), cache.allocate(num_tokens=14)
    reserved = target.block_table.num_blocks
    cache.share_prefix(source, target, 7)
    assert_holds(target, a=7)
    assert target.token_ids == (0, 1, 2, 3, 4, 5, 6)
    assert target.block_table.num_blocks >= reserved
    grow(target, 3, "b")
    grow(source, 1, "c")
    assert_holds(source, a=10, c=11)
    assert_holds(target, a=7, b=10)


def test_share_prefix_refuses_what_it_cannot_do(cache: KvCacheManager) -> None:
    source, target, short = filled(cache, 10), cache.allocate(), cache.allocate(max_sequence_length=5)
    full = filled(cache, 1, "b")
    for count in (-1, 11, True, 1.0, None):
        with refused(cache, ShapeError, "share_prefix takes an int from 0 to 10 tokens"):
            cache.share_prefix(source, target, count)  # type: ignore[arg-type]
    with refused(cache, ShapeError, "from 0 to 5 tokens"):
        cache.share_prefix(source, short, 6)
    for wrong in (full, source):
        with refused(cache, ShapeError, "must be another sequence, and empty"):
            cache.share_prefix(source, wrong, 1)
    with unchanged(cache), failing(cache.storage, "fork"), pytest.raises(StorageFailed):
        cache.share_prefix(source, target, 6)
    step = cache.begin({source: 1})
    with refused(cache, StepError, "open step"):
        cache.share_prefix(source, target, 6)
    step.abort()
