"""The reference that judges every backend, against numbers worked out by hand and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core.testing import reference_attention


def test_weights_are_those_of_a_softmax() -> None:
    key = torch.tensor([[[0.0]], [[math.log(3.0)]]])
    value = torch.tensor([[[4.0]], [[8.0]]])
    out = reference_attention(torch.ones(2, 1, 1), key, value, scale=1.0)
    assert out.dtype is torch.float64
    assert out[:, 0, 0].tolist() == pytest.approx([4.0, 7.0])  # the first query sees the first key only
    out = reference_attention(torch.ones(2, 1, 1), key, value, scale=0.0)
    assert out[:, 0, 0].tolist() == pytest.approx([4.0, 6.0])


def test_a_window_holds_the_token_itself_and_those_before_it() -> None:
    value = torch.arange(5.0)[:, None, None]
    out = reference_attention(torch.zeros(3, 1, 1), torch.zeros(5, 1, 1), value, scale=1.0, window=2)
    assert out[:, 0, 0].tolist() == pytest.approx([1.5, 2.5, 3.5])


def test_it_agrees_with_torch_where_torch_is_unambiguous() -> None:
    query, key, value = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    expected = scaled_dot_product_attention(
        *(rows.transpose(0, 1)[None] for rows in (query, key, value)), is_causal=True, scale=0.3, enable_gqa=True
    )
    out = reference_attention(query, key, value, scale=0.3)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_what_a_query_does_not_see_does_not_reach_it() -> None:
    query, key, value = (torch.randn(4, 1, 3) for _ in range(3))
    key[3], value[2] = math.inf, math.nan
    out = reference_attention(query, key, value, scale=1.0)
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()
    assert reference_attention(query[3:], key, value, scale=1.0, window=2).isnan().all()
