"""Caches that are dropped: their memory comes back wherever the garbage collector finds them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_core import KvCacheManager
from kvcache_core.integrations.transformers import KvCache


def within(seconds: float, action: Callable[[], object]) -> None:
    """Run `action` on a thread; fail if it has not come back by then."""
    done = threading.Thread(target=action, daemon=True)
    done.start()
    done.join(seconds)
    assert not done.is_alive(), "it waits for ever"


@torch.no_grad()
def filled_cycle(source: Any, model: PreTrainedModel) -> None:
    """Leave a cache with some tokens, and a pass that was interrupted, to the garbage collector."""
    cache = KvCache(source, model)
    model(input_ids=model.dummy_inputs["input_ids"][:1, :3], cache=cache)
    cache.pass_writer.begin(1, 2, input_ids=None, position_ids=None, attention_mask=None)
    spec = cache.manager.own_spec(0)
    rows = torch.ones(1, spec.num_kv_heads, 2, spec.head_dim)
    cache.update(rows, rows + 1, 0)
    assert cache.pass_writer._pass.opened is not None
    cycle: list[Any] = [cache]
    cycle.append(cycle)


def test_one_that_is_collected_while_its_cache_is_in_use_is_given_back_by_the_next_operation(
    manager: KvCacheManager, model: PreTrainedModel
) -> None:
    filled_cycle(manager, model)

    def collect_inside() -> None:
        with manager.store.locked():
            gc.collect()

    within(30, collect_inside)
    assert manager.stats().active_caches == 0
    assert manager.audit() == ()


def test_an_observer_that_holds_a_lock_is_not_called_by_the_collector(
    manager: KvCacheManager, model: PreTrainedModel
) -> None:
    lock, heard = threading.Lock(), []

    def observer(event: Any) -> None:
        with lock:
            heard.append(event.name)

    manager.subscribe(observer)

    def collect_inside() -> None:
        filled_cycle(manager, model)
        heard.clear()
        with lock:
            gc.collect()

    within(30, collect_inside)
    assert heard == []
    manager.stats()
    assert heard == ["aborted", "freed"]


def test_a_cache_that_only_it_used_is_closed_by_whoever_holds_its_lock(model: PreTrainedModel) -> None:
    pytest.importorskip("kvcache_cpu.plugin")
    cache = KvCache.for_model(model, backend="cpu")
    store = cache.manager.store
    cycle: list[Any] = [cache]
    cycle.append(cycle)
    del cache, cycle

    def collect_inside() -> None:
        with store.locked():
            gc.collect()
            assert not store.closed

    within(30, collect_inside)
    assert store.closed


@torch.no_grad()
def test_freeing_by_hand_happens_at_once_and_once(manager: KvCacheManager, model: PreTrainedModel) -> None:
    heard: list[Any] = []
    cache = KvCache(manager, model)
    cache.prepare([1, 2, 3])
    model(input_ids=model.dummy_inputs["input_ids"][:1, :3], cache=cache)
    manager.subscribe(lambda event: heard.append(event.as_dict()))
    cache.free()
    cache.free()
    del cache
    assert [(event["event"], event.get("reason")) for event in heard[1:]] == [("freed", "freed")]
