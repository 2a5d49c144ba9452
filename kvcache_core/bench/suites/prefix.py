"""Prefix reuse: naming blocks, finding them, and requests in a full cache, beside a bare loop of hashlib.

Nothing is stored and nothing attends: what is measured is the bookkeeping. The full cache keeps 1,000 finished
prompts of 124 blocks, 64 of which all share; every further request finds these and evicts somebody else's tail.
"""

from __future__ import annotations

import time
from array import array
from hashlib import sha256
from typing import Any

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.bench.figures import Figure, Samples, Series
from kvcache_core.bench.session import Bench
from kvcache_core.bench.suites.bookkeeping import BooksOnly
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.plugin import StorageSpec
from kvcache_core.prefix import PrefixKey
from kvcache_core.prefix_index import PrefixIndex
from kvcache_core.sequence import CachedSequence

__all__ = ["measure"]

BLOCK = 16
SHARED, OWN = 64 * BLOCK, 60 * BLOCK
KEPT = 1000
BATCH = 50
KEY = PrefixKey(namespace="model")


class NoStorage(BooksOnly):
    """A pool that nothing is stored in and that notes nothing."""

    def reserve(self, slot: None, blocks: Any, start: int, stop: int, copies: Any) -> None:
        """Nothing will be written."""
        return


def measure(bench: Bench) -> list[Figure | Series]:
    """Measure names and finding in one run beside hashlib, then requests and decoding."""
    return [*_names_and_finding(bench), *_requests(bench), *_decoding(bench)]


# -- naming and finding --------------------------------------------------------------------------------------


def _bare_chain(data: bytes) -> bytes:
    """The names of all blocks and nothing else: the least that hashing can cost."""
    width, name = BLOCK * 8, sha256(KEY.encoded).digest()
    for start in range(0, len(data), width):
        name = sha256(name + data[start : start + width]).digest()
    return name


def _sequence(token_ids: array[int]) -> CachedSequence:
    made = CachedSequence("kv", "request", 1 << 20, 0, 0, None, [], token_ids=token_ids)
    made.prefix_key = KEY
    return made


def _names_and_finding(bench: Bench) -> list[Figure]:
    thousand, hundred_blocks = array("q", range(1000)), array("q", range(100 * BLOCK))
    index = PrefixIndex(BLOCK)
    index.publish(_sequence(hundred_blocks))

    entered = _sequence(thousand)
    fresh = PrefixIndex(BLOCK)

    def name() -> None:
        if entered.tip is not None and not entered.tip.name:
            raise RuntimeError("a block has no name")
        fresh.leave(entered, 0)

    seconds = bench.interleaved(
        {
            "bare, 1,000 tokens": lambda: _bare_chain(thousand[: 62 * BLOCK].tobytes()),
            "bare, 100 blocks": lambda: _bare_chain(hundred_blocks.tobytes()),
            "publish": lambda: fresh.publish(entered),
            "name and drop": name,
            "find": lambda: index.find(KEY, hundred_blocks, 100),
        },
        rounds=400,
    )
    bare, peer = seconds["bare, 1,000 tokens"], "hashlib"
    finding = seconds["find"] / seconds["bare, 100 blocks"]
    return [
        Figure.of("a bare chain of SHA-256 over 1,000 tokens", bare * 1e6, "µs", peer=peer, at_most=60),
        Figure.of("enter the blocks of 1,000 tokens", seconds["publish"] * 1e6, "µs", at_most=60),
        Figure.of("enter them, of the bare chain", seconds["publish"] / bare, "x", peer=peer),
        Figure.of("name them when asked, and drop them", seconds["name and drop"] * 1e6, "µs"),
        Figure.of("name and drop them, of the bare chain", seconds["name and drop"] / bare, "x", peer=peer),
        Figure.of("find 100 blocks", seconds["find"] * 1e6, "µs", at_most=30),
        Figure.of("find 100 blocks, of the bare chain", finding, "x", peer=peer),
    ]


# -- requests ------------------------------------------------------------------------------------------------


def _cache(num_blocks: int) -> KvCacheManager:
    spec = StorageSpec(
        geometry=CacheGeometry.uniform(1, 1, 1),
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_sequence_length=1 << 14,
        dtype="float32",
        device="cpu",
    )
    return KvCacheManager(NoStorage(spec), prefix=PrefixCacheConfig(enabled=True, namespace="model"))


def _prompt(number: int) -> array[int]:
    own = 1_000_000 + number * OWN
    return array("q", [*range(SHARED), *range(own, own + OWN)])


def _requests(bench: Bench) -> list[Figure]:
    times: dict[str, list[float]] = {"allocate with room": [], "allocate": [], "prefill": [], "free": []}
    with _cache((SHARED + (KEPT - 1) * OWN) // BLOCK) as cache:
        for number in range(KEPT + 100):
            bench.tell("requests in a full cache", number, KEPT + 100)
            prompt = _prompt(number)
            began = time.perf_counter()
            handle = cache.allocate(token_ids=prompt)
            allocated = time.perf_counter()
            with cache.step({handle: prompt[handle.num_tokens :]}) as step:
                step.mark_written()
            prefilled = time.perf_counter()
            handle.free()
            freed = time.perf_counter()
            if KEPT - 100 <= number < KEPT - 1:
                times["allocate with room"].append(allocated - began)
            elif number >= KEPT:
                times["allocate"].append(allocated - began)
                times["prefill"].append(prefilled - allocated)
                times["free"].append(freed - prefilled)
        if cache.stats().evictions < 99 * OWN // BLOCK:
            raise RuntimeError("the cache was not full, so nothing was evicted")
    found = {name: Samples(tuple(taken)) * 1e6 for name, taken in times.items()}
    return [
        Figure.of("allocate: find 64 of 124 blocks, take 60", found["allocate with room"], "µs"),
        Figure.of("the same, and evict 60 first", found["allocate"], "µs"),
        Figure.of("prefill: reserve, commit and name 60 blocks", found["prefill"], "µs"),
        Figure.of("free a kept sequence of 124 blocks", found["free"], "µs"),
    ]


def _decoding(bench: Bench) -> list[Figure]:
    with _cache(BATCH * 128) as cache:
        handles: list[KvCacheHandle] = []
        for number in range(BATCH):
            handle = cache.allocate(token_ids=_prompt(number))
            with cache.step({handle: _prompt(number)[handle.num_tokens :]}) as step:
                step.mark_written()
            handles.append(handle)
        new_tokens = {handle: [7] for handle in handles}

        def decode() -> None:
            step = cache.begin(new_tokens)
            step.mark_written()
            step.commit()

        seconds = bench.interleaved({"decode": decode}, rounds=50)["decode"]
        for handle in handles:
            handle.free()
    return [Figure.of("a decoded token of one of 50 sequences", seconds * (1e6 / BATCH), "µs")]
