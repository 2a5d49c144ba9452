"""What hot paths cost in calls, not in time: the same whatever the length, and no more than it was."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from kvcache_core import KvCacheHandle, KvCacheManager
from kvcache_core.bench.suites.bookkeeping import open_books
from kvcache_core.bench.workload import QUERY_HEADS, decode, new_rows, open_benchmark_cache, prefill

LAYERS = 30


def calls(operation: Callable[[], Any]) -> int:
    """Python and C calls that an operation makes once it is warm."""
    operation()
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        operation()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


@pytest.fixture(scope="module")
def cache() -> Any:
    with open_benchmark_cache(20_000) as opened:
        yield opened


def sequence(cache: KvCacheManager, length: int) -> KvCacheHandle:
    handle = cache.allocate()
    prefill(handle, length)
    return handle


def both(cache: KvCacheManager, operation: Callable[[KvCacheHandle], Any]) -> tuple[int, int]:
    """Calls of an operation on a short and on a long sequence; neither is at the end of a block."""
    with sequence(cache, 101) as short, sequence(cache, 8_005) as long:
        return calls(lambda: operation(short)), calls(lambda: operation(long))


@torch.inference_mode()
def test_appending_a_token_costs_the_same_at_any_length_and_little_for_a_layer(cache: KvCacheManager) -> None:
    rows = new_rows(1)
    short, long = both(cache, lambda handle: decode(cache, handle, rows, None))
    assert short == long
    assert long <= 25 * LAYERS


@torch.inference_mode()
def test_attending_adds_few_calls_for_a_layer_at_any_length(cache: KvCacheManager) -> None:
    rows, query = new_rows(1), torch.randn(1, QUERY_HEADS, 64, dtype=torch.bfloat16)
    short, long = both(cache, lambda handle: decode(cache, handle, rows, query))
    assert long - short <= LAYERS  # a longer prompt may be worth one question more
    assert long <= 70 * LAYERS


def test_a_fork_makes_the_same_number_of_calls_at_any_length(cache: KvCacheManager) -> None:
    short, long = both(cache, lambda handle: handle.fork().free())
    assert short == long
    assert long <= 160


def test_the_books_of_a_decode_step_call_no_python_function_for_each_sequence() -> None:
    def decode_some(handles: list[KvCacheHandle]) -> None:
        with books.step({handle: [7] for handle in handles}) as step:
            step.mark_written()

    with open_books() as books:
        handles = [books.allocate() for _ in range(50)]
        with books.step({handle: range(index, index + 100) for index, handle in enumerate(handles)}) as step:
            step.mark_written()
        one, all_of_them = calls(lambda: decode_some(handles[:1])), calls(lambda: decode_some(handles))
    assert one <= 82
    assert all_of_them - one <= 49 * 4  # each of them appends to a list or asks for a length


@torch.inference_mode()
def test_decoding_leaves_no_objects_behind(cache: KvCacheManager) -> None:
    rows = new_rows(1)
    with sequence(cache, 101) as handle:

        def round_trip() -> None:
            for _ in range(20):
                decode(cache, handle, rows, None)
            handle.truncate(101)

        round_trip()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(5):
            round_trip()
        gc.collect()
        assert sys.getallocatedblocks() - before < 50
