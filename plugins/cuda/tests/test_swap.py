"""Sequences go to host memory and come back as they were; a full tier is an ordinary error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvcache_core import (
    CacheFullError,
    CacheGeometry,
    HandleError,
    HandleState,
    KvCacheManager,
    StepError,
    UnsupportedError,
)
from kvcache_core.config import PrefixCacheConfig
from kvcache_cuda.options import CudaOptions
from kvcache_cuda.storage import CudaStorage
from kvcache_cuda.streams import StreamOrder
from plugins.cuda.tests.caches import spec_of
from plugins.cuda.tests.test_contract import grow, holds


def swapping(swap_blocks: int = 4, *, prefixes: bool = False, **changes: Any) -> KvCacheManager:
    """A cache of 8 blocks full of NaN, over a tier of 4."""
    options = CudaOptions(device="cpu", swap_blocks=swap_blocks)
    storage = CudaStorage(spec_of(**{"num_blocks": 8, "options": options, "max_sequence_length": 32, **changes}))
    for section in storage.pool.sections:
        section[:, 1:] = float("nan")
    return KvCacheManager(storage, prefix=PrefixCacheConfig(enabled=prefixes, namespace="m"))


def free_places(cache: KvCacheManager) -> int:
    return cache.storage.tier.free_block_count  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("length", [0, 1, 4, 7, 16])
def test_a_sequence_comes_back_as_it_was_and_its_blocks_serve_others_meanwhile(length: int) -> None:
    with swapping() as cache, cache.allocate() as handle:
        grow(handle, length, ids=range(length))
        cache.swap_out(handle)
        assert handle.state is HandleState.SWAPPED
        assert not handle.is_valid
        assert cache.stats().used_blocks == 0
        assert free_places(cache) == 4 - -(-length // 4)
        assert cache.audit() == ()
        with cache.allocate() as other:
            grow(other, 32, 9)
        cache.swap_in(handle)
        assert handle.state is HandleState.ACTIVE
        assert holds(handle, *([(length, 0)] if length else [(0, 0)]))
        assert handle.token_ids == tuple(range(length))
        assert free_places(cache) == 4
        grow(handle, 3, 1)
        assert holds(handle, (length, 0), (length + 3, 1))
        assert cache.audit() == ()


def test_sglang_22811_every_way_of_reading_a_swapped_sequence_is_refused() -> None:
    with swapping() as cache, cache.allocate() as handle:
        grow(handle, 5)
        clone = handle.clone_handle()
        cache.swap_out(handle)
        reads = [
            lambda: handle.num_tokens,
            lambda: handle.key_cache(1),
            lambda: handle.kv_cache(0),
            lambda: handle.block_table,
            handle.stats,
            handle.fork,
            handle.clone_handle,
            lambda: handle.truncate(1),
            lambda: grow(clone, 1),
            lambda: cache.begin({handle: 1}),
            lambda: cache.extend(handle, 1),
            lambda: cache.swap_out(clone),
            lambda: handle.as_any().pool(0),
            lambda: handle.as_any().dense(0),
            lambda: handle.as_any().block_ids(),
        ]
        for read in reads:
            with pytest.raises(HandleError) as caught:
                read()
            assert caught.value.reason == "swapped"
        cache.swap_in(clone)
        assert holds(handle, (5, 0))
        clone.free()


def test_vllm_546_a_full_tier_is_an_error_that_leaves_the_sequence_where_it_is() -> None:
    with swapping() as cache:
        first, second, third = (cache.allocate() for _ in range(3))
        for handle, count, tag in ((first, 8, 1), (second, 4, 2), (third, 8, 3)):
            grow(handle, count, tag)
        for _ in range(20):
            cache.swap_out(first)
            cache.swap_out(second)
            with pytest.raises(CacheFullError, match="2 blocks are needed, 1 of 4 are free"):
                cache.swap_out(third)
            assert holds(third, (8, 3))
            cache.swap_in(first)
            cache.swap_out(third)
            cache.swap_in(second)
            cache.swap_in(third)
            assert cache.audit() == ()
        assert holds(first, (8, 1))
        assert holds(second, (4, 2))
        assert holds(third, (8, 3))
        for handle in (first, second, third):
            handle.free()


def test_no_tier_means_that_swapping_is_refused_up_front() -> None:
    with swapping(0) as cache, cache.allocate() as handle:
        grow(handle, 3)
        with pytest.raises(UnsupportedError) as caught:
            cache.swap_out(handle)
        assert caught.value.capability == "swap"
        assert holds(handle, (3, 0))


def test_a_sequence_without_room_stays_swapped_out_and_loses_nothing() -> None:
    with swapping() as cache:
        handle = cache.allocate()
        grow(handle, 16, 1)
        cache.swap_out(handle)
        other = cache.allocate()
        grow(other, 32, 2)
        with pytest.raises(CacheFullError, match="to swap"):
            cache.swap_in(handle)
        assert handle.state is HandleState.SWAPPED
        assert cache.audit() == ()
        other.free()
        cache.swap_in(handle)
        assert holds(handle, (16, 1))
        handle.free()


@pytest.mark.parametrize("end", ["free", "deallocate", "with", "drop", "reset", "close"])
def test_a_swapped_sequence_gives_its_place_back_however_it_ends(end: str) -> None:
    with swapping() as cache:
        handle = cache.allocate(request_id="r")
        grow(handle, 10)
        cache.swap_out(handle)
        if end == "free":
            handle.free()
        elif end == "deallocate":
            cache.deallocate("r")
        elif end == "with":
            cache.swap_in(handle)
            with handle:
                cache.swap_out(handle)
        elif end == "drop":
            with pytest.warns(ResourceWarning):
                del handle
        elif end == "reset":
            cache.reset()
        else:
            cache.close()
            return
        assert free_places(cache) == 4
        assert cache.audit() == ()
        assert cache.stats().active_caches == 0


def test_a_swapped_handle_is_freed_once_and_its_clone_lives_on() -> None:
    with swapping() as cache:
        handle = cache.allocate(request_id="r")
        grow(handle, 5)
        clone = handle.clone_handle()
        cache.swap_out(handle)
        assert cache.list_handles() == [cache.get_handle("r")]
        handle.free()
        with pytest.raises(HandleError) as caught:
            handle.free()
        assert caught.value.reason == "freed"
        with pytest.raises(HandleError):
            cache.swap_in(handle)
        assert cache.get_handle("r") is clone
        cache.swap_in(clone)
        assert holds(clone, (5, 0))
        clone.free()
        assert free_places(cache) == 4


def test_what_forks_share_stays_and_comes_back_apart() -> None:
    with swapping() as cache, cache.allocate() as parent:
        grow(parent, 10, 1)
        with parent.fork() as child:
            cache.swap_out(parent)
            assert holds(child, (10, 1))
            grow(child, 2, 2)
            cache.swap_in(parent)
            assert holds(parent, (10, 1))
            assert holds(child, (10, 1), (12, 2))
            grow(parent, 1, 3)
            assert holds(child, (10, 1), (12, 2))


def test_prefixes_of_a_swapped_sequence_are_not_found_and_are_again_afterwards() -> None:
    with swapping(prefixes=True) as cache, cache.allocate(token_ids=range(12)) as handle:
        grow(handle, 12, 1, range(12))
        cache.swap_out(handle)
        assert cache.explain(token_ids=range(12)).num_tokens == 0
        assert cache.audit() == ()
        cache.swap_in(handle)
        assert cache.explain(token_ids=range(12)).num_tokens == 8
        with cache.allocate(token_ids=range(12)) as other:
            assert holds(other, (8, 1))


def test_a_salted_sequence_stays_its_tenants_through_the_tier() -> None:
    """sgl-project/sglang#37160: the salt is honoured in every tier."""
    with swapping(prefixes=True) as cache, cache.allocate(token_ids=range(12), salt="a") as handle:
        grow(handle, 12, 1, range(12))
        cache.swap_out(handle)
        cache.swap_in(handle)
        assert cache.explain(token_ids=range(12), salt="b").num_tokens == 0
        assert cache.explain(token_ids=range(12), salt="a").num_tokens == 8


