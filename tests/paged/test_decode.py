"""A decode step at fixed addresses does what a step does, for any number of sequences up to its room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheManager, ShapeError, StepError, UnsupportedError
from kvcache_core.paged import StaticDecode
from tests.caches import assert_holds, filled, rows
from tests.paged.hostpool import LazyHostPool, open_pool

GEOMETRY = CacheGeometry.uniform(2, 2, 8, window=6)


@pytest.fixture
def cache() -> Any:
    with open_pool(geometry=GEOMETRY) as made:
        yield made
        assert made.audit() == ()


@pytest.fixture
def static(cache: KvCacheManager) -> StaticDecode:
    return StaticDecode(cache.storage, max_sequences=3, max_blocks=4)


def addresses(static: StaticDecode) -> list[int]:
    tables = static.tables
    return [
        tensor.data_ptr()
        for tensor in (
            static.positions,
            static.slot_mapping,
            tables.block_tables,
            tables.seq_lens,
            tables.cu_seqlens_q,
            tables.cu_seqlens_k,
        )
    ]


def padded(tensor: torch.Tensor, length: int = 3) -> torch.Tensor:
    rest = torch.full((length - len(tensor), *tensor.shape[1:]), 55.0)
    return torch.cat([tensor, rest])


def test_it_stores_and_attends_as_a_step_does_for_any_number_of_sequences(
    cache: KvCacheManager, static: StaticDecode
) -> None:
    handles = [filled(cache, 9), filled(cache, 4, "b"), filled(cache, 2, "c")]
    fixed = addresses(static)
    for count in (3, 1, 2):
        chosen = dict(zip(handles[:count], "abc", strict=False))
        query = torch.randn(count, 4, 8)
        new = [
            [torch.cat(part) for part in zip(*(rows(cache, layer, h.num_tokens, h.num_tokens + 1, name)
                                               for h, name in chosen.items()), strict=True)]
            for layer in range(2)
        ]  # fmt: skip
        with cache.step(dict.fromkeys(chosen, 1)) as step:
            static.load(step)
            outs = []
            for layer, (key, value) in enumerate(new):
                static.write(layer, padded(key), padded(value))
                outs.append(static.attend(layer, padded(query)))
            step.mark_written()
            for layer, out in enumerate(outs):
                torch.testing.assert_close(out[:count], step.attend(layer, query), rtol=1e-5, atol=1e-5)
                assert torch.equal(out[count:], torch.zeros_like(out[count:]))
    assert addresses(static) == fixed
    assert_holds(handles[0], a=12)
    assert_holds(handles[1], b=6)
    assert_holds(handles[2], c=3)


def test_trtllm_15546_a_second_load_leaves_nothing_of_the_first(cache: KvCacheManager, static: StaticDecode) -> None:
    long, short = filled(cache, 12), filled(cache, 1, "b")
    with cache.step({long: 1, short: 1}) as step:
        static.load(step)
        step.abort()
    with cache.step({short: 1}) as step:
        static.load(step)
        block = short.block_table.physical_blocks[0]
        step.abort()
    assert static.tables.block_tables.tolist() == [[block, 0, 0, 0], [0] * 4, [0] * 4]
    assert static.tables.seq_lens.tolist() == [2, 0, 0]
    assert static.tables.cu_seqlens_k.tolist() == [0, 2, 2, 2]
    assert static.slot_mapping.tolist() == [block * 4 + 1] + [cache.storage.pool.trash_slot] * 2
    assert static.positions.tolist() == [1, 0, 0]


def test_steps_it_has_no_room_for_are_refused_and_change_nothing(cache: KvCacheManager, static: StaticDecode) -> None:
    handles = [filled(cache, 2, name) for name in "abcd"]
    long = filled(cache, 16, "e")
    before = [tensor.clone() for tensor in (static.slot_mapping, static.tables.block_tables, static.tables.seq_lens)]
    for new in (dict.fromkeys(handles, 1), {handles[0]: 2}, {handles[0]: 0}, {long: 1}):
        with cache.step(new) as step:
            with pytest.raises(ShapeError):
                static.load(step)
            step.abort()
    after = (static.slot_mapping, static.tables.block_tables, static.tables.seq_lens)
    assert all(map(torch.equal, before, after))


def test_an_aborted_step_cannot_be_loaded(cache: KvCacheManager, static: StaticDecode) -> None:
    handle = filled(cache, 2)
    step = cache.begin({handle: 1})
    step.abort()
    with pytest.raises(StepError):
        static.load(step)


@pytest.mark.parametrize(("sequences", "blocks"), [(0, 4), (3, 0)])
def test_it_needs_room(cache: KvCacheManager, sequences: int, blocks: int) -> None:
    with pytest.raises(ShapeError):
        StaticDecode(cache.storage, sequences, blocks)


def test_it_needs_a_backend_whose_steps_can_be_captured() -> None:
    with pytest.raises(UnsupportedError, match="tables of a decode step") as caught:
        StaticDecode(open_pool(LazyHostPool).storage, 3, 4)
    assert caught.value.capability == "graph_capture"


def test_a_layer_that_caches_nothing_is_refused(cache: KvCacheManager, static: StaticDecode) -> None:
    with pytest.raises(ShapeError, match="layer must be"):
        static.attend(7, torch.zeros(3, 4, 8))
