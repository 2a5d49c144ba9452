"""The handle: what it tells, what it refuses, and what stays true of it in every state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_core import (
    CacheFullError,
    HandleError,
    HandleState,
    KvCacheHandle,
    KvCacheManager,
    LayerSpec,
    ShapeError,
    StepError,
)
from tests.caches import MIXED, NewCache, assert_holds, filled, grow, layers_of, raising, refused, unchanged
from tests.storages.int8 import Int8KvCacheHandle
from tests.storages.paged import PagedKvCacheHandle

# -- identity ------------------------------------------------------------------------------------------------


def test_every_sequence_has_an_id_of_its_own_that_clones_share(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    clone, fork, other = handle.clone_handle(), handle.fork(), cache.allocate()
    assert handle.cache_id == clone.cache_id
    assert len({handle.cache_id, fork.cache_id, other.cache_id}) == 3
    assert handle.request_id == clone.request_id
    assert len({handle.request_id, fork.request_id, other.request_id}) == 3


def test_names_stay_readable_after_free(cache: KvCacheManager) -> None:
    handle = cache.allocate(request_id="chat")
    cache_id = handle.cache_id
    handle.free()
    assert (handle.request_id, handle.cache_id, handle.manager) == ("chat", cache_id, cache)


def test_handles_compare_by_identity(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    clone = handle.clone_handle()
    assert handle == handle
    assert handle != clone
    assert len({handle, clone, handle.fork()}) == 3


def test_a_repr_says_whose_it_is_and_how_it_is_doing(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    name = type(handle).__name__
    assert repr(handle) == f"<{name} 'chat' ({handle.cache_id}): 6 tokens in 2 blocks>"
    handle.free()
    assert repr(handle) == f"<{name} 'chat' ({handle.cache_id}): freed>"
    stale = cache.allocate(request_id="next")
    cache.reset()
    assert repr(stale) == f"<{name} 'next' ({stale.cache_id}): stale>"


# -- shape ---------------------------------------------------------------------------------------------------


def test_a_handle_tells_shape_and_place(cache: KvCacheManager) -> None:
    handle = cache.allocate(max_sequence_length=20)
    assert (handle.num_layers, handle.num_kv_heads, handle.num_heads) == (3, 2, 2)
    assert (handle.head_dim, handle.value_head_dim, handle.max_tokens) == (8, 8, 20)
    assert handle.device == torch.device("cpu")
    assert handle.dtype is torch.float32
    assert handle.dense_is_view is False
    assert handle.layer_spec(2) == LayerSpec(num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim", "value_head_dim"])
def test_single_numbers_are_refused_where_layers_differ(new_cache: NewCache, name: str) -> None:
    handle = new_cache(geometry=MIXED).allocate()
    with pytest.raises(ShapeError, match=rf"^{name} differs between layers of this model; ask layer_spec\(layer\)"):
        getattr(handle, name)
    assert handle.layer_spec(3) == LayerSpec(num_kv_heads=1, head_dim=4, value_head_dim=6, window=3)
    assert handle.layer_spec(1) is None
    assert handle.layer_spec(4) == handle.layer_spec(2)


@pytest.mark.parametrize("layer", [-1, 3, 10**30, True, 1.0, "0", None])
def test_a_layer_that_does_not_exist_is_refused(cache: KvCacheManager, layer: Any) -> None:
    handle = filled(cache, 3)
    for ask in (handle.key_cache, handle.value_cache, handle.kv_cache, handle.layer_spec):
        with refused(cache, ShapeError, "layer must be an int from 0 to 2, not"):
            ask(layer)


# -- contents ------------------------------------------------------------------------------------------------


def test_an_empty_handle_has_empty_tensors_of_the_right_shape(new_cache: NewCache) -> None:
    handle = new_cache(geometry=MIXED).allocate()
    assert (handle.num_tokens, handle.token_ids, handle.block_table.num_blocks) == (0, (), 0)
    assert {layer: _shapes(handle, layer) for layer in range(5)} == {
        0: [(0, 2, 8), (0, 2, 8)],
        1: None,
        2: [(0, 2, 8), (0, 2, 8)],
        3: [(0, 1, 4), (0, 1, 6)],
        4: [(0, 2, 8), (0, 2, 8)],
    }


def _shapes(handle: KvCacheHandle, layer: int) -> list[tuple[int, ...]] | None:
    both = handle.kv_cache(layer)
    return None if both is None else [tuple(tensor.shape) for tensor in both]


def test_a_layer_that_shares_shows_the_producers_rows_and_one_that_caches_nothing_shows_none(
    new_cache: NewCache,
) -> None:
    handle = filled(new_cache(geometry=MIXED), 6)
    assert_holds(handle, a=6)
    assert torch.equal(handle.key_cache(4), handle.key_cache(2))  # type: ignore[arg-type]
    assert torch.equal(handle.value_cache(4), handle.value_cache(2))  # type: ignore[arg-type]
    assert handle.key_cache(1) is handle.value_cache(1) is handle.kv_cache(1) is None


def test_reads_never_show_a_row_beyond_the_committed_ones(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 3})
    for layer, (key, value) in enumerate(layers_of(cache, 0, 3, "b")):
        step.write(layer, key, value)
    assert_holds(handle, a=6)
    step.abort()
    assert_holds(handle, a=6)
    cache.extend(handle, 20)
    assert_holds(handle, a=6)


def test_token_ids_end_where_tokens_are_anonymous(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    grow(handle, 2, token_ids=[7, 8])
    grow(handle, 1)
    grow(handle, 2, token_ids=[9, 10])
    assert (handle.token_ids, handle.num_tokens) == ((7, 8), 5)
    handle.truncate(2)
    grow(handle, 1, token_ids=[11])
    assert handle.token_ids == (7, 8, 11)
    handle.truncate(1)
    assert handle.token_ids == (7,)


def test_mlx_lm_1097_what_was_handed_out_never_changes(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    taken = {
        "num_tokens": handle.num_tokens,
        "token_ids": handle.token_ids,
        "block_table": handle.block_table,
        "stats": handle.stats(),
        "layer_spec": handle.layer_spec(0),
        "keys": handle.key_cache(0),
    }
    before = copy.deepcopy(taken)
    grow(handle, 7, "b")
    handle.fork().truncate(2)
    handle.truncate(2)
    grow(handle, 5, "c")
    keys, keys_before = taken.pop("keys"), before.pop("keys")
    assert taken == before
    if not handle.dense_is_view:
        assert torch.equal(keys, keys_before)  # type: ignore[arg-type]
    assert type(handle.num_tokens) is int


@pytest.mark.parametrize(
    "name", ["num_tokens", "token_ids", "block_table", "is_valid", "state", "cache_id", "anything_else"]
)
def test_a_handle_cannot_be_assigned_to(cache: KvCacheManager, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(cache.allocate(), name, 1)


# -- append --------------------------------------------------------------------------------------------------

BAD_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "one row less": (lambda good: good[1:], "[1, 2, 8]"),
    "one row more": (lambda good: torch.cat([good, good[:1]]), "[3, 2, 8]"),
    "one head less": (lambda good: good[:, 1:], "[2, 1, 8]"),
    "heads and tokens swapped": (lambda good: good.transpose(1, 2), "[2, 8, 2]"),
    "half the head": (lambda good: good[..., :4], "[2, 2, 4]"),
    "a batch axis": (lambda good: good[None], "[1, 2, 2, 8]"),
    "flat": (lambda good: good.flatten(1), "[2, 16]"),
    "a broadcast scalar": (lambda good: torch.tensor(1.0), "[]"),
    "half precision": (lambda good: good.half(), "torch.float16"),
    "integers": (lambda good: good.long(), "torch.int64"),
    "complex": (lambda good: good.to(torch.complex64), "torch.complex64"),
    "another device": (lambda good: good.to("meta"), "on meta"),
    "gradients": (lambda good: good.requires_grad_(), "gradients"),
    "a result with gradients": (lambda good: good.requires_grad_() * 2, "gradients"),
    "a list": (lambda good: good.tolist(), "list"),
    "an array": (lambda good: good.numpy(), "ndarray"),
    "nothing": (lambda good: None, "NoneType"),
    "a number": (lambda good: 1.0, "float"),
}


@pytest.mark.parametrize("role", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_bad_tensor_in_any_layer_leaves_all_layers_as_they_were(
    cache: KvCacheManager, name: str, layer: int, role: int
) -> None:
    spoil, word = BAD_TENSORS[name]
    handle = filled(cache, 3)
    layers = [list(pair) for pair in layers_of(cache, 3, 5)]
    layers[layer][role] = spoil(layers[layer][role])
    with refused(cache, ShapeError, f"layer {layer}: {'value' if role else 'key'}", word):
        handle.append(layers, [1, 2])  # type: ignore[arg-type]
    grow(handle, 2)
    assert_holds(handle, a=5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layers: layers[:2],
        lambda layers: [*layers, layers[0]],
        lambda layers: [],
        lambda layers: None,
        lambda layers: 3,
        lambda layers: [key for key, _ in layers],
        lambda layers: [(key, value, value) for key, value in layers],
        lambda layers: dict(enumerate(layers)),
    ],
)
def test_append_takes_a_pair_for_each_layer(cache: KvCacheManager, spoil: Callable[[Any], Any]) -> None:
    handle = filled(cache, 3)
    with refused(cache, ShapeError, "append", "3 layers"):
        handle.append(spoil(layers_of(cache, 3, 6)))


def test_append_takes_any_iterable_of_pairs_and_any_strides(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    wide = [tuple(tensor.repeat(1, 1, 2)[..., :8] for tensor in pair) for pair in layers_of(cache, 0, 5)]
    assert not wide[0][0].is_contiguous()
    handle.append(iter(wide), np.arange(5))  # type: ignore[arg-type]
    assert_holds(handle, a=5)
    assert handle.token_ids == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("ids", [[1], [1, 2, 3], []])
def test_as_many_token_ids_as_rows(cache: KvCacheManager, ids: list[int]) -> None:
    handle = filled(cache, 3)
    with refused(cache, ShapeError, "layer 0: key must be", "not [2, 2, 8]"):
        handle.append(layers_of(cache, 3, 5), ids)


@pytest.mark.parametrize("ids", [[1.5, 2], ["a", "b"], "ab", b"0123456789abcdef", [[1, 2]], [2**63, 1], [None, 1], 1.0])
def test_token_ids_are_flat_64_bit_ints(cache: KvCacheManager, ids: Any) -> None:
    handle = filled(cache, 3)
    with refused(cache, ShapeError, "token ids must be a flat sequence of 64-bit ints, not"):
        handle.append(layers_of(cache, 3, 5), ids)


def test_the_cache_keeps_a_copy_of_what_is_appended(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    layers = layers_of(cache, 0, 5)
    handle.append(layers)
    for key, value in layers:
        key.zero_()
        value.zero_()
    assert_holds(handle, a=5)


def test_appending_nothing_is_fine(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    handle.append(layers_of(cache, 3, 3), [])
    assert_holds(handle, a=3)
    assert handle.token_ids == (0, 1, 2)


def test_appending_more_than_a_sequence_may_hold_is_refused(cache: KvCacheManager) -> None:
    handle = filled(cache, 5, max_sequence_length=6)
    with refused(cache, CacheFullError, "7 tokens are more than the 6 that this sequence may hold"):
        handle.append(layers_of(cache, 5, 7))
    grow(handle, 1)
    assert_holds(handle, a=6)


# -- truncate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-1, 7, 10**5000, True, 3.0, "3", None, torch.tensor(3)], ids=type)
def test_truncate_takes_a_length_that_is_there(cache: KvCacheManager, length: Any) -> None:
    handle = filled(cache, 6)
    with refused(cache, ShapeError, "truncate takes an int from 0 to 6, the tokens stored, not"):
        handle.truncate(length)


def test_truncate_gives_room_back_at_once_what_was_reserved_included(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    cache.extend(handle, 20)
    assert cache.stats().free_blocks == 9
    handle.truncate(6)
    assert cache.stats().free_blocks == 14
    handle.truncate(4)
    assert cache.stats().free_blocks == 15
    handle.truncate(0)
    assert cache.stats().free_blocks == 16
    assert (handle.num_tokens, handle.token_ids, handle.is_valid) == (0, (), True)
    grow(handle, 5, "b")
    assert_holds(handle, b=5)


# -- clones and forks ----------------------------------------------------------------------------------------


def test_clones_are_one_cache_until_the_last_is_freed(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    clone = handle.clone_handle()
    again = clone.clone_handle()
    grow(clone, 3)
    assert_holds(handle, a=6)
    handle.free()
    assert (handle.is_valid, clone.is_valid) == (False, True)
    clone.truncate(4)
    assert_holds(again, a=4)
    clone.free()
    assert cache.stats().used_blocks == 1
    again.free()
    assert cache.stats().used_blocks == 0


def test_a_fork_goes_its_own_way(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, max_sequence_length=30)
    fork = handle.fork(request_id="draft")
    assert (fork.request_id, fork.max_tokens, fork.token_ids) == ("draft", 30, handle.token_ids)
    grow(fork, 3, "b", [50, 51, 52])
    grow(handle, 2, "c")
    assert_holds(handle, a=6, c=8)
    assert_holds(fork, a=6, b=9)
    handle.free()
    fork.truncate(7)
    assert_holds(fork, a=6, b=7)
    assert fork.token_ids == (0, 1, 2, 3, 4, 5, 50)


def test_a_fork_takes_no_reserved_room_along(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    cache.extend(handle, 20)
    assert handle.fork().block_table.num_blocks == 2


@pytest.mark.parametrize("name", ["", 5, b"x", ["x"], None.__class__])
def test_a_fork_is_named_by_a_string(cache: KvCacheManager, name: Any) -> None:
    handle = filled(cache, 6)
    with refused(cache, ShapeError, "request_id must be a string with at least one character"):
        handle.fork(request_id=name)


def test_a_fork_cannot_take_the_name_of_a_live_sequence(cache: KvCacheManager) -> None:
    handle = filled(cache, 6, request_id="chat")
    with refused(cache, HandleError, "'chat' belongs to a live sequence", reason="in-use"):
        handle.fork(request_id="chat")


def test_copying_is_forking(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    both = {"first": handle, "second": handle}
    shallow, deep = copy.copy(handle), copy.deepcopy(both)
    assert deep["first"] is deep["second"]
    assert len({handle.cache_id, shallow.cache_id, deep["first"].cache_id}) == 3
    grow(handle, 1, "b")
    assert_holds(shallow, a=6)
    assert_holds(deep["first"], a=6)


def test_a_handle_cannot_be_pickled(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    with refused(cache, HandleError, "cannot be pickled", reason="foreign"):
        pickle.dumps(handle)


# -- types ---------------------------------------------------------------------------------------------------


def test_unwrap_gives_the_backends_own_type_or_says_what_it_is(new_cache: NewCache) -> None:
    handle = filled(new_cache(), 3)
    pool, _ = handle.unwrap(PagedKvCacheHandle).pool(0)
    assert pool.shape == (17, 4, 2, 8)
    assert handle.unwrap(KvCacheHandle) is handle.as_any() is handle
    with raising(HandleError, "this is a PagedKvCacheHandle, not a Int8KvCacheHandle", reason="foreign"):
        handle.unwrap(Int8KvCacheHandle)


def test_clones_and_forks_are_of_the_backends_type(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    assert type(handle) is type(handle.clone_handle()) is type(handle.fork()) is cache.storage.handle_type


# -- the end -------------------------------------------------------------------------------------------------


def test_freeing_twice_raises_and_harms_nothing(cache: KvCacheManager) -> None:
    handle, other = filled(cache, 6), filled(cache, 6, "b")
    handle.free()
    for _ in range(2):
        with refused(cache, HandleError, "was freed", reason="freed"):
            handle.free()
    assert_holds(other, b=6)


def test_freeing_one_clone_twice_does_not_free_the_other(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    clone = handle.clone_handle()
    handle.free()
    with refused(cache, HandleError, "this handle of", "was freed", reason="freed"):
        handle.free()
    assert_holds(clone, a=6)


def test_a_handle_frees_itself_as_a_context_manager(cache: KvCacheManager) -> None:
    with filled(cache, 6) as handle:
        assert handle.is_valid
    assert not handle.is_valid
    with cache.allocate() as handle:
        handle.free()
    with raising(KeyError), filled(cache, 6):
        raise KeyError("mine")
    assert cache.stats().free_blocks == 16
    with raising(HandleError, reason="freed"), handle:
        raise AssertionError("not reached")


def test_leaving_a_handle_that_is_in_an_open_step_does_not_hide_the_callers_error(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    with raising(KeyError, "mine"), handle:
        raise KeyError("mine")
    with raising(StepError, "cannot free"), handle:
        pass
    step.abort()
    assert_holds(handle, a=6)


USES: dict[str, Callable[[KvCacheHandle], Any]] = {
    "device": lambda handle: handle.device,
    "dtype": lambda handle: handle.dtype,
    "num_layers": lambda handle: handle.num_layers,
    "num_heads": lambda handle: handle.num_heads,
    "num_kv_heads": lambda handle: handle.num_kv_heads,
    "head_dim": lambda handle: handle.head_dim,
    "value_head_dim": lambda handle: handle.value_head_dim,
    "layer_spec": lambda handle: handle.layer_spec(0),
    "num_tokens": lambda handle: handle.num_tokens,
    "token_ids": lambda handle: handle.token_ids,
    "max_tokens": lambda handle: handle.max_tokens,
    "block_table": lambda handle: handle.block_table,
    "block_table_mut": lambda handle: handle.block_table_mut().__enter__(),
    "dense_is_view": lambda handle: handle.dense_is_view,
    "key_cache": lambda handle: handle.key_cache(0),
    "value_cache": lambda handle: handle.value_cache(0),
    "kv_cache": lambda handle: handle.kv_cache(0),
    "append": lambda handle: handle.append([]),
    "truncate": lambda handle: handle.truncate(0),
    "clone_handle": lambda handle: handle.clone_handle(),
    "fork": lambda handle: handle.fork(),
    "copy": copy.copy,
    "free": lambda handle: handle.free(),
    "stats": lambda handle: handle.stats(),
    "enter": lambda handle: handle.__enter__(),
    "begin": lambda handle: handle.manager.begin({handle: 1}),
    "extend": lambda handle: handle.manager.extend(handle, 1),
}

ENDS: dict[str, Callable[[KvCacheHandle], Any]] = {
    "freed": lambda handle: handle.free(),
    "stale": lambda handle: handle.manager.reset(),
    "closed": lambda handle: handle.manager.close(),
}


def _deallocate(handle: KvCacheHandle) -> None:
    handle.manager.deallocate(handle.request_id)


@pytest.mark.parametrize("end", [*ENDS.items(), ("freed", _deallocate)], ids=lambda end: end[0])
def test_an_ended_handle_refuses_every_use_and_says_why(
    cache: KvCacheManager, end: tuple[str, Callable[[KvCacheHandle], Any]]
) -> None:
    reason, finish = end
    handle = filled(cache, 6)
    clone = handle.clone_handle()
    finish(handle)
    if finish is ENDS["freed"]:
        clone.free()
    for each in (handle, clone):
        assert (each.is_valid, each.state) == (False, HandleState.FREED)
        assert reason in repr(each)
        for use in USES.values():
            with raising(HandleError, reason=reason):
                use(each)


def test_a_swapped_handle_says_so(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    handle.sequence.state = HandleState.SWAPPED
    assert (handle.is_valid, handle.state) == (False, HandleState.SWAPPED)
    for use in [use for name, use in USES.items() if name != "free"]:  # which gives its place in the tier back
        with raising(HandleError, "is swapped out; swap it in first", reason="swapped"):
            use(handle)
    handle.sequence.state = HandleState.ACTIVE
    assert_holds(handle, a=6)


def test_a_handle_of_another_cache_is_foreign(new_cache: NewCache) -> None:
    cache, other = new_cache(), new_cache()
    handle = other.allocate()
    for use in (lambda: cache.begin({handle: 1}), lambda: cache.extend(handle, 1)):
        with raising(HandleError, "belongs to another cache", reason="foreign"):
            use()
    for nothing in (None, 3, "x", object()):
        with raising(HandleError, "is not a cache handle", reason="foreign"):
            cache.begin({nothing: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["free", "fork", "copy", "truncate", "extend", "append", "begin", "block_table_mut"])
@pytest.mark.parametrize("through", ["itself", "a clone"])
def test_a_handle_in_an_open_step_cannot_be_changed(cache: KvCacheManager, name: str, through: str) -> None:
    handle = filled(cache, 6)
    other = handle if through == "itself" else handle.clone_handle()
    use = {**USES, "append": lambda handle: handle.append(layers_of(cache, 6, 7))}[name]
    with cache.step({handle: 1}) as step:
        with unchanged(cache), raising(StepError, "open step"):
            use(other)
        for layer, (key, value) in enumerate(layers_of(cache, 6, 7)):
            step.write(layer, key, value)
    assert_holds(handle, a=7)


def test_a_handle_in_an_open_step_can_be_read_and_cloned(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    step = cache.begin({handle: 1})
    clone = handle.clone_handle()
    assert_holds(clone, a=6)
    assert clone.stats().tokens_stored == 6
    step.abort()
    clone.free()
    assert_holds(handle, a=6)