def test_a_sequence_in_an_open_step_cannot_be_swapped() -> None:
    with swapping() as cache, cache.allocate() as handle:
        step = cache.begin({handle: 1})
        with pytest.raises(StepError):
            cache.swap_out(handle)
        step.abort()
        cache.swap_in(handle)  # which is not swapped out
        assert handle.state is HandleState.ACTIVE


def test_scrubbed_tiers_hold_nothing_of_what_came_back() -> None:
    with swapping(scrub=True) as cache, cache.allocate() as handle:
        grow(handle, 10, 1)
        cache.swap_out(handle)
        tier = cache.storage.tier  # type: ignore[attr-defined]
        assert any(memory.any() for memory in tier._memory)
        for section in cache.storage.pool.sections:  # type: ignore[attr-defined]
            assert not section[:, 1:4].any()
        cache.swap_in(handle)
        assert not any(memory.any() for memory in tier._memory)
        assert holds(handle, (10, 1))


def test_unequal_dims_and_several_groups_travel_whole() -> None:
    geometry = CacheGeometry.model_validate(
        {
            "num_layers": 3,
            "groups": [
                {"layers": [0, 2], "num_kv_heads": 2, "head_dim": 8, "value_head_dim": 4},
                {"layers": [1], "num_kv_heads": 1, "head_dim": 6},
            ],
        }
    )
    with swapping(100, num_blocks=100, max_sequence_length=400, geometry=geometry, dtype="bfloat16") as cache:
        handle = cache.allocate()
        shapes = {0: ((2, 8), (2, 4)), 1: ((1, 6), (1, 6)), 2: ((2, 8), (2, 4))}
        rows = [tuple(torch.randn(300, *shape).bfloat16() for shape in shapes[layer]) for layer in range(3)]
        handle.append(rows)  # type: ignore[arg-type]
        cache.swap_out(handle)
        cache.swap_in(handle)
        for layer in range(3):
            assert all(map(torch.equal, handle.kv_cache(layer), rows[layer]))  # type: ignore[arg-type]
        handle.free()


