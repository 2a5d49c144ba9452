"""Rows that say where they belong."""

from __future__ import annotations

import pytest
import torch

from kvcache_core.testing.rows import ROW_BITS, Place, assert_rows, decode, encode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_every_row_says_what_it_is(dtype: torch.dtype) -> None:
    rows = encode([7, 4000], 300, 5, "value", 2, ROW_BITS + 9).to(dtype)
    assert rows.shape == (2, 2, ROW_BITS + 9)
    assert decode(rows[1, 0]) == Place(token=4000, position=301, layer=5, head=0, role="value")
    assert decode(rows[0, 1]) == Place(token=7, position=300, layer=5, head=1, role="value")


def test_no_two_rows_are_alike() -> None:
    rows = [
        tuple(row.tolist())
        for layer in range(3)
        for role in ("key", "value")
        for start in (0, 1)
        for row in encode([1, 2, 3], start, layer, role, 2, ROW_BITS).flatten(0, 1)  # type: ignore[arg-type]
    ]
    assert len(set(rows)) == len(rows)


def test_a_caller_may_change_what_it_was_given() -> None:
    encode([1], 0, 0, "key", 1, ROW_BITS).zero_()
    assert decode(encode([1], 0, 0, "key", 1, ROW_BITS)[0, 0]).token == 1


def test_the_message_names_the_row_that_is_there_and_the_one_that_should_be() -> None:
    expected = encode([1, 2], 0, 0, "key", 2, ROW_BITS)
    actual = expected.clone()
    actual[1, 0] = encode([9], 4, 3, "value", 1, ROW_BITS)[0, 0]
    with pytest.raises(AssertionError) as caught:
        assert_rows(actual, expected, what="keys")
    assert str(caught.value) == (
        "keys: row 1, head 0 is the value of token 9 at position 4, layer 3, head 0; "
        "expected the key of token 2 at position 1, layer 0, head 0"
    )


def test_nan_and_wrong_shapes_are_wrong() -> None:
    expected = encode([1, 2], 0, 0, "key", 2, ROW_BITS)
    actual = expected.clone()
    actual[0, 1, 3] = torch.nan
    with pytest.raises(AssertionError, match="row 0, head 1"):
        assert_rows(actual, expected, error=1e9)
    with pytest.raises(AssertionError, match="shape"):
        assert_rows(expected[:1], expected)


def test_what_is_lost_by_declaration_is_forgiven_and_no_more() -> None:
    expected = encode([1, 2], 0, 0, "key", 2, ROW_BITS)
    assert_rows(expected * 1.005, expected, error=0.01)
    with pytest.raises(AssertionError, match="the key of token 1"):
        assert_rows(expected * 1.02, expected, error=0.01)
