"""Reading sequences out of shuffled blocks, and decode attention for many at once."""

from __future__ import annotations

import pytest
import torch

from kvcache_core.paged import attend_decode, gather_rows
from kvcache_core.paged.gathering import SequenceRows
from kvcache_core.plugin import Segment
from tests.paged.oracle import attend_by_definition

NAN = float("nan")
SIZE = 4


def blocks_of(seed: int, count: int = 12, heads: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randn(count, SIZE, heads, dim, generator=torch.Generator().manual_seed(seed))


def rows_of(blocks: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    rows = [blocks[table[position // SIZE], position % SIZE] for position in range(length)]
    return torch.stack(rows) if rows else blocks.new_empty(0, *blocks.shape[2:])


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11, 12])
def test_gathered_rows_are_exact_and_alone_in_their_memory(length: int) -> None:
    blocks, table = blocks_of(0), [7, 2, 9]
    got = gather_rows(blocks, torch.tensor(table[: -(-length // SIZE)], dtype=torch.int64), length)
    assert torch.equal(got, rows_of(blocks, table, length))
    assert got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize(("table", "shared"), [([3, 4, 5], True), ([3, 5, 4], False), ([9], True), ([2, 4], False)])
def test_neighbouring_blocks_are_viewed_and_others_copied(table: list[int], shared: bool) -> None:
    blocks = blocks_of(0)
    length = len(table) * SIZE - 1
    part = SequenceRows(Segment(None, table, length - 1, length, row=3), SIZE, lambda indices: indices)
    rows = part.of(blocks)
    assert torch.equal(rows, rows_of(blocks, table, length))
    assert (rows.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()) is shared
    assert part.new_rows == slice(3, 4)


TABLES = [[5, 1, 8], [3], [], [11, 2, 7], [6, 4]]
LENGTHS = [10, 3, 0, 12, 5]


def padded(tables: list[list[int]]) -> torch.Tensor:
    width = max(map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e4])
def test_decode_attention_sees_its_own_tokens_and_nothing_else(window: int | None, group: int, poison: float) -> None:
    clean_key, clean_value = blocks_of(1), blocks_of(2)
    key, value = torch.full_like(clean_key, poison), torch.full_like(clean_value, poison)
    key[0] = value[0] = 0
    for table, length in zip(TABLES, LENGTHS, strict=True):
        for position in range(length):
            at = (table[position // SIZE], position % SIZE)
            key[at], value[at] = clean_key[at], clean_value[at]
    query = torch.randn(5, 2 * group, 8, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    got = attend_decode(query, key, value, padded(TABLES), lengths, scale=0.3, window=window)
    for row, (table, length) in enumerate(zip(TABLES, LENGTHS, strict=True)):
        if length == 0:
            assert torch.equal(got[row], torch.zeros_like(got[row]))
            continue
        keys, values = rows_of(clean_key, table, length), rows_of(clean_value, table, length)
        wanted = attend_by_definition(query[row : row + 1], keys, values, 0.3, window)
        torch.testing.assert_close(got[row : row + 1].double(), wanted, rtol=1e-5, atol=1e-5)


def test_decode_attention_leaves_the_blocks_as_they_were() -> None:
    key, value = blocks_of(1), blocks_of(2)
    before = key.clone(), value.clone()
    query = torch.randn(5, 2, 8)
    attend_decode(query, key, value, padded(TABLES), torch.tensor(LENGTHS, dtype=torch.int32), scale=1.0)
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


def test_a_nan_that_a_query_sees_reaches_it_and_only_it() -> None:
    key, value = blocks_of(1), blocks_of(2)
    value[1, 0] = NAN  # position 4 of the first sequence
    query = torch.randn(5, 2, 8)
    got = attend_decode(query, key, value, padded(TABLES), torch.tensor(LENGTHS, dtype=torch.int32), scale=1.0)
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()


def test_flashinfer_4401_very_negative_scores_keep_their_weights() -> None:
    key, value = blocks_of(1), blocks_of(2)
    query = torch.full((1, 2, 8), -1e5)
    key.copy_(1 + 1e-6 * key)
    table = [5, 1, 8]
    got = attend_decode(query, key, value, padded([table]), torch.tensor([10], dtype=torch.int32), scale=1.0)
    wanted = attend_by_definition(query, rows_of(key, table, 10), rows_of(value, table, 10), 1.0)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), wanted, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_sequences_and_no_blocks_give_zeros(shape: tuple[int, int]) -> None:
    sequences, width = shape
    table = torch.zeros(sequences, width, dtype=torch.int32)
    lengths = torch.zeros(sequences, dtype=torch.int32)
    got = attend_decode(torch.randn(sequences, 2, 8), blocks_of(1), blocks_of(2), table, lengths, scale=1.0)
    assert torch.equal(got, torch.zeros(sequences, 2, 8))


def test_the_result_has_the_dtype_of_the_query_and_the_precision_of_both() -> None:
    key, value = blocks_of(1).bfloat16(), blocks_of(2).bfloat16()
    table, query = [5, 1, 8], torch.randn(1, 2, 8)
    got = attend_decode(query, key, value, padded([table]), torch.tensor([10], dtype=torch.int32), scale=0.3)
    assert got.dtype is torch.float32
    wanted = attend_by_definition(query, rows_of(key, table, 10), rows_of(value, table, 10), 0.3)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
