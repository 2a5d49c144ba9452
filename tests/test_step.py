"""The step: packing, order of calls, all or nothing, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_core import CacheFullError, HandleError, KvCacheManager, ShapeError, Step, StepError
from kvcache_core.attention import attend_dense
from kvcache_core.step import _ranges
from tests.caches import (
    MIXED,
    NewCache,
    StorageFailed,
    assert_holds,
    failing,
    filled,
    grow,
    layers_of,
    raising,
    refused,
    rows,
    unchanged,
    write_all,
)


def write(step: Step, *pieces: tuple[int, int, str]) -> None:
    """Write every layer: `(start, stop, sequence)` for each handle of the step, packed in order."""
    cache = step.handles[0].manager
    for layer in cache.geometry.caching_layers:
        pairs = [rows(cache, layer, *piece) for piece in pieces]
        step.write(layer, torch.cat([key for key, _ in pairs]), torch.cat([value for _, value in pairs]))


# -- packing -------------------------------------------------------------------------------------------------


def test_a_ragged_step_gives_each_handle_its_own_rows(cache: KvCacheManager) -> None:
    one, two, three, four = filled(cache, 6), cache.allocate(), filled(cache, 4, "c"), filled(cache, 3, "d")
    with cache.step({three: 1, one: [90, 91], four: 0, two: 5}) as step:
        assert step.handles == (three, one, four, two)
        assert step.num_new_tokens == 8
        write(step, (4, 5, "c"), (6, 8, "a"), (3, 3, "d"), (0, 5, "b"))
    assert_holds(one, a=8)
    assert_holds(two, b=5)
    assert_holds(three, c=5)
    assert_holds(four, d=3)
    assert one.token_ids == (0, 1, 2, 3, 4, 5, 90, 91)
    assert two.token_ids == ()


def test_attention_of_a_batch_is_that_of_each_handle(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 9, "b")
    query = torch.randn(5, 4, 8)
    with cache.step({one: 4, two: 1}) as step:
        write(step, (6, 10, "a"), (9, 10, "b"))
        out = [step.attend(layer, query) for layer in range(3)]
    for layer in range(3):
        for handle, part in ((one, slice(0, 4)), (two, slice(4, 5))):
            key, value = handle.kv_cache(layer)  # type: ignore[misc]
            wanted = attend_dense(query[part], key, value, scale=8**-0.5)
            torch.testing.assert_close(out[layer][part], wanted)


def test_index_tensors_follow_the_block_tables(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    with cache.step({one: 3, two: 1}) as step:
        tables = one.block_table, two.block_table
        assert step.positions.tolist() == [6, 7, 8, 4]
        assert step.slot_mapping.tolist() == [*(tables[0].slot(position) for position in (6, 7, 8)), tables[1].slot(4)]
        assert step.block_tables.tolist() == [list(tables[0].physical_blocks), [*tables[1].physical_blocks, 0]]
        assert step.seq_lens.tolist() == [9, 5]
        assert step.cu_seqlens_q.tolist() == [0, 3, 4]
        assert step.last_token_index.tolist() == [2, 3]
        write(step, (6, 9, "a"), (4, 5, "b"))


def test_changing_an_index_tensor_changes_nothing_for_the_cache(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    with cache.step({one: 3}) as step:
        step.slot_mapping.fill_(two.block_table.slot(0))
        for name in ("positions", "block_tables", "seq_lens", "cu_seqlens_q", "last_token_index"):
            getattr(step, name).zero_()
        write(step, (6, 9, "a"))
        step.attend(0, torch.randn(3, 2, 8))
    assert_holds(one, a=9)
    assert_holds(two, b=4)


def test_ids_come_as_any_flat_ints(cache: KvCacheManager) -> None:
    for ids in ([1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2]), torch.tensor([1, 2]), {1: "x", 2: "y"}):
        handle = cache.allocate()
        with cache.step({handle: ids}) as step:
            write(step, (0, 2, "a"))
        assert handle.token_ids == (1, 2)
        handle.free()


def test_a_step_over_nothing_is_a_step(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache):
        with cache.step({}) as step:
            assert (step.handles, step.num_new_tokens, step.block_tables.shape) == ((), 0, (0, 0))
        assert step.state == "committed"
        with cache.step({handle: []}) as step:
            assert step.attend(0, torch.randn(0, 4, 8)).shape == (0, 4, 8)
            assert step.last_token_index.tolist() == [-1]


# -- beginning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, True, -(10**5000), 2**63], ids=type)
def test_a_number_of_new_tokens_is_a_count(cache: KvCacheManager, bad: Any) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    with refused(cache, ShapeError, "a number of new tokens must be an int of at least 0"):
        cache.begin({one: 1, two: bad})


@pytest.mark.parametrize("bad", [None, 1.0, "ab", [1.5], [[1, 2]], torch.tensor([[1]]), torch.tensor(3), [2**64]])
def test_new_tokens_are_ids_or_a_number(cache: KvCacheManager, bad: Any) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    with refused(cache, ShapeError, "token ids must be a flat sequence of 64-bit ints"):
        cache.begin({one: 1, two: bad})


def test_a_sequence_is_named_once(cache: KvCacheManager) -> None:
    handle, other = filled(cache, 6), filled(cache, 4, "b")
    clone = handle.clone_handle()
    with refused(cache, StepError, "are the same sequence; name it once"):
        cache.begin({handle: 1, other: 1, clone: 1})


def test_a_handle_takes_part_in_one_step_at_a_time(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 1})
    with refused(cache, StepError, "cannot begin a step with", "open step"):
        cache.begin({two: 1, one: 1})
    with cache.step({two: 1}) as other:
        write(other, (4, 5, "b"))
    write(step, (6, 7, "a"))
    step.commit()
    assert_holds(one, a=7)
    assert_holds(two, b=5)


def test_one_handle_that_is_invalid_refuses_the_whole_step(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    two.free()
    with refused(cache, HandleError, reason="freed"):
        cache.begin({one: 1, two: 1})


def test_room_is_reserved_for_all_handles_or_for_none(cache: KvCacheManager) -> None:
    one, two = filled(cache, 24), filled(cache, 28, "b")
    with refused(cache, CacheFullError, "no room for 20 new tokens", "6 more blocks", "3 of 16 are free"):
        cache.begin({one: 10, two: 10})
    with pytest.raises(CacheFullError) as caught:
        cache.begin({one: 10, two: 10})
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (6, 3, 0)
    assert caught.value.hint == "free or truncate a handle, or raise the budget"
    with cache.step({one: 8, two: 4}) as step:
        write(step, (24, 32, "a"), (28, 32, "b"))
    assert cache.stats().free_blocks == 0


def test_a_step_that_could_never_fit_says_so(new_cache: NewCache) -> None:
    cache = new_cache(max_sequence_length=1000)
    with pytest.raises(CacheFullError, match="no room for 65 new tokens") as caught:
        cache.begin({cache.allocate(): 65})
    assert caught.value.hint == "raise the budget: the whole cache holds 64 tokens"


def test_a_step_beyond_a_sequences_maximum_is_refused(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b", max_sequence_length=8)
    with refused(cache, CacheFullError, "9 tokens are more than the 8 that this sequence may hold"):
        cache.begin({one: 1, two: 5})
    with pytest.raises(CacheFullError) as caught:
        cache.begin({two: 5})
    assert caught.value.needed == 2
    with cache.step({two: 4}) as step:
        write(step, (4, 8, "b"))


@pytest.mark.parametrize(("method", "at"), [("reserve", 1), ("reserve", 2), ("reserve", 3), ("plan", 1)])
def test_kvcached_364_a_storage_that_fails_to_begin_leaves_nothing_taken(
    cache: KvCacheManager, method: str, at: int
) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    three = one.fork()
    with unchanged(cache), failing(cache.storage, method, at=at), pytest.raises(StorageFailed):
        cache.begin({one: 4, two: 9, three: 7})
    with cache.step({one: 4, two: 9, three: 7}) as step:
        write(step, (6, 10, "a"), (4, 13, "b"), (6, 13, "c"))
    assert_holds(one, a=10)
    assert_holds(two, b=13)
    assert_holds(three, a=6, c=13)


def test_failures_of_beginning_and_of_undoing_it_together_lose_no_block(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    storage = cache.storage
    with unchanged(cache), failing(storage, "truncate"), failing(storage, "reserve", at=2), raising(StorageFailed):
        cache.begin({one: 4, two: 9})


# -- writing -------------------------------------------------------------------------------------------------


def test_a_layer_is_written_once(cache: KvCacheManager) -> None:
    step = cache.begin({filled(cache, 6): 1})
    step.write(1, *rows(cache, 1, 6, 7))
    with raising(StepError, "layer 1 was already written"):
        step.write(1, *rows(cache, 1, 6, 7))
    step.abort()


@pytest.mark.parametrize("layer", [-1, 5, True, 0.0, "0", None, 10**5000], ids=type)
def test_a_layer_that_does_not_exist_cannot_be_written_read_or_attended(new_cache: NewCache, layer: Any) -> None:
    cache = new_cache(geometry=MIXED)
    step = cache.begin({cache.allocate(): 1})
    key, value = rows(cache, 0, 0, 1)
    for use in (lambda: step.write(layer, key, value), lambda: step.attend(layer, key), lambda: step.gather(layer)):
        with raising(ShapeError, "layer must be an int from 0 to 4, not"):
            use()
    step.abort()


def test_a_layer_that_caches_nothing_or_shares_is_not_written(new_cache: NewCache) -> None:
    cache = new_cache(geometry=MIXED)
    handle = cache.allocate()
    with cache.step({handle: 6}) as step:
        with raising(ShapeError, "layer 1 caches nothing, so it cannot be written"):
            step.write(1, *rows(cache, 0, 0, 6))
        with raising(ShapeError, "layer 4 shares the K and V of layer 2; write that one"):
            step.write(4, *rows(cache, 0, 0, 6))
        for use in (lambda: step.attend(1, torch.randn(6, 2, 8)), lambda: step.gather(1)):
            with raising(ShapeError, "layer 1 caches nothing"):
                use()
        with raising(StepError, "layer 2 was not written in this step"):
            step.attend(4, torch.randn(6, 2, 8))
        write(step, (0, 6, "a"))
        query = torch.randn(6, 2, 8)
        assert torch.equal(step.attend(4, query), step.attend(2, query))
        assert step.attend(3, torch.randn(6, 3, 4)).shape == (6, 3, 6)
    assert_holds(handle, a=6)


def test_a_storage_that_fails_to_write_lets_the_layer_be_written_again(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    with failing(cache.storage, "write"), pytest.raises(StorageFailed):
        write(step, (6, 7, "b"))
    with raising(StepError, "missing: 0-2"):
        step.commit()
    write(step, (6, 7, "a"))
    step.commit()
    assert_holds(handle, a=7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_writes_are_cast_only_where_the_cache_allows_it(new_cache: NewCache, dtype: torch.dtype) -> None:
    strict, lenient = new_cache(), new_cache(settings={"allow_dtype_cast": True})
    layers = [(key.to(dtype), value.to(dtype)) for key, value in layers_of(strict, 0, 5)]
    refusing = strict.allocate()
    with refused(strict, ShapeError, str(dtype), "the cache stores torch.float32", "allow_dtype_cast"):
        refusing.append(layers)
    handle = lenient.allocate()
    handle.append(layers)
    assert_holds(handle, a=5)
    with refused(lenient, ShapeError, "torch.int64"):
        handle.append([(key.long(), value.long()) for key, value in layers])


# -- attending -----------------------------------------------------------------------------------------------

BAD_QUERIES: dict[str, tuple[Callable[[], Any], str]] = {
    "a row too many": (lambda: torch.randn(3, 4, 8), "not [3, 4, 8]"),
    "heads that do not divide": (lambda: torch.randn(2, 3, 8), "a multiple of 2"),
    "no heads": (lambda: torch.randn(2, 0, 8), "not [2, 0, 8]"),
    "another head dim": (lambda: torch.randn(2, 4, 4), "8], not [2, 4, 4]"),
    "a batch axis": (lambda: torch.randn(1, 2, 4, 8), "not [1, 2, 4, 8]"),
    "flat": (lambda: torch.randn(2, 32), "not [2, 32]"),
    "a scalar": (lambda: torch.tensor(1.0), "not []"),
    "integers": (lambda: torch.ones(2, 4, 8, dtype=torch.int64), "floating point, not torch.int64"),
    "complex": (lambda: torch.ones(2, 4, 8, dtype=torch.complex64), "floating point"),
    "another device": (lambda: torch.randn(2, 4, 8, device="meta"), "is on meta"),
    "an array": (lambda: np.zeros((2, 4, 8), dtype=np.float32), "must be a torch.Tensor, not ndarray"),
    "nothing": (lambda: None, "must be a torch.Tensor, not NoneType"),
}


@pytest.mark.parametrize("name", BAD_QUERIES)
def test_a_query_that_does_not_fit_is_refused(cache: KvCacheManager, name: str) -> None:
    make, word = BAD_QUERIES[name]
    with cache.step({filled(cache, 6): 2}) as step:
        write(step, (6, 8, "a"))
        with raising(ShapeError, "layer 1: query", word):
            step.attend(1, make())


def test_attention_needs_the_layer_written(cache: KvCacheManager) -> None:
    step = cache.begin({filled(cache, 6): 2})
    step.write(0, *rows(cache, 0, 6, 8))
    for use in (lambda: step.attend(1, torch.randn(2, 4, 8)), lambda: step.gather(1)):
        with raising(StepError, "layer 1 was not written in this step; write it first"):
            use()
    step.attend(0, torch.randn(2, 4, 8))
    step.abort()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_returns_the_querys_dtype(cache: KvCacheManager, dtype: torch.dtype) -> None:
    with cache.step({filled(cache, 6): 2}) as step:
        write(step, (6, 8, "a"))
        out = step.attend(0, torch.randn(2, 6, 8).to(dtype))
        assert (out.dtype, out.shape) == (dtype, (2, 6, 8))


def test_the_scale_is_that_of_the_head_dim_unless_given(cache: KvCacheManager) -> None:
    query = torch.randn(2, 4, 8)
    with cache.step({filled(cache, 6): 2}) as step:
        write(step, (6, 8, "a"))
        torch.testing.assert_close(step.attend(0, query), step.attend(0, query, scale=8**-0.5))
        assert not torch.allclose(step.attend(0, query), step.attend(0, query, scale=2.0))
        assert torch.allclose(step.attend(0, query, scale=0.0)[1, 0], step.gather(0)[1][:, 0].mean(0))


def test_a_window_limits_what_a_layer_sees(new_cache: NewCache) -> None:
    cache = new_cache(geometry=MIXED)
    handle = filled(cache, 6)
    query = torch.randn(2, 3, 4)
    with cache.step({handle: 2}) as step:
        write(step, (6, 8, "a"))
        out = step.attend(3, query)
    key, value = handle.kv_cache(3)  # type: ignore[misc]
    torch.testing.assert_close(out, attend_dense(query, key, value, scale=0.5, window=3))
    assert not torch.allclose(out, attend_dense(query, key, value, scale=0.5))


def test_attention_stays_possible_after_the_commit_until_a_handle_changes(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    query = torch.randn(3, 4, 8)
    changes: list[Callable[[], Any]] = [
        lambda: grow(two, 1, "c"),
        lambda: one.truncate(one.num_tokens),
        one.free,
    ]
    for change in changes:
        with cache.step({one: 2, two: 1}) as step:
            write(step, (one.num_tokens, one.num_tokens + 2, "a"), (two.num_tokens, two.num_tokens + 1, "b"))
            before = step.attend(0, query)
        assert torch.equal(step.attend(0, query), before)
        assert step.gather(0, one)[0].shape[0] == one.num_tokens
        one.fork().free()
        assert torch.equal(step.attend(0, query), before)
        change()
        for use in (lambda: step.attend(0, query), lambda: step.gather(0, two)):
            with raising(StepError, "a handle of this step has changed since"):
                use()


def test_nothing_can_be_read_from_an_aborted_step(cache: KvCacheManager) -> None:
    step = cache.begin({filled(cache, 6): 1})
    write(step, (6, 7, "a"))
    step.abort()
    for use in (lambda: step.attend(0, torch.randn(1, 4, 8)), lambda: step.gather(0)):
        with raising(StepError, "needs a step that was not aborted"):
            use()


def test_gather_shows_the_new_rows_too(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 2, two: 1})
    write(step, (6, 8, "a"), (4, 5, "b"))
    for handle, stop, sequence in ((one, 8, "a"), (two.clone_handle(), 5, "b")):
        for got, wanted in zip(step.gather(1, handle), rows(cache, 1, 0, stop, sequence), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    with raising(StepError, "name a handle: this step has 2"):
        step.gather(1)
    for stranger in (cache.allocate(), 3, "x"):
        with raising(StepError, "is not part of this step"):
            step.gather(1, stranger)  # type: ignore[arg-type]
    step.abort()


# -- the end -------------------------------------------------------------------------------------------------


def test_commit_needs_every_layer_and_names_the_missing_ones(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    step.write(1, *rows(cache, 1, 6, 7))
    with raising(StepError, "commit needs every layer written; missing: 0, 2. Write them, or abort the step"):
        step.commit()
    assert (step.state, handle.num_tokens) == ("open", 6)
    step.write(0, *rows(cache, 0, 6, 7))
    step.write(2, *rows(cache, 2, 6, 7))
    step.commit()
    assert_holds(handle, a=7)


def test_missing_layers_are_written_as_ranges() -> None:
    assert _ranges([0]) == "0"
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_no_length_moves_before_the_commit_and_then_all_do(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 2, two: 3})
    write(step, (6, 8, "a"), (4, 7, "b"))
    assert (one.num_tokens, two.num_tokens) == (6, 4)
    step.commit()
    assert (one.num_tokens, two.num_tokens) == (8, 7)


def test_abort_restores_lengths_tables_and_counts(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    cache.extend(two, 4)
    fork = one.fork()
    with unchanged(cache):
        step = cache.begin({one: 9, two: [1, 2, 3, 4, 5, 6, 7, 8, 9], fork: 1})
        write(step, (6, 15, "x"), (4, 13, "y"), (6, 7, "z"))
        step.attend(0, torch.randn(19, 2, 8))
        step.abort()
    assert_holds(fork, a=6)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_ended_step_refuses_every_change(cache: KvCacheManager, end: str) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 0})
    getattr(step, end)()
    state = "committed" if end == "commit" else "aborted"
    assert step.state == state
    uses: dict[str, Callable[[], Any]] = {
        "write": lambda: step.write(0, *rows(cache, 0, 6, 6)),
        "accept": lambda: step.accept(handle, 0),
        "commit": step.commit,
        "abort": step.abort,
    }
    for name, use in uses.items():
        with refused(cache, StepError, f"{name} needs an open step; this one is {state}"):
            use()


def test_a_step_commits_on_a_normal_exit_and_aborts_on_an_error(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache), raising(KeyError), cache.step({handle: 1}) as step:
        write(step, (6, 7, "x"))
        raise KeyError("mine")
    assert step.state == "aborted"
    with cache.step({handle: 1}) as step:
        write(step, (6, 7, "a"))
    assert step.state == "committed"
    assert_holds(handle, a=7)


def test_a_step_left_with_layers_unwritten_is_undone_and_says_so(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with refused(cache, StepError, "missing: 1-2"), cache.step({handle: 1}) as step:
        step.write(0, *rows(cache, 0, 6, 7))
    assert step.state == "aborted"
    grow(handle, 1)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_may_be_ended_inside_its_block(cache: KvCacheManager, end: str) -> None:
    handle = filled(cache, 6)
    with cache.step({handle: 1}) as step:
        write(step, (6, 7, "a"))
        getattr(step, end)()
    assert_holds(handle, a=7 if end == "commit" else 6)
    with raising(KeyError), cache.step({handle: 0}) as step:
        getattr(step, end)()
        raise KeyError("mine")


def test_a_step_that_was_aborted_inside_its_block_needs_no_writes(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with unchanged(cache), cache.step({handle: 5}) as step:
        step.abort()


@pytest.mark.parametrize(("end", "reason"), [("reset", "stale"), ("close", "closed")])
def test_a_reset_or_close_undoes_open_steps(cache: KvCacheManager, end: str, reason: str) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    step.write(0, *rows(cache, 0, 6, 7))
    getattr(cache, end)()
    assert step.state == "aborted"
    uses: list[Callable[[], Any]] = [
        lambda: step.write(1, *rows(cache, 1, 6, 7)),
        lambda: step.attend(0, torch.randn(1, 2, 8)),
        lambda: step.gather(0),
        lambda: step.accept(handle, 0),
        step.commit,
        step.abort,
    ]
    for use in uses:
        with raising(HandleError, reason=reason):
            use()
    if end == "reset":
        assert cache.stats().free_blocks == 16


@pytest.mark.parametrize("end", ["reset", "close"])
def test_the_callers_own_error_is_not_hidden_by_a_reset_or_close(cache: KvCacheManager, end: str) -> None:
    with raising(KeyError, "mine"), cache.step({filled(cache, 6): 1}):
        getattr(cache, end)()
        raise KeyError("mine")


@pytest.mark.parametrize(("end", "reason"), [("reset", "stale"), ("close", "closed")])
def test_a_step_that_was_reset_does_not_pretend_to_have_committed(cache: KvCacheManager, end: str, reason: str) -> None:
    with raising(HandleError, reason=reason), cache.step({filled(cache, 6): 1}) as step:
        write(step, (6, 7, "a"))
        getattr(cache, end)()
    assert step.state == "aborted"


def test_a_repr_tells_state_and_handles(cache: KvCacheManager) -> None:
    one, two = filled(cache, 6, request_id="chat"), filled(cache, 4, "b", request_id="draft")
    step = cache.begin({two: 1, one: 2})
    assert repr(step) == "<Step open, 3 new tokens over [draft, chat]>"
    step.abort()
    assert repr(step) == "<Step aborted, 3 new tokens over [draft, chat]>"


# -- accept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(7))
def test_accept_keeps_the_first_new_tokens_and_gives_the_rest_back(cache: KvCacheManager, kept: int) -> None:
    handle, fork = filled(cache, 6), None
    fork = handle.fork()
    with cache.step({handle: [20, 21, 22, 23, 24, 25]}) as step:
        write(step, (6, 12, "b"))
        step.accept(handle, kept)
    assert_holds(handle, a=6, b=6 + kept) if kept else assert_holds(handle, a=6)
    assert handle.token_ids == (0, 1, 2, 3, 4, 5, 20, 21, 22, 23, 24, 25)[: 6 + kept]
    assert_holds(fork, a=6)
    assert handle.block_table.num_blocks == -(-(6 + kept) // 4)
    assert cache.audit() == ()
    grow(handle, 3, "c")
    assert_holds(handle, a=6, b=6 + kept, c=9 + kept) if kept else assert_holds(handle, a=6, c=9)


def test_accept_is_for_each_handle_and_the_last_word_counts(cache: KvCacheManager) -> None:
    one, two, three = filled(cache, 6), filled(cache, 4, "b"), filled(cache, 3, "c")
    with cache.step({one: 5, two: 5, three: 1}) as step:
        write(step, (6, 11, "a"), (4, 9, "b"), (3, 4, "c"))
        step.accept(one, 1)
        step.accept(two, 5)
        step.accept(one.clone_handle(), 2)
        step.accept(two, 0)
    assert_holds(one, a=8)
    assert_holds(two, b=4)
    assert_holds(three, c=4)


def test_accept_keeps_room_that_was_reserved_before_the_step(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    cache.extend(handle, 14)
    with cache.step({handle: 20}) as step:
        write(step, (6, 26, "a"))
        step.accept(handle, 1)
    assert (handle.block_table.num_blocks, cache.stats().free_blocks) == (5, 11)


@pytest.mark.parametrize("kept", [-1, 6, True, 1.0, "1", None, 10**5000], ids=type)
def test_accept_takes_a_number_of_the_handles_new_tokens(cache: KvCacheManager, kept: Any) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 5})
    with raising(ShapeError, "accept takes an int from 0 to 5, the new tokens of this handle, not"):
        step.accept(handle, kept)
    for stranger in (cache.allocate(), None if len(step.handles) > 1 else "x"):
        with raising(StepError, "is not part of this step"):
            step.accept(stranger, 1)  # type: ignore[arg-type]
    write(step, (6, 11, "a"))
    step.commit()
    assert_holds(handle, a=11)


def test_nothing_is_read_from_blocks_that_accept_gave_back(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with cache.step({handle: 9}) as step:
        write(step, (6, 15, "a"))
        step.accept(handle, 1)
    filled(cache, 40, "b")
    for use in (lambda: step.attend(0, torch.randn(9, 2, 8)), lambda: step.gather(0)):
        with raising(StepError, "the commit has dropped tokens"):
            use()


def test_accepting_everything_changes_nothing_about_reading(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with cache.step({handle: 2}) as step:
        write(step, (6, 8, "a"))
        step.accept(handle, 2)
    assert step.attend(0, torch.randn(2, 2, 8)).shape == (2, 2, 8)


# -- a storage that fails at the end -------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
def test_a_commit_that_the_storage_fails_is_undone_as_a_whole(cache: KvCacheManager, at: int) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    fork = one.fork()
    handles: dict[int] = {one: 3, two: 3, fork: 3}
    with (
        unchanged(cache),
        failing(cache.storage, "truncate", at=at),
        raising(StorageFailed),
        cache.step(handles) as step,
    ):
        write(step, (6, 9, "x"), (4, 7, "y"), (6, 9, "z"))
        step.accept(one, 1)
        step.accept(two, 1)
    assert step.state == "aborted"
    assert_holds(fork, a=6)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_abort_that_the_storage_fails_still_undoes_every_handle(cache: KvCacheManager, at: int) -> None:
    one, two = filled(cache, 6), filled(cache, 4, "b")
    fork = one.fork()
    with unchanged(cache):
        step = cache.begin({one: 3, two: 9, fork: 3})
        with failing(cache.storage, "truncate", at=at), pytest.raises(StorageFailed):
            step.abort()
        assert step.state == "aborted"
    for handle in (one, two, fork):
        grow(handle, 1)


@pytest.mark.parametrize("at", [1, 2])
def test_a_commit_whose_scrubbing_fails_has_happened(new_cache: NewCache, at: int) -> None:
    cache = new_cache(scrub=True)
    one, two = filled(cache, 6), filled(cache, 4, "b")
    step = cache.begin({one: 9, two: 9})
    write(step, (6, 15, "a"), (4, 13, "b"))
    step.accept(one, 1)
    step.accept(two, 1)
    with failing(cache.storage, "scrub", at=at), pytest.raises(StorageFailed):
        step.commit()
    assert step.state == "committed"
    assert_holds(one, a=7)
    assert_holds(two, b=5)
    assert cache.audit() == ()
    assert cache.stats().free_blocks == 12


def test_an_abort_whose_scrubbing_fails_has_happened(new_cache: NewCache) -> None:
    cache = new_cache(scrub=True)
    one, two = filled(cache, 6), filled(cache, 4, "b")
    with unchanged(cache):
        step = cache.begin({one: 9, two: 9})
        with failing(cache.storage, "scrub"), pytest.raises(StorageFailed):
            step.abort()


def test_index_tensors_of_a_finished_step_stay_as_they_were_or_are_refused(cache: KvCacheManager) -> None:
    handle = filled(cache, 5)
    asked = cache.begin({handle: 2})
    write_all(asked, layers_of(cache, 5, 7), cache)
    asked.commit()
    kept = asked.slot_mapping.clone(), asked.block_tables.clone()
    late = cache.begin({handle: 1})
    write_all(late, layers_of(cache, 7, 8), cache)
    late.commit()
    handle.truncate(0)
    assert asked.slot_mapping.equal(kept[0])
    assert asked.block_tables.equal(kept[1])
    for name in ("slot_mapping", "block_tables"):
        with raising(StepError, f"{name} is not possible any more", "changed since"):
            getattr(late, name)
    assert late.positions.tolist() == [7]
