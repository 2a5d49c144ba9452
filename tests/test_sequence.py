"""The record of a sequence that handles refer to, and ids."""

from __future__ import annotations

import os

import pytest

from kvcache_core import KvCacheManager
from kvcache_core.sequence import unique_id
from tests.caches import filled, grow


def test_ids_are_unique() -> None:
    made = [unique_id("kv") for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(each.startswith("kv-") for each in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_repeat_its_parents_ids() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, unique_id("kv").encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert theirs.startswith("kv-")
    assert theirs not in {unique_id("kv") for _ in range(100)}
    assert theirs.split("-")[1] != unique_id("kv").split("-")[1]


def test_a_sequence_does_not_keep_its_handles_alive_nor_remember_dead_ones(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    for _ in range(50):
        handle.clone_handle().free()
        cache.kept.pop()  # type: ignore[attr-defined]
    assert len(handle.sequence._handles) <= 3
    assert handle.sequence.any_handle() is handle


def test_the_version_moves_with_every_change_of_contents_or_table(cache: KvCacheManager) -> None:
    handle = filled(cache, 3)
    seen = [handle.sequence.version]

    def commit() -> None:
        grow(handle, 1)

    def abort() -> None:
        cache.begin({handle: 1}).abort()

    for change in (commit, abort, lambda: handle.truncate(4), handle.free):
        change()
        seen.append(handle.sequence.version)
    assert seen == sorted(set(seen))
