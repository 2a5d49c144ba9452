"""Evicted prefixes wait in host memory and come back when a prompt finds them; nothing is lost without a word."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from kvcache_core import CacheFullError, ConfigError, KvCacheHandle, KvCacheManager, open_cache
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.events import Allocated, PrefixHit
from kvcache_cuda.options import CudaOptions
from kvcache_cuda.storage import CudaStorage
from plugins.cuda.tests.caches import GEOMETRY, spec_of
from plugins.cuda.tests.test_contract import grow, holds

SIZE = 4


def demoting(swap_blocks: int = 8, *, num_blocks: int = 8, scrub: bool = False, **prefix: Any) -> KvCacheManager:
    """A cache of 8 blocks of 4 tokens full of NaN, over a tier of 8."""
    options = CudaOptions(device="cpu", swap_blocks=swap_blocks)
    storage = CudaStorage(spec_of(num_blocks=num_blocks, options=options, max_sequence_length=32, scrub=scrub))
    for section in storage.pool.sections:
        section[:, 1:] = float("nan")
    return KvCacheManager(storage, prefix=PrefixCacheConfig(demote=True, namespace="m", **prefix))


def store(cache: KvCacheManager, ids: Any, tag: int, **request: Any) -> KvCacheHandle:
    """Store a prompt whose rows depend on their position and the tag; what is found is not stored again."""
    ids = list(ids)
    handle = cache.allocate(token_ids=ids, **request)
    grow(handle, len(ids) - handle.num_tokens, tag, ids[handle.num_tokens :])
    return handle


def keep(cache: KvCacheManager, ids: Any, tag: int, **request: Any) -> None:
    store(cache, ids, tag, **request).free()


def found(cache: KvCacheManager, ids: Any, **request: Any) -> tuple[int, int]:
    """Tokens that a prompt would find, and those of them that wait in the tier."""
    explained = cache.explain(token_ids=ids, **request)
    return explained.num_tokens, explained.demoted_tokens


A, B, C = range(100, 117), range(200, 217), range(300, 317)


def test_an_evicted_prefix_waits_in_the_tier_and_comes_back() -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        keep(cache, B, 2)  # 5 blocks for B: the last of A's four have to go
        stats = cache.stats()
        assert stats.demoted_blocks == stats.demotions == 8 - stats.tier_free_blocks > 0
        assert found(cache, A) == (16, 4 * stats.demoted_blocks)
        assert cache.audit() == ()
        with cache.allocate(token_ids=A) as handle:
            assert handle.num_tokens == 16
            assert holds(handle, (16, 1))
            assert handle.token_ids == tuple(A)[:16]
            assert cache.audit() == ()
            grow(handle, 3, 5)
            assert holds(handle, (16, 1), (19, 5))
        assert cache.stats().promotions == stats.demoted_blocks
        assert cache.audit() == ()


def test_prefixes_take_turns_on_the_device_and_stay_what_they_were() -> None:
    with demoting(12) as cache:
        for ids, tag in ((A, 1), (B, 2), (C, 3)):
            keep(cache, ids, tag)
        for _ in range(3):
            for ids, tag in ((A, 1), (B, 2), (C, 3)):
                with cache.allocate(token_ids=ids) as handle:
                    assert handle.num_tokens == 16
                    assert holds(handle, (16, tag))
                assert cache.audit() == ()


def test_a_prefix_comes_back_to_one_that_is_shared_with_a_live_sequence() -> None:
    with demoting(8) as cache, store(cache, A[:8], 1) as live:
        keep(cache, A, 1)
        keep(cache, B, 2)
        assert found(cache, A) == (16, 4)  # its first blocks are the live sequence's too
        with cache.allocate(token_ids=A) as handle:
            assert holds(handle, (16, 1))
            assert handle.block_table.physical_blocks[:2] == live.block_table.physical_blocks[:2]
        assert holds(live, (8, 1))


def test_tails_leave_the_tier_before_heads() -> None:
    with demoting(2) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            assert (cache.stats().demoted_blocks, cache.stats().demoted_evictions) == (2, 0)
            assert found(cache, A) == (8, 8)
    with demoting(3) as cache:
        keep(cache, A[:9], 1)
        keep(cache, B[:9], 2)
        with store(cache, range(500, 532), 9):
            stats = cache.stats()
            assert (stats.demotions, stats.demoted_evictions, stats.demoted_blocks) == (4, 1, 3)
            assert (found(cache, A[:9]), found(cache, B[:9])) == ((4, 4), (8, 8))


def test_what_was_dropped_from_the_tier_is_explained() -> None:
    with demoting(2) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            explained = cache.explain(token_ids=A)
            assert explained.reason == "evicted"
            assert "8 of 17 tokens are cached, 8 of them in the host tier" in explained.message
            assert cache.explain(token_ids=[*A[:8], 1, 2, 3, 4, 5]).reason == "never-stored"
            assert cache.explain(token_ids=A[:9]).reason == "hit"


def test_without_the_setting_evicted_prefixes_are_dropped() -> None:
    options = CudaOptions(device="cpu", swap_blocks=8)
    storage = CudaStorage(spec_of(num_blocks=8, options=options, max_sequence_length=32))
    with KvCacheManager(storage, prefix=PrefixCacheConfig(namespace="m")) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            assert found(cache, A) == (0, 0)
            assert (cache.stats().demotions, cache.stats().tier_free_blocks) == (0, 8)


def test_demotion_without_a_tier_is_refused_when_the_cache_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"prefix\.demote needs a host tier") as caught:
        open_cache(
            backend="cuda",
            geometry=GEOMETRY,
            options={"device": "cpu"},
            budget="8 blocks",
            prefix={"demote": True},
        )
    assert caught.value.key == "prefix.demote"
    with open_cache(
        backend="cuda",
        geometry=GEOMETRY,
        options={"device": "cpu", "swap_blocks": 3},
        budget="8 blocks",
        prefix={"demote": True},
    ) as cache:
        assert (cache.stats().tier_blocks, cache.stats().tier_free_blocks) == (3, 3)


def test_sequences_that_the_caller_swaps_out_come_before_demoted_blocks() -> None:
    with demoting(4) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 528), 9) as live:
            assert cache.stats().tier_free_blocks < 4
            live.truncate(14)
            cache.swap_out(live)
            assert (cache.stats().tier_free_blocks, cache.stats().demoted_blocks) == (0, 0)
            assert cache.audit() == ()
            keep(cache, B, 2)
            keep(cache, C, 3)  # the tier is full, so that what goes now is dropped
            assert cache.stats().demoted_blocks == 0
            cache.swap_in(live)
            assert holds(live, (14, 9))
            assert cache.audit() == ()


def test_a_swap_that_the_tier_could_not_hold_anyway_costs_no_demoted_block() -> None:
    with demoting(4) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 528), 9) as live:
            before = cache.stats()
            with pytest.raises(CacheFullError, match="the host tier is full"):
                cache.swap_out(live)
            assert cache.stats() == before
            assert holds(live, (28, 9))


def test_sglang_37160_the_tier_keeps_tenants_apart() -> None:
    with demoting() as cache:
        keep(cache, A, 1, salt="a")
        keep(cache, A, 2, adapter="b")
        with store(cache, range(500, 532), 9):
            assert found(cache, A, salt="a") == found(cache, A, adapter="b") == (16, 16)
            assert found(cache, A) == found(cache, A, salt="b") == found(cache, A, salt="a", adapter="b") == (0, 0)
        with cache.allocate(token_ids=A, adapter="b") as handle:
            assert holds(handle, (16, 2))


def test_the_time_to_live_holds_in_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    with demoting(prefix_ttl_seconds=10) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            now += 9
            assert found(cache, A) == (16, 16)
            now += 2
            assert found(cache, A) == (0, 0)
            assert (cache.stats().tier_free_blocks, cache.stats().demoted_evictions) == (8, 4)


@pytest.mark.parametrize("end", ["forget", "switch off", "reset", "close"])
def test_the_tier_is_emptied_with_the_prefixes(end: str) -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            assert cache.stats().demoted_blocks == 4
        if end == "forget":
            assert cache.reset_prefix_cache() == 12
        elif end == "switch off":
            cache.enable_prefix_caching(False)
        elif end == "reset":
            cache.reset()
        else:
            cache.close()
            return
        cache.enable_prefix_caching()
        assert found(cache, A) == (0, 0)
        assert (cache.stats().demoted_blocks, cache.stats().tier_free_blocks) == (0, 8)
        assert cache.audit() == ()


def test_prefixes_below_the_minimum_are_not_brought_back() -> None:
    with demoting(1, min_prefix_length=8) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            assert cache.stats().demoted_blocks == 1
            assert cache.explain(token_ids=A).reason == "below-minimum"
        with cache.allocate(token_ids=A) as handle:
            assert handle.num_tokens == 0


def test_the_limit_on_kept_prefixes_demotes_too() -> None:
    with demoting(max_prefixes=1) as cache:
        keep(cache, A[:9], 1)
        keep(cache, B[:9], 2)
        assert (found(cache, A[:9]), found(cache, B[:9])) == ((8, 8), (8, 0))


def test_scrubbing_leaves_nothing_in_the_tier_of_what_came_back() -> None:
    with demoting(scrub=True) as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            tier = cache.storage.tier  # type: ignore[attr-defined]
            assert any(memory.any() for memory in tier._memory)
        with cache.allocate(token_ids=A) as handle:
            assert holds(handle, (16, 1))
        cache.reset_prefix_cache()
        assert not any(memory.any() for memory in tier._memory)


# -- faults --------------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def fail(*_: object, **__: object) -> Any:
    raise Broken("the device is lost")


def test_a_copy_to_the_tier_that_fails_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        with monkeypatch.context() as patch:
            patch.setattr(cache.storage.tier, "_upload", fail)  # type: ignore[attr-defined]
            with pytest.raises(Broken):
                cache.allocate(token_ids=range(500, 532))
        assert found(cache, A) == (16, 0)
        assert (cache.stats().tier_free_blocks, cache.stats().active_caches) == (8, 0)
        assert cache.audit() == ()
        with store(cache, range(500, 532), 9):
            assert found(cache, A) == (16, 16)


def test_a_copy_back_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        store(cache, range(500, 532), 9).free()
        with monkeypatch.context() as patch:
            patch.setattr(cache.storage, "promote", fail)
            with pytest.raises(Broken):
                cache.allocate(token_ids=A)
        assert found(cache, A) == (16, 16)
        assert cache.stats().active_caches == 0
        assert cache.audit() == ()
        with cache.allocate(token_ids=A) as handle:
            assert holds(handle, (16, 1))


def test_without_room_on_the_device_what_waits_goes_on_waiting() -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        with store(cache, range(500, 532), 9):
            with pytest.raises(CacheFullError):
                cache.allocate(token_ids=A)
            assert found(cache, A) == (16, 16)
            assert cache.audit() == ()


def test_a_tier_that_refuses_after_all_loses_no_block_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with demoting() as cache:
        keep(cache, A, 1)
        monkeypatch.setattr(type(cache.storage), "tier_free_blocks", 100)
        monkeypatch.setattr(cache.storage.tier, "_free", [])  # type: ignore[attr-defined]
        with pytest.raises(CacheFullError, match="the host tier is full"):
            cache.allocate(token_ids=range(500, 532))
        monkeypatch.undo()
        assert found(cache, A) == (16, 0)
        assert cache.audit() == ()


def test_trtllm_12834_both_tiers_stay_balanced_while_prompts_come_and_go() -> None:
    source = random.Random(1)
    heads = [range(1000 * number, 1000 * number + 8) for number in range(3)]
    prompts = {tag: [*heads[tag % 3], *range(50 * tag, 50 * tag + 9)] for tag in range(9)}
    with demoting(7, num_blocks=10) as cache:
        live: list[tuple[KvCacheHandle, int]] = []
        for _ in range(400):
            tag = source.randrange(9)
            choice = source.random()
            try:
                if choice < 0.6:
                    live.append((store(cache, prompts[tag], tag % 3), tag))
                elif choice < 0.7 and live and live[-1][0].is_valid:
                    cache.swap_out(live[-1][0])
                elif live:
                    handle, _ = live.pop(source.randrange(len(live)))
                    handle.free()
            except CacheFullError:
                pass
            assert cache.audit() == ()
            for handle, tag in live:
                assert not handle.is_valid or holds(handle, (handle.num_tokens, tag % 3))
        assert cache.stats().promotions > 10
        assert cache.stats().demoted_evictions > 10
        for handle, _ in live:
            handle.free()
        assert cache.audit() == ()


def test_rows_come_back_bit_by_bit_in_half_precision() -> None:
    options = CudaOptions(device="cpu", swap_blocks=8)
    storage = CudaStorage(spec_of(num_blocks=8, options=options, max_sequence_length=32, dtype="bfloat16"))
    with KvCacheManager(storage, prefix=PrefixCacheConfig(demote=True)) as cache:
        rows = [(torch.randn(17, 2, 8).bfloat16(), torch.randn(17, 2, 8).bfloat16()) for _ in range(2)]
        handle = cache.allocate(token_ids=A)
        handle.append(rows, A)
        handle.free()
        store_other = [(torch.randn(32, 2, 8).bfloat16(), torch.randn(32, 2, 8).bfloat16()) for _ in range(2)]
        with cache.allocate() as other:
            other.append(store_other)
        with cache.allocate(token_ids=A) as handle:
            for layer in range(2):
                key, value = handle.kv_cache(layer) or ()
                assert torch.equal(key, rows[layer][0][:16])
                assert torch.equal(value, rows[layer][1][:16])


def test_observers_hear_how_much_of_a_hit_comes_from_the_tier() -> None:
    heard: list[Any] = []
    with demoting() as cache:
        keep(cache, A, 1)
        keep(cache, B, 2)
        cache.subscribe(heard.append, PrefixHit, Allocated)
        waiting = found(cache, A)[1]
        cache.allocate(token_ids=A).free()
    hit, allocated = heard
    assert (hit.num_tokens, hit.demoted_tokens) == (16, waiting)
    assert waiting > 0
    assert allocated.num_tokens == 16


def test_what_was_wanted_in_vain_is_young_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    with demoting(prefix_ttl_seconds=10) as cache:
        keep(cache, A[:9], 1)
        keep(cache, B[:9], 2)
        with store(cache, range(500, 532), 9):
            now += 6
            with pytest.raises(CacheFullError):
                cache.allocate(token_ids=A[:9])
            now += 6
            assert (found(cache, A[:9]), found(cache, B[:9])) == ((8, 8), (0, 0))
            assert cache.audit() == ()
