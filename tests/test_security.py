"""Isolation: what one tenant stores, no other reads, finds, or learns about."""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcache_core
from kvcache_core import AllocationRequest, CacheFullError, CacheGeometry, KvCacheError, KvCacheManager
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.prefix import PrefixKey
from kvcache_core.prefix_index import PrefixIndex
from kvcache_core.sequence import CachedSequence
from tests.prompts import ON, STORAGES, assert_reads, explain, fill, hit, make_prefix_cache, peek, publish, stored
from tests.storages.paged import PagedStorage

MakeCache = Callable[..., KvCacheManager]

# sglang#37160, a salt that the lower tier drops, is tested with the one backend that has a lower tier.


@pytest.fixture(params=STORAGES)
def new_cache(request: pytest.FixtureRequest) -> Iterator[MakeCache]:
    """Makes caches with prefix reuse over each storage; their books are sound in the end."""
    with ExitStack() as stack:
        made: list[KvCacheManager] = []

        def make(**named: Any) -> KvCacheManager:
            made.append(stack.enter_context(make_prefix_cache(STORAGES[request.param], **named)))
            return made[-1]

        yield make
        for cache in made:
            assert cache.audit() == ()


PROMPT = tuple(range(100, 110))
SMALL = CacheGeometry.uniform(1, 1, 4)

# -- keys ----------------------------------------------------------------------------------------------------

KEYS: list[dict[str, Any]] = [
    {},
    {"salt": "X"},
    {"salt": b"X"},
    {"salt": ""},
    {"salt": b""},
    {"salt": 0},
    {"salt": "0"},
    {"adapter": "X"},
    {"adapter": ""},
    {"salt": "X", "adapter": "X"},
    {"salt": "XX"},
    {"extra_keys": {"salt": "X"}},
    {"extra_keys": {"image": "X"}},
    {"extra_keys": {"image": b"X"}},
    {"extra_keys": {"image": 2**64}},
    {"extra_keys": {"image": 0}},
    {"extra_keys": {"image": "X", "audio": "X"}},
]


def test_vllm_44701_no_key_finds_what_another_stored(new_cache: MakeCache) -> None:
    cache = new_cache(num_blocks=64)
    for key in KEYS:
        assert hit(cache, PROMPT, **key) == 0
        publish(cache, PROMPT, **key)
    for key in KEYS:
        assert hit(cache, PROMPT, **key) == 8  # reads what was stored under this key


def test_values_that_are_not_given_are_the_same_as_none(new_cache: MakeCache) -> None:
    cache = new_cache()
    publish(cache, PROMPT)
    assert hit(cache, PROMPT, salt=None, adapter=None, extra_keys={}) == 8
    assert hit(cache, PROMPT, extra_keys={"image": None}) == 8


def test_a_key_is_part_of_every_block_not_of_the_first_alone(new_cache: MakeCache) -> None:
    cache = new_cache()
    handle = stored(cache, PROMPT[:4], salt="a")
    other = stored(cache, PROMPT[:4], salt="b")
    fill(handle, PROMPT, salt="a")
    assert peek(cache, PROMPT, salt="b") == 4
    fill(other, PROMPT, salt="b")
    assert_reads(other, PROMPT, salt="b")
    assert hit(cache, PROMPT) == 0


def test_lmcache_3301_five_thousand_images_are_five_thousand_entries() -> None:
    index = PrefixIndex(2)
    tokens = array("q", [1, 2])
    for image in range(5000):
        sequence = CachedSequence("id", "request", 2, 0, 0, None, [1], num_tokens=2, token_ids=tokens)
        sequence.prefix_key = PrefixKey(extra={"image": image << 40})
        index.publish(sequence)
    assert len(index) == 5000
    assert len({node.name for node in index}) == 5000
    for image in (0, 1, 4999):
        node = index.find(PrefixKey(extra={"image": image << 40}), tokens, 1)
        assert node is not None
        assert node.home.prefix_key == PrefixKey(extra={"image": image << 40})
    assert index.find(PrefixKey(extra={"image": 5000 << 40}), tokens, 1) is None


# -- hashes --------------------------------------------------------------------------------------------------


class _Hash8:
    """SHA-256 cut to 8 bits."""

    def __init__(self, data: bytes) -> None:
        self._digest = hashlib.sha256(data).digest()[:1]

    def digest(self) -> bytes:
        return self._digest


def test_openvino_genai_3722_a_hit_does_not_rest_on_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_core.prefix_index.sha256", _Hash8)
    generator = random.Random(0)
    prefix = PrefixCacheConfig(enabled=True, max_prefixes=3000)
    with make_prefix_cache(PagedStorage, geometry=SMALL, block_size=2, num_blocks=3000, prefix=prefix) as cache:
        published = {(generator.randrange(500), generator.randrange(500)) for _ in range(2000)}
        for tokens in published:
            publish(cache, tokens)
        others = {(generator.randrange(500), generator.randrange(500)) for _ in range(2000)} - published
        assert len({node.name for node in cache.store.prefixes.index}) <= 256
        assert cache.stats().cached_prefixes == len(published)

        def found(tokens: tuple[int, int]) -> bool:
            return cache.store.prefixes.find(PrefixKey(), array("q", [*tokens, 1]), 3) is not None

        assert [tokens for tokens in others if found(tokens)] == []
        assert all(map(found, published))
        cache.reset_prefix_cache()


