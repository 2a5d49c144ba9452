"""The index tensors of a ragged batch: values, dtypes, pads, and the empty cases."""

from __future__ import annotations

import pytest
import torch

from kvcache_core.batch import Batch, Segment

CPU = torch.device("cpu")


def batch_of(*segments: tuple[list[int], int, int]) -> Batch:
    """Segments of (blocks, start, stop), packed in order, in blocks of 4 tokens."""
    made, row = [], 0
    for blocks, start, stop in segments:
        made.append(Segment(None, blocks, start, stop, row))
        row += stop - start
    return Batch(made, 4, CPU)


@pytest.fixture
def ragged() -> Batch:
    """Prefill of 6, decode of 1 across a block boundary, nothing new, and a chunk that starts mid-block."""
    return batch_of(([5, 9], 0, 6), ([2, 7], 4, 5), ([3, 11], 7, 7), ([8, 1, 4], 6, 9))


def test_rows_are_packed_in_order(ragged: Batch) -> None:
    assert ragged.num_tokens == 10
    assert [segment.row for segment in ragged.segments] == [0, 6, 7, 7]
    assert [segment.num_new_tokens for segment in ragged.segments] == [6, 1, 0, 3]


def test_positions_are_absolute(ragged: Batch) -> None:
    assert ragged.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 6, 7, 8]


def test_slots_go_through_the_block_table(ragged: Batch) -> None:
    assert ragged.slot_mapping.tolist() == [20, 21, 22, 23, 36, 37, 28, 6, 7, 16]


def test_block_tables_name_only_blocks_that_hold_tokens_and_are_padded_with_the_null_block(ragged: Batch) -> None:
    assert ragged.block_tables.tolist() == [[5, 9, 0], [2, 7, 0], [3, 11, 0], [8, 1, 4]]
    reserved_ahead = batch_of(([5, 9, 10, 11], 0, 5))
    assert reserved_ahead.block_tables.tolist() == [[5, 9]]


def test_lengths_count_the_new_tokens(ragged: Batch) -> None:
    assert ragged.seq_lens.tolist() == [6, 5, 7, 9]
    assert ragged.cu_seqlens_q.tolist() == [0, 6, 7, 7, 10]


def test_the_last_row_of_a_sequence_without_new_tokens_is_minus_one(ragged: Batch) -> None:
    assert ragged.last_token_index.tolist() == [5, 6, -1, 9]


def test_dtypes_are_those_that_paged_kernels_read(ragged: Batch) -> None:
    for name in ("positions", "slot_mapping", "last_token_index"):
        assert getattr(ragged, name).dtype is torch.int64
    for name in ("block_tables", "seq_lens", "cu_seqlens_q"):
        assert getattr(ragged, name).dtype is torch.int32


@pytest.mark.parametrize(
    ("batch", "sequences", "width"),
    [(batch_of(), 0, 0), (batch_of(([], 0, 0)), 1, 0), (batch_of(([], 0, 0), ([3], 2, 2)), 2, 1)],
)
def test_a_batch_without_new_tokens_has_empty_tensors_of_the_right_rank(
    batch: Batch, sequences: int, width: int
) -> None:
    assert batch.num_tokens == 0
    assert batch.positions.shape == batch.slot_mapping.shape == (0,)
    assert batch.block_tables.shape == (sequences, width)
    assert batch.seq_lens.shape == batch.last_token_index.shape == (sequences,)
    assert batch.cu_seqlens_q.tolist() == [0] * (sequences + 1)
    assert batch.positions.dtype is torch.int64
    assert batch.block_tables.dtype is torch.int32


def test_slots_beyond_32_bits_are_exact() -> None:
    batch = batch_of(([2**31 - 1], 0, 4))
    assert batch.slot_mapping.tolist() == [4 * (2**31 - 1) + row for row in range(4)]


def test_index_tensors_are_built_once(ragged: Batch) -> None:
    for name in ("positions", "slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q", "last_token_index"):
        assert getattr(ragged, name) is getattr(ragged, name)
