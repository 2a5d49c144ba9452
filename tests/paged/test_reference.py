"""The reference kernel over shuffled tables, against the definition in float64 and against contiguous memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheHandle, KvCacheManager
from kvcache_core.attention import attend_dense
from kvcache_core.paged import ReferenceKernel
from tests.paged.hostpool import open_pool
from tests.paged.oracle import attend_by_definition

GENERATOR = torch.Generator()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def shuffled_cache(window: int | None = None, dtype: str = "float32", value_dim: int = 8, **changes: Any) -> Any:
    """A cache whose free blocks come in no order."""
    GENERATOR.manual_seed(0)
    geometry = CacheGeometry.uniform(1, 2, 8, value_head_dim=value_dim, window=window)
    cache = open_pool(geometry=geometry, num_blocks=40, max_sequence_length=160, dtype=dtype, **changes)
    allocator = cache.block_allocator
    blocks = allocator.allocate_blocks(40)
    for start in (3, 0, 4, 1, 2):
        allocator.free_blocks(blocks[start::5])
    return cache


class Oracle:
    """A handle and, beside it, its rows in plain tensors."""

    def __init__(self, cache: KvCacheManager) -> None:
        self.handle = cache.allocate()
        spec = cache.own_spec(0)
        self.key = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=cache.dtype)
        self.value = torch.empty(0, spec.num_kv_heads, spec.value_head_dim, dtype=cache.dtype)

    def new(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (randn(count, *rows.shape[1:], dtype=rows.dtype) for rows in (self.key, self.value))
        self.key, self.value = torch.cat([self.key, key]), torch.cat([self.value, value])
        return key, value


def step_over(cache: KvCacheManager, new: dict[Oracle, int], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step of random tokens; return its queries and its attention."""
    rows = [oracle.new(count) for oracle, count in new.items()]
    query = randn(sum(new.values()), heads, 8, dtype=cache.dtype)
    counts: dict[KvCacheHandle, int] = {oracle.handle: count for oracle, count in new.items()}
    with cache.step(counts) as step:
        step.write(0, torch.cat([key for key, _ in rows]), torch.cat([value for _, value in rows]))
        return query, step.attend(0, query)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_golang_design_accel_10_every_query_length_reads_through_the_table(
    heads: int, window: int | None, value_dim: int
) -> None:
    cache = shuffled_cache(window, value_dim=value_dim)
    oracle = Oracle(cache)
    for count in (1, 2, 3, 4, 5, 17, 1):
        query, got = step_over(cache, {oracle: count}, heads)
        wanted = attend_by_definition(query, oracle.key, oracle.value, 8**-0.5, window)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        dense = attend_dense(query, oracle.key, oracle.value, scale=8**-0.5, window=window)
        assert torch.equal(got, dense)  # only the addresses differ
    blocks = oracle.handle.block_table.physical_blocks
    assert any(after != before + 1 for before, after in pairwise(blocks))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_mixed_batches_of_prefill_decode_and_nothing(dtype: str) -> None:
    cache = shuffled_cache(dtype=dtype)
    oracles = [Oracle(cache) for _ in range(4)]
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    for counts in ((9, 0, 4, 1), (1, 5, 1, 0), (1, 1, 1, 1), (0, 0, 0, 7)):
        new = dict(zip(oracles, counts, strict=True))
        query, got = step_over(cache, new, 4)
        row = 0
        for oracle, count in new.items():
            part = slice(row, row + count)
            wanted = attend_by_definition(query[part], oracle.key, oracle.value, 8**-0.5)
            torch.testing.assert_close(got[part].double(), wanted, rtol=tolerance, atol=tolerance)
            row += count


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [5] * 4, [7, 13], [4, 4, 4, 4, 4]])
def test_trymirai_lalamo_200_the_chunking_of_a_window_layer_changes_nothing(chunks: list[int]) -> None:
    whole = Oracle(shuffled_cache(6))
    query, wanted = step_over(whole.handle.manager, {whole: 20}, 4)
    cache = shuffled_cache(6)
    handle, out = cache.allocate(), []
    start = 0
    for count in chunks:
        rows = slice(start, start + count)
        with cache.step({handle: count}) as step:
            step.write(0, whole.key[rows], whole.value[rows])
            out.append(step.attend(0, query[rows]))
        start += count
    torch.testing.assert_close(torch.cat(out), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("history", [0, 1, 63, 64, 65, 128])
def test_tenstorrent_tt_metal_48899_later_rows_of_a_step_do_not_touch_earlier_ones(history: int) -> None:
    outputs = []
    for later in (1.0, 1e6, float("nan")):
        cache = shuffled_cache()
        handle = cache.allocate()
        GENERATOR.manual_seed(1)
        key, value, query = (randn(history + 5, 2, 8) for _ in range(3))
        key[history + 1 :] *= later
        value[history + 1 :] *= later
        if history:
            handle.append([(key[:history], value[:history])])
        with cache.step({handle: 5}) as step:
            step.write(0, key[history:], value[history:])
            outputs.append(step.attend(0, query[history:])[0])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-5, atol=1e-6)


def test_attention_after_the_commit_still_reads_the_step() -> None:
    cache = shuffled_cache()
    oracle = Oracle(cache)
    key, value = oracle.new(6)
    with cache.step({oracle.handle: 6}) as step:
        step.write(0, key, value)
    query = randn(6, 2, 8)
    wanted = attend_by_definition(query, key, value, 8**-0.5)
    torch.testing.assert_close(step.attend(0, query).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_step_of_no_tokens_attends_to_nothing() -> None:
    cache = shuffled_cache(value_dim=4)
    handle = cache.allocate()
    with cache.step({handle: 0}) as step:
        assert step.attend(0, torch.empty(0, 6, 8)).shape == (0, 6, 4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(9, 5, 8), (30, 1, 1), (6,)])
def test_decoding_sequences_together_equals_one_by_one(lengths: tuple[int, ...], window: int | None) -> None:
    cache = shuffled_cache(window)
    cache.storage.kernel = ReferenceKernel(cache.storage.pool, cache.storage.upload, decodes_together=True)
    oracles = [Oracle(cache) for _ in lengths]
    step_over(cache, dict(zip(oracles, lengths, strict=True)), 4)
    query, got = step_over(cache, dict.fromkeys(oracles, 1), 4)
    for row, oracle in enumerate(oracles):
        wanted = attend_by_definition(query[row : row + 1], oracle.key, oracle.value, 8**-0.5, window)
        torch.testing.assert_close(got[row : row + 1].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("counts", "lengths", "together"),
    [
        ((1, 1), (9, 5), True),
        ((1, 1), (40, 1), True),
        ((1,), (9,), False),
        ((1, 2), (9, 5), False),
        ((1, 0), (9, 5), False),
        ((1, 1, 1), (60, 1, 1), False),
    ],
)
def test_sequences_decode_together_where_padding_them_costs_little(
    counts: tuple[int, ...], lengths: tuple[int, ...], together: bool
) -> None:
    cache = shuffled_cache()
    cache.storage.kernel = ReferenceKernel(cache.storage.pool, cache.storage.upload, decodes_together=True)
    oracles = [Oracle(cache) for _ in lengths]
    step_over(cache, dict(zip(oracles, lengths, strict=True)), 4)
    with cache.step({oracle.handle: count for oracle, count in zip(oracles, counts, strict=True)}) as step:
        assert (step.batch.plan.tables is not None) is together
        step.abort()