def test_sglang_30057_what_belongs_to_a_sequence_comes_back_with_its_blocks() -> None:
    with swapping(prefixes=True) as cache:
        handle = cache.allocate(request_id="r", token_ids=range(9), salt="s", priority=4, max_sequence_length=13)
        grow(handle, 9, 1, range(9))
        grow(handle, 2, 2)  # anonymous ones end what is known of the ids
        before = (handle.token_ids, handle.request_id, handle.cache_id, handle.max_tokens, handle.sequence.priority)
        cache.swap_out(handle)
        cache.swap_in(handle)
        assert holds(handle, (9, 1), (11, 2))
        after = (handle.token_ids, handle.request_id, handle.cache_id, handle.max_tokens, handle.sequence.priority)
        assert after == before
        assert cache.explain(token_ids=range(9), salt="s").num_tokens == 8
        handle.free()


def test_trtllm_12834_both_tiers_stay_balanced_over_random_steps() -> None:
    source = random.Random(0)
    with swapping(3, num_blocks=6) as cache:
        handles = {tag: cache.allocate() for tag in range(3)}
        lengths = dict.fromkeys(handles, 0)
        for _ in range(300):
            tag = source.randrange(3)
            handle = handles[tag]
            try:
                if handle.state is HandleState.SWAPPED:
                    cache.swap_in(handle)
                elif source.random() < 0.5:
                    cache.swap_out(handle)
                elif lengths[tag] > 8:
                    handle.truncate(0)
                    lengths[tag] = 0
                else:
                    grow(handle, 2, tag)
                    lengths[tag] += 2
            except CacheFullError:
                pass
            assert cache.audit() == ()
            out = sum(-(-lengths[tag] // 4) for tag, h in handles.items() if h.state is HandleState.SWAPPED)
            assert free_places(cache) == 3 - out
            for tag, each in handles.items():
                if each.state is HandleState.ACTIVE:
                    assert holds(each, (lengths[tag], tag))
        for handle in handles.values():
            handle.free()


def test_a_failing_copy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with swapping() as cache, cache.allocate() as handle:
        grow(handle, 7, 1)

        def fail(indices: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the device is lost")

        tier = cache.storage.tier  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(tier, "_upload", fail)
            with pytest.raises(RuntimeError):
                cache.swap_out(handle)
            assert holds(handle, (7, 1))
            assert free_places(cache) == 4
        cache.swap_out(handle)
        with monkeypatch.context() as patch:
            patch.setattr(tier, "_upload", fail)
            with pytest.raises(RuntimeError):
                cache.swap_in(handle)
        assert handle.state is HandleState.SWAPPED
        assert cache.audit() == ()
        cache.swap_in(handle)
        assert holds(handle, (7, 1))


# -- the stream aside --------------------------------------------------------------------------------------


class Stream:
    """A stand-in that notes for whom it waits, and is idle when told so."""

    def __init__(self, number: int, log: list[tuple[int, int]]) -> None:
        self.cuda_stream, self._log, self.idle = number, log, False

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.cuda_stream, other.cuda_stream))

    def query(self) -> bool:
        return self.idle


def test_vllm_45704_swaps_wait_for_the_writes_before_them_and_later_work_for_the_swaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[int, int]] = []
    current = [main := Stream(0, log)]
    side = Stream(9, log)

    class Within:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            current.append(self.stream)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "stream", Within)
    order = StreamOrder(torch.device("cuda"))
    order.enter()
    with order.aside():
        side.idle = True  # nothing has been asked of it yet, and another thread looks
        current.append(main)
        order.enter()
        current.pop()
        side.idle = False
    del log[1:]
    assert log == [(9, 0)]
    order.enter()
    assert log[1:] == [(0, 9)]  # although it was idle, and forgotten, while the copy was being asked for
    side.idle = True
    order.enter()
    assert len(log) == 2  # nobody waits for an idle stream


def test_observers_hear_of_what_goes_and_comes_back() -> None:
    heard: list[Any] = []
    with swapping(prefixes=True) as cache:
        cache.subscribe(lambda event: heard.append(event.as_dict()))
        handle = cache.allocate(request_id="a")
        grow(handle, 7)
        cache.swap_out(handle)
        cache.swap_in(handle)
        handle.free()
    swaps = [event for event in heard if event["event"].startswith("swapped")]
    assert [(event["event"], event["num_tokens"], event["num_blocks"]) for event in swaps] == [
        ("swapped_out", 7, 2),
        ("swapped_in", 7, 2),
    ]
    assert [event["event"] for event in heard[-2:]] == ["freed", "closed"]
