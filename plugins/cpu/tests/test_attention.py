from __future__ import annotations

import pytest
import torch

from kvcache_cpu import attention
from kvcache_cpu.attention import attend
from plugins.cpu.tests.driver import reference_attention

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def rows(length: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows as the cache stores them: head by head."""
    return torch.randn(heads, length, dim).to(dtype).transpose(0, 1)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("threads", [1, 7, 16], indirect=True)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("length", "window"), [(4095, None), (4096, None), (4097, None), (4999, None), (4999, 4500), (4999, 100)]
)
@pytest.mark.usefixtures("threads")
def test_one_token_over_a_long_context_equals_the_reference(
    dtype: torch.dtype, length: int, window: int | None
) -> None:
    query = torch.randn(1, 6, 16).to(dtype)
    key, value = rows(length, 3, 16, dtype), rows(length, 3, 16, dtype)
    got = attend(query, key, value, scale=0.4, window=window)
    want = reference_attention(query, key, value, 0.4, window)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("threads", [16], indirect=True)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("level", [-1e5, 0.0, 1e5])
def test_flashinfer_ai_flashinfer_4051_and_4401_chunks_are_merged_by_their_true_weights(level: float) -> None:
    length = 5000
    key, value = rows(length, 1, 8), rows(length, 1, 8)
    key[..., 0] = level
    key[:1500, 0, 1] += 30.0
    query = torch.ones(1, 2, 8)
    got = attend(query, key, value, scale=1.0, window=None)
    torch.testing.assert_close(got.double(), reference_attention(query, key, value, 1.0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("threads", [16], indirect=True)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("position", [0, 1000, 4999])
def test_a_nan_anywhere_in_the_context_reaches_the_output(position: int) -> None:
    key, value = rows(5000, 3, 8), rows(5000, 3, 8)
    value[position, 1] = float("nan")
    out = attend(torch.randn(1, 6, 8), key, value, scale=1.0, window=None)
    assert torch.isnan(out[0, 2:4]).all()
    assert torch.isfinite(out[0, [0, 1, 4, 5]]).all()


@pytest.mark.parametrize("threads", [16], indirect=True)
@pytest.mark.usefixtures("threads")
def test_what_cannot_be_cut_is_attended_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("was cut")

    monkeypatch.setattr(attention, "_attend_in_chunks", refuse)
    key, wide, narrow = rows(5000, 3, 16), rows(5000, 3, 16), rows(5000, 3, 8)
    for query, value, window in (
        (torch.randn(2, 6, 16), wide, None),
        (torch.randn(1, 6, 16), narrow, None),
        (torch.randn(1, 6, 16).bfloat16(), wide, None),
        (torch.randn(1, 6, 16), wide, 100),
    ):
        got = attend(query, key, value, scale=0.4, window=window)
        want = reference_attention(query, key, value, 0.4, window)
        tolerance = TOLERANCE[query.dtype]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(attention, "_flash_attention", None)
    attend(torch.randn(1, 6, 16), key, wide, scale=0.4, window=None)


@pytest.mark.parametrize(
    ("length", "heads", "threads", "chunks"),
    [
        (8000, 3, 2, 1),
        (8000, 1, 2, 2),
        (8000, 8, 12, 1),
        (8000, 8, 16, 2),
        (8000, 1, 4, 4),
        (4095, 1, 2, 1),
        (8000, 3, 1, 1),
        (100_000, 3, 16, 16),
    ],
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_a_context_is_cut_just_as_far_as_it_takes_to_keep_all_threads_busy(
    length: int, heads: int, chunks: int
) -> None:
    assert attention._chunks(length, heads) == chunks