def test_equal_blocks_after_different_ones_are_not_confused_when_hashes_collide(
    new_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_core.prefix_index.sha256", _Hash8)
    cache = new_cache(num_blocks=400, geometry=SMALL)
    for first in range(100):
        publish(cache, [first, 0, 0, 0, 7, 7, 7, 7])
    assert hit(cache, [100, 0, 0, 0, 7, 7, 7, 7, 7]) == 0
    for first in (0, 50, 99):
        assert hit(cache, [first, 0, 0, 0, 7, 7, 7, 7, 7]) == 8
    cache.reset_prefix_cache()


# -- what others can observe ---------------------------------------------------------------------------------


def _observed(new_cache: MakeCache, theirs: list[int], guess: list[int], **request: Any) -> list[Any]:
    """Everything that can be seen while one tenant probes for a prompt after another has stored one."""
    cache = new_cache(num_blocks=8)
    publish(cache, theirs, salt="them")
    live = stored(cache, theirs, salt="them")
    seen: list[Any] = []

    def note(what: Any) -> None:
        seen.append(what)
        seen.append(cache.stats())

    note(explain(cache, guess, **request))
    note(hit(cache, guess, **request))
    mine = stored(cache, guess, **request)
    note(mine.block_table)
    note(mine.stats().shared_blocks)
    note(cache.can_allocate(token_ids=guess, **request))
    for tokens in (guess, [*guess, *range(20)]):
        try:
            note(cache.allocate(token_ids=tokens, num_tokens=28, **request).num_tokens)
        except CacheFullError as error:
            note((str(error), error.needed, error.free, error.evictable))
    mine.free()
    note(hit(cache, guess, **request))
    live.free()
    note(explain(cache, guess, **request))
    return seen


@pytest.mark.parametrize("request_", [{"salt": "me"}, {}, {"adapter": "them"}, {"salt": ""}], ids=repr)
def test_vllm_16016_a_tenant_observes_nothing_of_what_another_stored(
    new_cache: MakeCache, request_: dict[str, Any]
) -> None:
    secret, unrelated = list(PROMPT), list(range(500, 510))
    with_secret = _observed(new_cache, secret, secret, **request_)
    without = _observed(new_cache, unrelated, secret, **request_)
    assert with_secret == without
    assert _observed(new_cache, secret, secret, salt="them") != without  # the probe does see what it may see


def test_an_explanation_is_silent_about_other_keys_unless_asked(new_cache: MakeCache) -> None:
    cache = new_cache()
    publish(cache, PROMPT, salt="them")
    assert explain(cache, PROMPT, salt="me").reason == "never-stored"
    cache.store.books.make_room(16)  # also of what has been evicted
    assert explain(cache, PROMPT, salt="me").reason == "never-stored"
    assert explain(cache, PROMPT, salt="them").reason == "evicted"
    publish(cache, PROMPT, salt="them")
    told = cache.explain(token_ids=PROMPT, salt="me", across_salts=True)
    assert (told.reason, told.num_tokens) == ("salt-differs", 0)
    assert "another salt" in told.message


@pytest.mark.parametrize("secret", ["hunter2", b"hunter2"])
def test_a_salt_appears_in_no_text(secret: Any) -> None:
    with make_prefix_cache(num_blocks=4) as cache:
        request = AllocationRequest(token_ids=PROMPT, salt=secret)
        handle = cache.allocate(request)
        texts = [repr(request), repr(handle), repr(cache), repr(cache.stats()), repr(handle.stats())]
        texts += [explain(cache, PROMPT, salt=secret).message, repr(handle.sequence.prefix_key)]
        with pytest.raises(KvCacheError) as caught:
            cache.allocate(token_ids=PROMPT, salt=secret, num_tokens=40)
        texts.append(str(caught.value))
        with pytest.raises(KvCacheError) as caught:
            cache.allocate(token_ids=PROMPT, salt=[secret])
        texts.append(str(caught.value))
        assert not [text for text in texts if "hunter2" in text]


# -- memory --------------------------------------------------------------------------------------------------

CANARY = 1e6


def _pools(cache: KvCacheManager) -> Iterator[torch.Tensor]:
    storage: Any = cache.storage
    yield from itertools.chain(storage.keys.values(), storage.values.values())


def _canaries(cache: KvCacheManager) -> int:
    return sum(int((pool == CANARY).sum()) for pool in _pools(cache))


def _write_canaries(cache: KvCacheManager, count: int, **request: Any) -> Any:
    handle = cache.allocate(**request)
    rows = torch.full((count, 2, 8), CANARY)
    handle.append([(rows, rows)] * 3, range(count))
    return handle


def test_scrubbed_memory_holds_nothing_of_what_was_freed() -> None:
    with make_prefix_cache(PagedStorage, scrub=True, prefix=PrefixCacheConfig(enabled=False)) as cache:
        handle = _write_canaries(cache, 10)
        fork = handle.fork()
        handle.free()
        assert _canaries(cache) > 0
        fork.truncate(5)
        assert _canaries(cache) == 5 * 2 * 8 * 6
        fork.free()
        assert _canaries(cache) == 0


def test_scrubbed_memory_keeps_of_a_finished_sequence_only_what_can_be_found() -> None:
    with make_prefix_cache(PagedStorage, scrub=True) as cache:
        _write_canaries(cache, 10).free()
        assert _canaries(cache) == 8 * 2 * 8 * 6
        cache.store.books.make_room(15)
        assert _canaries(cache) == 4 * 2 * 8 * 6
        cache.reset_prefix_cache()
        assert _canaries(cache) == 0
        one, two = _write_canaries(cache, 8), _write_canaries(cache, 8)
        with cache.step({two: 0}):  # merges the blocks
            pass
        assert _canaries(cache) == 8 * 2 * 8 * 6
        one.free()
        two.free()
        cache.enable_prefix_caching(False)
        assert _canaries(cache) == 0


def test_a_hit_never_shows_the_tail_of_the_sequence_it_came_from(new_cache: MakeCache) -> None:
    cache = new_cache()
    home = stored(cache, [*PROMPT[:8], 66, 67, 68])
    found = cache.allocate(token_ids=[*PROMPT[:8], 1, 2, 3])
    assert_reads(found, PROMPT[:8])
    fill(found, [*PROMPT[:8], 1])
    assert_reads(found, [*PROMPT[:8], 1])
    home.free()
    again = cache.allocate(token_ids=[*PROMPT[:8], 66, 67, 68])
    assert_reads(again, PROMPT[:8])  # the tail was no full block
    assert found.kv_cache(0)[0].shape[0] == 9  # type: ignore[index]


# -- threads -------------------------------------------------------------------------------------------------


def _run(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` on so many threads at once; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_llama_cpp_27148_conversations_that_evict_each_other_read_their_own_data(new_cache: MakeCache) -> None:
    cache = new_cache(num_blocks=6, geometry=SMALL)

    def converse(number: int) -> None:
        generator = random.Random(number)
        for turn in range(120):
            tokens = [number, *(generator.randrange(2) for _ in range(generator.randrange(12)))]
            salt = generator.choice([None, number])
            try:
                handle = cache.allocate(token_ids=tokens, salt=salt)
            except CacheFullError:
                continue
            try:
                assert_reads(handle, tokens[: handle.num_tokens], salt=salt)
                fill(handle, tokens, salt=salt)
                assert_reads(handle, tokens, salt=salt)
            except CacheFullError:
                pass
            finally:
                handle.free()
            assert turn < 120

    _run(2, converse)
    assert cache.audit() == ()
    assert cache.stats().used_blocks == 0


def test_eight_threads_that_share_prompts_never_see_wrong_data(new_cache: MakeCache) -> None:
    cache = new_cache(num_blocks=24, geometry=SMALL)
    heads = [list(range(10 * name, 10 * name + 8)) for name in range(3)]

    def work(number: int) -> None:
        generator = random.Random(number)
        for _ in range(30):
            tokens = [*generator.choice(heads), *(generator.randrange(2) for _ in range(generator.randrange(8)))]
            handle = fork = None
            try:
                handle = cache.allocate(token_ids=tokens)
                assert_reads(handle, tokens[: handle.num_tokens])
                fill(handle, tokens)
                fork = handle.fork()
                fill(fork, [*tokens, number, number])
                assert_reads(handle, tokens)
                assert_reads(fork, [*tokens, number, number])
                handle.truncate(generator.randrange(len(tokens)))
            except CacheFullError:
                pass
            finally:
                for each in (handle, fork):
                    if each is not None:
                        each.free()
            if generator.random() < 0.05:
                cache.reset_prefix_cache()

    _run(8, work)
    assert cache.audit() == ()
    stats = cache.stats()
    assert stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == 24


# -- files ---------------------------------------------------------------------------------------------------


def test_vllm_14228_nothing_that_is_shipped_reads_pickles() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    found = []
    for path in Path(kvcache_core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "eval", "exec"}:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node.func)}")
            found += [f"{path.name}:{node.lineno}: {name}" for name in names if name.split(".")[0] in forbidden]
    assert found == []


def test_the_settings_that_these_tests_rely_on_do_share() -> None:
    with make_prefix_cache(prefix=ON) as cache:
        publish(cache, PROMPT, salt="a", adapter="b", extra_keys={"image": 3})
        assert hit(cache, PROMPT, salt="a", adapter="b", extra_keys={"image": 3}) == 8
