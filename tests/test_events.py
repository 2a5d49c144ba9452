"""The events of a cache: what each says, and that together they account for all that happens."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from kvcache_core import CacheFullError, KvCacheManager, MemoryPressure
from kvcache_core import events as kinds
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.events import (
    EVENT_TYPES,
    Aborted,
    Allocated,
    Attached,
    CacheEvent,
    Closed,
    Committed,
    Evicted,
    Forked,
    Freed,
    PrefixHit,
    PrefixMiss,
    PrefixShared,
    PressureChanged,
    Refused,
    Reset,
    SequenceEvent,
    StepPart,
    Truncated,
)
from tests.caches import STORAGES, NewCache, StorageFailed, failing, filled, grow, rows

REUSING = {"prefix": PrefixCacheConfig(enabled=True, namespace="model")}

Heard = list[Any]


def watched(cache: KvCacheManager, *wanted: type[CacheEvent]) -> Heard:
    """All events of a cache from now on, except the one that says that they are heard."""
    heard: Heard = []
    cache.subscribe(heard.append, *wanted)
    heard.clear()
    return heard


def stated(event: CacheEvent) -> dict[str, Any]:
    """What an event says, besides where, when and to whom."""
    return {key: value for key, value in event.as_dict().items() if key not in {"number", "time", "manager_id"}}


def run_prompt(cache: KvCacheManager, prompt: list[int], **request: Any) -> Any:
    """Allocate a prompt and store all of it."""
    handle = cache.allocate(token_ids=prompt, **request)
    grow(handle, len(prompt) - handle.num_tokens, token_ids=prompt[handle.num_tokens :])
    return handle


# -- the objects -----------------------------------------------------------------------------------------


def test_every_event_class_is_known_and_has_a_name_of_its_own() -> None:
    concrete = {
        value
        for value in vars(kinds).values()
        if isinstance(value, type) and issubclass(value, CacheEvent) and value not in (CacheEvent, SequenceEvent)
    }
    assert concrete == set(EVENT_TYPES)
    assert len({kind.name for kind in EVENT_TYPES}) == len(EVENT_TYPES)
    assert all(kind.name and kind.__name__ in kinds.__all__ for kind in EVENT_TYPES)


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.name)
def test_an_event_is_frozen_and_documents_its_fields(kind: type[CacheEvent]) -> None:
    event = kind(**{field.name: 0 for field in fields(kind)})
    with pytest.raises((FrozenInstanceError, TypeError)):
        event.number = 5  # type: ignore[misc]
    documented = "".join(base.__doc__ or "" for base in kind.__mro__[:-1])
    assert [field.name for field in fields(kind) if f"{field.name}: " not in documented] == []


def test_an_event_pickles_and_is_plain_in_json(new_cache: NewCache) -> None:
    cache = new_cache()
    heard = watched(cache)
    filled(cache, 40, request_id="a")
    cache.close()
    assert {type(event) for event in heard} == {Allocated, Committed, PressureChanged, Freed, Closed}
    for event in heard:
        assert pickle.loads(pickle.dumps(event)) == event
        assert json.loads(json.dumps(event.as_dict())) == event.as_dict()


# -- what each says --------------------------------------------------------------------------------------


def test_the_first_event_says_what_cache_it_is(cache: KvCacheManager) -> None:
    filled(cache, 6)
    heard: Heard = []
    cache.subscribe(heard.append)
    (event,) = heard
    assert type(event) is Attached
    assert event.manager_id == cache.manager_id
    assert stated(event) == {
        "event": "attached",
        "backend": "custom",
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "total_blocks": 16,
        "bytes_per_block": cache.bytes_per_block,
        "used_blocks": 2,
        "num_sequences": 1,
    }


def test_a_sequence_is_allocated_grows_shrinks_and_is_freed(cache: KvCacheManager) -> None:
    heard = watched(cache)
    handle = cache.allocate(request_id="a", num_tokens=9)
    grow(handle, 6)
    handle.truncate(3)
    handle.truncate(3)
    handle.free()
    who = {"request_id": "a", "cache_id": handle.cache_id}
    assert [stated(event) for event in heard] == [
        {"event": "allocated", **who, "prompt_tokens": 0, "num_tokens": 0, "num_blocks": 3},
        {"event": "committed", "parts": [{**who, "new_tokens": 6, "num_tokens": 6}]},
        {"event": "truncated", **who, "num_tokens": 3, "dropped_tokens": 3},
        {"event": "freed", **who, "num_tokens": 3, "num_blocks": 1, "kept_tokens": 0, "reason": "freed"},
    ]


def test_a_step_is_one_event_with_a_part_for_each_sequence(cache: KvCacheManager) -> None:
    first, second = filled(cache, 5, request_id="a"), filled(cache, 2, "b", request_id="b")
    heard = watched(cache)
    with cache.step({first: 3, second: 2}) as step:
        for layer in cache.geometry.caching_layers:
            step.write(layer, *rows(cache, layer, 0, 5))
        step.accept(first, 1)
    assert [type(event) for event in heard] == [Committed]
    assert heard[0].parts == (
        StepPart(request_id="a", cache_id=first.cache_id, new_tokens=1, num_tokens=6),
        StepPart(request_id="b", cache_id=second.cache_id, new_tokens=2, num_tokens=4),
    )
    with pytest.raises(ZeroDivisionError), cache.step({second: 3}):
        raise ZeroDivisionError
    assert stated(heard[1]) == {
        "event": "aborted",
        "parts": [{"request_id": "b", "cache_id": second.cache_id, "new_tokens": 0, "num_tokens": 4}],
    }


def test_a_commit_that_fails_is_heard_of_as_aborted(cache: KvCacheManager) -> None:
    handle = filled(cache, 5)
    step = cache.begin({handle: 3})
    for layer in cache.geometry.caching_layers:
        step.write(layer, *rows(cache, layer, 5, 8))
    step.accept(handle, 1)
    heard = watched(cache)
    with failing(cache.storage, "truncate"), pytest.raises(StorageFailed):
        step.commit()
    assert [type(event) for event in heard] == [Aborted]


def test_a_fork_names_its_parent_and_what_they_share(cache: KvCacheManager) -> None:
    parent = filled(cache, 6, request_id="a")
    heard = watched(cache)
    child = parent.fork(request_id="b")
    (event,) = heard
    shared = child.stats().shared_blocks
    assert stated(event) == {
        "event": "forked",
        "request_id": "b",
        "cache_id": child.cache_id,
        "parent_request_id": "a",
        "parent_cache_id": parent.cache_id,
        "num_tokens": 6,
        "num_blocks": 2,
        "shared_blocks": shared,
    }


def test_another_reference_to_the_same_cache_is_no_event_and_only_the_last_one_frees(cache: KvCacheManager) -> None:
    handle = filled(cache, 6)
    heard = watched(cache)
    clone = handle.clone_handle()
    handle.free()
    assert heard == []
    clone.free()
    assert [type(event) for event in heard] == [Freed]


def test_sharing_a_prefix_is_told(cache: KvCacheManager) -> None:
    source, target = filled(cache, 6, request_id="a"), cache.allocate(request_id="b")
    heard = watched(cache)
    cache.share_prefix(source, target, 5)
    assert stated(heard[0]) == {
        "event": "prefix_shared",
        "request_id": "b",
        "cache_id": target.cache_id,
        "source_request_id": "a",
        "source_cache_id": source.cache_id,
        "num_tokens": 5,
    }


def test_a_prompt_hits_or_misses_with_a_reason(new_cache: NewCache) -> None:
    cache = new_cache(settings=REUSING)
    heard = watched(cache, PrefixHit, PrefixMiss)
    prompt = list(range(100, 110))
    run_prompt(cache, prompt, request_id="first").free()
    again = cache.allocate(token_ids=prompt, request_id="again")
    cache.allocate(token_ids=[*prompt[:5], 1, 2, 3, 4], request_id="other")
    cache.allocate(token_ids=[1, 2, 3], request_id="short")
    cache.allocate(token_ids=prompt, salt="s", request_id="salted")
    cache.allocate(num_tokens=8)
    assert [(type(event), event.request_id, event.reason) for event in heard] == [
        (PrefixMiss, "first", "never-stored"),
        (PrefixHit, "again", "hit"),
        (PrefixHit, "other", "diverged"),
        (PrefixMiss, "short", "shorter-than-a-block"),
        (PrefixMiss, "salted", "never-stored"),
    ]
    assert [event.num_tokens for event in heard if type(event) is PrefixHit] == [8, 4]
    assert heard[1].cache_id == again.cache_id
    assert heard[1].message == "8 of 10 tokens are cached; the rest is always computed"


def test_a_prompt_that_finds_no_room_counts_as_no_lookup(new_cache: NewCache) -> None:
    cache = new_cache(settings=REUSING)
    filled(cache, 40, request_id="a")
    heard = watched(cache)
    with pytest.raises(CacheFullError):
        cache.allocate(token_ids=range(500, 530))
    assert [stated(event) for event in heard] == [
        {"event": "refused", "purpose": "for a sequence of 30 tokens", "needed": 8, "free": 6, "evictable": 0}
    ]
    assert cache.stats().failures == 1


def test_what_is_kept_and_evicted_is_told(new_cache: NewCache) -> None:
    cache = new_cache(settings=REUSING)
    heard = watched(cache, Freed, Evicted)
    handle = run_prompt(cache, list(range(100, 110)), request_id="a")
    handle.free()
    filled(cache, 48, request_id="b")
    filled(cache, 12, request_id="c")  # 15 of 16 blocks are used now, and 2 were kept
    cache.reset_prefix_cache()
    who = {"request_id": "a", "cache_id": handle.cache_id}
    assert [stated(event) for event in heard] == [
        {"event": "freed", **who, "num_tokens": 10, "num_blocks": 3, "kept_tokens": 8, "reason": "freed"},
        {"event": "evicted", **who, "num_blocks": 1, "kept_tokens": 4, "reason": "room"},
        {"event": "evicted", **who, "num_blocks": 1, "kept_tokens": 0, "reason": "cleared"},
    ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_prefixes": 1}, "limit"), ({"prefix_ttl_seconds": 1e-9}, "expired")],
    ids=["limit", "expired"],
)
def test_why_it_was_evicted_is_told(settings: dict[str, Any], reason: str, new_cache: NewCache) -> None:
    prefix = PrefixCacheConfig(enabled=True, namespace="model", **settings)
    cache = new_cache(settings={"prefix": prefix})
    heard = watched(cache, Evicted)
    for start in (0, 100):
        run_prompt(cache, list(range(start, start + 10)), request_id=str(start)).free()
    assert [(event.request_id, event.num_blocks, event.kept_tokens, event.reason) for event in heard] == [
        ("0", 2, 0, reason)
    ]


def test_pressure_is_told_with_its_figures(cache: KvCacheManager) -> None:
    heard = watched(cache, PressureChanged)
    filled(cache, 40)
    assert (heard[0].previous, heard[0].level) == (MemoryPressure.LOW, MemoryPressure.MEDIUM)
    assert (heard[0].used_blocks, heard[0].total_blocks) == (10, 16)


@pytest.mark.parametrize(("end", "kind"), [("reset", Reset), ("close", Closed)])
def test_the_end_of_everything_is_told_sequence_by_sequence_and_last_of_all(
    end: str, kind: type[CacheEvent], new_cache: NewCache
) -> None:
    cache = new_cache(settings=REUSING)
    run_prompt(cache, list(range(100, 110)), request_id="kept").free()
    filled(cache, 40, request_id="live")
    step = cache.begin({cache.allocate(request_id="stepping"): 2})
    heard = watched(cache)
    getattr(cache, end)()
    assert step.state == "aborted"
    assert [type(event) for event in heard] == [Aborted, Evicted, Freed, Freed, PressureChanged, kind]
    assert {event.reason for event in heard if type(event) is Freed} == {end.replace("close", "closed")}
    assert heard[-1].num_sequences == 2


def test_events_carry_no_token_id_and_no_salt(new_cache: NewCache) -> None:
    cache = new_cache(settings=REUSING)
    heard = watched(cache)
    prompt = [987654321 + index for index in range(10)]
    for _ in range(2):
        run_prompt(cache, prompt, salt="a-tenants-secret", adapter="an-adapter").free()
    cache.close()
    said = json.dumps([event.as_dict() for event in heard]) + repr(heard)
    assert "98765" not in said
    assert "secret" not in said
    assert "an-adapter" not in said


# -- all together ----------------------------------------------------------------------------------------


class Replay:
    """What a cache holds, from its events alone."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.found = 0

    def __call__(self, event: Any) -> None:
        match event:
            case Allocated() | Forked():
                assert event.cache_id not in self.live
                self.live[event.cache_id] = event.num_tokens
            case PrefixHit():
                self.found += event.num_tokens
            case PrefixShared():
                self.live[event.cache_id] = event.num_tokens
            case Committed():
                for part in event.parts:
                    self.live[part.cache_id] += part.new_tokens
                    assert self.live[part.cache_id] == part.num_tokens
            case Aborted():
                assert all(self.live[part.cache_id] == part.num_tokens for part in event.parts)
            case Truncated():
                self.live[event.cache_id] -= event.dropped_tokens
                assert self.live[event.cache_id] == event.num_tokens
            case Freed():
                assert self.live.pop(event.cache_id) == event.num_tokens
                if event.kept_tokens:
                    self.kept[event.cache_id] = event.kept_tokens
            case Evicted():
                if event.kept_tokens:
                    self.kept[event.cache_id] = event.kept_tokens
                else:
                    self.kept.pop(event.cache_id, None)
            case Reset() | Closed():
                assert self.live == {}


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.__name__)
@pytest.mark.parametrize("seed", range(6))
def test_events_alone_account_for_every_token_of_every_sequence(
    storage: Callable[..., Any], seed: int, new_cache: NewCache
) -> None:
    chance = random.Random(seed)
    settings = {"prefix": PrefixCacheConfig(enabled=True, namespace="model", max_prefixes=3)}
    cache = new_cache(storage, settings=settings, manager=KvCacheManager)
    replay = Replay()
    heard = watched(cache)
    cache.subscribe(replay)
    handles: list[Any] = []

    def act() -> None:
        action = chance.choice(["allocate", "allocate", "step", "step", "step", "fork", "cut", "free", "share", "end"])
        if action == "allocate":
            prompt = [chance.randrange(2) * 50 + index for index in range(chance.randrange(14))]
            handles.append(cache.allocate(token_ids=prompt))
            grow(handles[-1], len(prompt) - handles[-1].num_tokens, token_ids=prompt[handles[-1].num_tokens :])
        elif action == "step" and handles:
            chosen = chance.sample(handles, chance.randint(1, min(3, len(handles))))
            counts = [chance.randrange(1, 4) for _ in chosen]
            with cache.step(dict(zip(chosen, counts, strict=True))) as step:
                for layer in cache.geometry.caching_layers:
                    step.write(layer, *rows(cache, layer, 0, sum(counts)))
                step.accept(chosen[0], chance.randint(0, counts[0]))
                if chance.random() < 0.2:
                    step.abort()
        elif action == "fork" and handles:
            handles.append(chance.choice(handles).fork())
        elif action == "cut" and handles:
            handle = chance.choice(handles)
            handle.truncate(chance.randint(0, handle.num_tokens))
        elif action == "free" and handles:
            handles.pop(chance.randrange(len(handles))).free()
        elif action == "share" and handles:
            source = chance.choice(handles)
            handles.append(cache.allocate())
            cache.share_prefix(source, handles[-1], source.num_tokens)
        elif action == "end" and chance.random() < 0.1:
            cache.reset()
            handles.clear()

    for _ in range(150):
        try:
            act()
        except CacheFullError:
            for handle in handles[::2]:
                handle.free()
            del handles[::2]
        assert replay.live == {handle.cache_id: handle.num_tokens for handle in cache.list_handles()}
        assert replay.kept.keys() >= cache.store.prefixes.retained.keys()
        for cache_id, kept in cache.store.prefixes.retained.items():
            assert replay.kept[cache_id] == kept.num_tokens
        assert replay.found == cache.store.prefixes.found
        assert cache.audit() == ()
    cache.close()
    assert replay.live == {}
    assert [event.number for event in heard] == list(range(heard[0].number, heard[0].number + len(heard)))
    seen = {type(event) for event in heard}
    assert seen >= {Allocated, Committed, Aborted, Forked, Truncated, Freed, PrefixShared, Refused, Closed}
