"""Rows of floats as codes and scales."""

from __future__ import annotations

import math

import pytest
import torch
from kvcache_core.plugin import CacheGeometry, LayerGroup

from kvcache_int8.pool import bytes_per_token
from kvcache_int8.quantise import dequantise, quantise


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 3e4, 1e38])
def test_an_element_comes_back_within_half_a_scale(magnitude: float) -> None:
    rows = torch.randn(1000, 3, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * magnitude
    codes, scales = quantise(rows)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.bfloat16, (1000, 3, 1))
    error = (dequantise(codes, scales, torch.float32) - rows).abs()
    largest = rows.abs().amax(dim=-1, keepdim=True)
    assert bool((error <= scales.float() / 2 * (1 + 1e-6)).all())
    assert float((error / largest).max()) < 0.00396


def test_every_scale_leaves_room_for_its_largest_element() -> None:
    largest = torch.arange(1, 4096, dtype=torch.float32)[:, None]  # scales that round up, down, and not at all
    codes, scales = quantise(torch.cat([largest, -largest], dim=1))
    assert int(codes.abs().max()) == 127
    assert bool(((scales.float() * codes - torch.cat([largest, -largest], dim=1)).abs() <= scales.float() / 2).all())


def test_zeros_stay_zeros_and_codes_use_both_signs() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, -1.0], [-0.5, 1.0]])
    codes, scales = quantise(rows)
    assert codes.tolist() == [[0, 0], [127, -127], [-64, 127]]
    assert dequantise(codes, scales, torch.float32)[0].tolist() == [0, 0]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_number_that_is_none_is_nan_and_its_neighbours_are_not(odd: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = odd
    back = dequantise(*quantise(rows), torch.float32)
    assert back.isnan().all(dim=1).tolist() == [False, True, False]
    assert back.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype: torch.dtype) -> None:
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    back = dequantise(*quantise(torch.tensor([[most, -most, most / 2]], dtype=dtype)), dtype)
    assert bool(torch.isfinite(back).all())
    assert float(back[0, 0]) == pytest.approx(most, rel=0.008)


def test_a_token_takes_a_byte_for_each_element_and_two_for_each_scale() -> None:
    groups = (
        LayerGroup(layers=(0, 2), num_kv_heads=3, head_dim=64),
        LayerGroup(layers=(1,), num_kv_heads=2, head_dim=16, value_head_dim=8),
    )
    geometry = CacheGeometry(num_layers=3, groups=groups)
    assert bytes_per_token(geometry) == 2 * 3 * (64 + 64 + 4) + 2 * (16 + 8 + 4)
