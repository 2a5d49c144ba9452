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


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 20), (4, 20), (16, 20), (17, 20), (20, 20)])
def test_every_grouping_of_heads_is_right_on_every_path(heads: tuple[int, int], new: int, length: int) -> None:
    for window in (None, 3, 19, 20, 21):
        query, key = numbers(new, heads[0], 8), numbers(length, heads[1], 8)
        assert_exact(query, key, numbers(length, heads[1], 6), scale=0.3, window=window)


@pytest.mark.parametrize(("new", "length"), [(1, 20), (4, 9), (4, 20), (20, 40), (40, 40)])
def test_any_strides_are_right_and_inputs_are_left_as_they_were(new: int, length: int) -> None:
    query = numbers(6, new, 8).transpose(0, 1)
    key = numbers(2 * length, 2, 8)[::2]
    value = numbers(length, 2, 12)[..., 3:9]
    copies = [tensor.clone() for tensor in (query, key, value)]
    assert_exact(query, key, value, scale=0.3)
    assert all(torch.equal(one, two) for one, two in zip((query, key, value), copies, strict=True))


@pytest.mark.parametrize("length", [9, 20])
def test_pytorch_144858_one_query_sees_the_whole_cache(length: int) -> None:
    value = numbers(length, 2, 6)
    out = attend_dense(numbers(1, 6, 8), numbers(length, 2, 8), value, scale=0.0)
    torch.testing.assert_close(out[0, 0], value[:, 0].mean(0))


@pytest.mark.parametrize("length", [9, 20])
def test_pytorch_103963_even_with_the_smallest_window_a_query_sees_itself(length: int) -> None:
    value = numbers(length, 2, 6)
    out = attend_dense(numbers(length, 6, 8), numbers(length, 2, 8), value, scale=0.3, window=1)
    torch.testing.assert_close(out, value.repeat_interleave(3, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("new", "length"), [(1, 9), (5, 9), (1, 40), (5, 40), (20, 40), (40, 40)])
def test_flashinfer_4401_very_negative_scores_are_scores(dtype: torch.dtype, new: int, length: int) -> None:
    query, key = torch.full((new, 6, 8), 100.0), torch.full((length, 2, 8), -100.0)
    key[:, :, 0] += torch.arange(length)[:, None] / 8
    assert_exact(query.to(dtype), key.to(dtype), numbers(length, 2, 6, dtype=dtype), scale=1.0)
    if dtype is torch.float32:
        value = numbers(length, 2, 6)
        even = attend_dense(query * 1e6, torch.full_like(key, -1e8), value, scale=1e4)
        torch.testing.assert_close(even[-1, 0], value[:, 0].mean(0))


@pytest.mark.parametrize(("new", "length"), [(5, 9), (5, 40), (20, 40), (40, 40)])
def test_a_query_that_is_nan_or_overflows_spoils_no_other(new: int, length: int) -> None:
    query, key, value = numbers(new, 4, 8), numbers(length, 2, 8), numbers(length, 2, 6)
    clean = attend_dense(query, key, value, scale=0.3)
    query[1], query[3, 2] = math.nan, 3e38
    out = attend_dense(query, key, value, scale=0.3)
    kept = [row for row in range(new) if row not in {1, 3}]
    torch.testing.assert_close(out[kept], clean[kept])
    torch.testing.assert_close(out[3, [0, 1, 3]], clean[3, [0, 1, 3]])
    assert out[1].isnan().all()


@pytest.mark.parametrize(("new", "length"), [(1, 9), (3, 9), (1, 20), (3, 20), (17, 20), (17, 17)])
def test_gradients_flow_into_the_query(new: int, length: int) -> None:
    key, value = numbers(length, 1, 2, dtype=torch.float64), numbers(length, 1, 2, dtype=torch.float64)
    query = numbers(new, 2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda query: attend_dense(query, key, value, scale=0.3), query)
