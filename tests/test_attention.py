"""Core's dense attention against exact attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvcache_core import attention
from kvcache_core.attention import attend_dense
from kvcache_core.errors import ShapeError
from kvcache_core.testing import reference_attention

ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> None:
    out = attend_dense(query, key, value, **options)
    assert out.dtype is query.dtype
    expected = reference_attention(query, key, value, **options)
    largest = float(value[torch.isfinite(value)].abs().max())
    error = max(ERRORS[query.dtype], ERRORS[value.dtype])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=error * largest, equal_nan=True)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 80])
def test_it_is_causal_from_the_bottom_right(dtype: torch.dtype, window: int | None, length: int) -> None:
    for new in {1, min(2, length), min(5, length), min(17, length), length}:
        query, key = numbers(new, 6, 33, dtype=dtype), numbers(length, 2, 33, dtype=dtype)
        assert_exact(query, key, numbers(length, 2, 40, dtype=dtype), scale=33**-0.5, window=window)


@pytest.mark.parametrize("window", [None, 3])
def test_a_long_prefill_goes_in_chunks_and_a_decode_needs_no_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    make_mask = attention._mask

    def counted(num_new: int, length: int, *rest: Any) -> torch.Tensor:
        sizes.append(num_new * length)
        return make_mask(num_new, length, *rest)

    monkeypatch.setattr(attention, "_mask", counted)
    monkeypatch.setattr(attention, "_MAX_MASK_ELEMENTS", 200)
    key, value = numbers(70, 2, 8), numbers(70, 2, 8)
    for new in (60, 20, 70):
        assert_exact(numbers(new, 4, 8), key, value, scale=1.0, window=window)
    assert max(sizes) <= 200
    sizes.clear()
    assert_exact(numbers(1, 4, 8), key, value, scale=1.0, window=window)
    assert sizes == []


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("length", [2, 5, 15, 16, 17, 40])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_pytorch_141128_nan_is_neither_hidden_nor_spread(dtype: torch.dtype, length: int, which: str) -> None:
    for new in (1, 2, length):
        for window in (None, 2):
            tensors = {
                "query": numbers(new, 2, 8, dtype=dtype),
                "key": numbers(length, 1, 8, dtype=dtype),
                "value": numbers(length, 1, 8, dtype=dtype),
            }
            tensors[which][-(new // 2) - 1] = math.nan
            assert_exact(**tensors, scale=1.0, window=window)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, "largest"])
def test_a_later_key_or_value_never_reaches_a_query_before_it(dtype: torch.dtype, poison: Any) -> None:
    for length, new in ((5, 3), (20, 4), (20, 20), (40, 20)):
        for window in (None, 6):
            query, key = numbers(new, 2, 8, dtype=dtype), numbers(length, 1, 8, dtype=dtype)
            value = numbers(length, 1, 8, dtype=dtype)
            expected = reference_attention(query, key, value, scale=1.0, window=window)[:-1]
            key[-1] = value[-1] = torch.finfo(dtype).max if poison == "largest" else poison
            out = attend_dense(query, key, value, scale=1.0, window=window)[:-1]
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * ERRORS[dtype])


def test_no_queries_give_an_empty_result_and_too_many_are_refused() -> None:
    assert attend_dense(numbers(0, 4, 8), numbers(3, 2, 8), numbers(3, 2, 6), scale=1.0).shape == (0, 4, 6)
    assert attend_dense(numbers(0, 4, 8), numbers(0, 2, 8), numbers(0, 2, 6), scale=1.0).shape == (0, 4, 6)
    with pytest.raises(ShapeError, match="4 queries need at least 4 keys"):
        attend_dense(numbers(4, 2, 8), numbers(3, 2, 8), numbers(3, 2, 8), scale=1.0)


def test_a_float32_query_reads_a_cache_of_lower_precision_in_float32() -> None:
    query, key = numbers(3, 2, 8), numbers(20, 1, 8, dtype=torch.bfloat16)
    value = numbers(20, 1, 8, dtype=torch.bfloat16)
    out = attend_dense(query, key, value, scale=1.0)
    torch.testing.assert_close(out.double(), reference_attention(query, key, value, scale=1.0), rtol=0, atol=1e-5)
