"""How queries are put together: in parts that fit, with few shapes, and none meets what it must not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheManager
from kvcache_core.plugin import Batch, Segment
from kvcache_metal import plan as module
from kvcache_metal.kernel import MetalKernel
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.caches import append, assert_attends_exactly, open_on, random, rows_of, spec_of
from plugins.metal.tests.stand_in import StandIn


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    assert dict(stand_in.fired) == {}


def queries_of(*lengths: tuple[int, int], window: int | None = None, heads: int = 4) -> module.StepQueries:
    """The queries of sequences of `(start, stop)` that lie in blocks of their own."""
    storage = MetalStorage(spec_of(num_blocks=40_000, max_sequence_length=100_000))
    segments, row, block = [], 0, 1
    for start, stop in lengths:
        blocks = tuple(range(block, block - (-stop // 4)))
        segments.append(Segment(None, blocks, start, stop, row))
        row, block = row + stop - start, block + len(blocks)
    assert isinstance(storage.kernel, MetalKernel)
    return storage.kernel.plan(Batch(segments, 4, storage.device)).queries(window, heads)


# -- parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("most_scores", [1, 1 << 9, 1 << 11])
def test_a_long_prompt_is_attended_in_parts(
    monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, window: int | None, most_scores: int
) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", most_scores)
    geometry = CacheGeometry.uniform(1, 2, 16, window=window)
    with open_on(stand_in, geometry=geometry) as cache, cache.allocate() as one, cache.allocate() as two:
        assert_attends_exactly(cache, {one: 21})
        assert_attends_exactly(cache, {one: 30, two: 9})
        assert_attends_exactly(cache, {two: 2, one: 1})


@pytest.mark.parametrize("most_scores", [1 << 9, 1 << 26])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_a_mask_hides_changes_nothing_also_where_it_is_no_number(
    monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, most_scores: int, poison: float
) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", most_scores)
    outs = []
    with open_on(stand_in, geometry=CacheGeometry.uniform(1, 2, 16)) as cache, cache.allocate() as handle:
        append(cache, handle, 7)
        for poisoned in (False, True):
            key, value = (part.clone() for part in rows_of(cache, 0, 20))
            if poisoned:
                key[13:] = value[13:] = poison
            step = cache.begin({handle: 20})
            step.write(0, key, value)
            outs.append(step.attend(0, random(20, 4, 16)))
            step.abort()
    clean, beside = outs
    torch.testing.assert_close(beside[:13], clean[:13])
    assert beside[13:].isnan().all(dim=-1).all()


def test_the_scores_of_a_part_stay_within_bounds_and_so_do_its_masks() -> None:
    (reading,) = queries_of((0, 32_768), heads=32).readings
    assert reading.keys == 32_768
    assert sum(len(piece.rows) for piece in reading.pieces) == 32_768
    assert all(32 * piece.tokens * piece.keys <= 1 << 26 for piece in reading.pieces)
    assert all(piece.masks is None for piece in reading.pieces)  # each would be kept for every layer
    assert len({(piece.tokens, piece.keys) for piece in reading.pieces}) < 40


def test_a_window_reads_only_what_its_queries_see() -> None:
    (reading,) = queries_of((9_999, 10_000), window=100).readings
    assert reading.keys == 112
    (reading,) = queries_of((9_900, 10_000), window=100).readings
    assert reading.keys == 224


# -- several sequences -------------------------------------------------------------------------------------


def test_decoding_sequences_of_similar_length_are_attended_together() -> None:
    readings = queries_of((99, 100), (2, 3), (80, 81), (5, 6), (90, 91)).readings
    assert [(reading.batch, reading.keys) for reading in readings] == [(3, 112), (2, 16)]


def test_many_rows_are_read_in_several_goes() -> None:
    readings = queries_of(*[(29_999, 30_000)] * 5).readings
    assert [reading.batch for reading in readings] == [2, 2, 1]


def test_outputs_come_in_the_order_of_the_sequences(stand_in: StandIn) -> None:
    with open_on(stand_in, num_blocks=96, max_sequence_length=128) as cache:
        handles = [cache.allocate() for _ in range(9)]
        for handle, count in zip(handles, (1, 60, 3, 17, 2, 61, 5, 33, 4), strict=True):
            append(cache, handle, count, seed=count)
        assert_attends_exactly(cache, dict.fromkeys(handles, 1))
        assert_attends_exactly(cache, {handles[0]: 1, handles[3]: 2, handles[1]: 1, handles[7]: 0, handles[2]: 4})
        for handle in handles:
            handle.free()


def test_a_prefill_of_any_length_takes_few_shapes() -> None:
    stand_in = StandIn()
    geometry = CacheGeometry.uniform(1, 2, 64)
    with open_on(stand_in, geometry=geometry) as cache:
        for count in range(2, 60):
            with cache.allocate() as handle, cache.step({handle: count}) as step:
                step.write(0, *rows_of(cache, 0, count))
                step.attend(0, random(count, 4, 64))
    assert len(stand_in.graphs["attention"]) <= 21


# -- masks -------------------------------------------------------------------------------------------------


def test_layers_share_the_mask_of_a_decode_step_and_of_a_short_prompt() -> None:
    with KvCacheManager(MetalStorage(spec_of())) as cache, cache.allocate() as handle:
        for count in (20, 1):
            with cache.step({handle: count}) as step:
                for layer in range(2):
                    step.write(layer, *rows_of(cache, layer, count))
                    step.attend(layer, random(count, 4, 64))
                (reading,) = step.batch.plan.queries(None, 4).readings
                assert len(reading.pieces[0].masks) == 1
