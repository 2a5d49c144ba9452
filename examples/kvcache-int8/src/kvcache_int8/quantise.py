"""Rows of floats as rows of 8-bit codes, with one scale for each.

The scale is kept in bfloat16, which has the range of float32. It is rounded before the codes are made from it, so
its rounding costs nothing but the last half step: at worst the largest code is 127 * (1 + 2**-8), which still
rounds to 127. An element comes back within half a scale of what it was.
"""

from __future__ import annotations

import torch

__all__ = ["SCALE_DTYPE", "dequantise", "quantise"]

SCALE_DTYPE = torch.bfloat16

_LARGEST_CODE = 127


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of rows.

    A row that holds NaN or infinity comes back as NaN, all of it. A row of which no element is larger than about
    1e-38 may come back as zeros.

    Args:
        rows: `[..., dim]`, floating.

    Returns:
        Codes, int8 `[..., dim]`, and scales, bfloat16 `[..., 1]`.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = rows.abs().amax(dim=-1, keepdim=True)
    scales = (largest / _LARGEST_CODE).to(SCALE_DTYPE)
    steps = torch.where(scales == 0, 1, scales).to(rows.dtype)
    codes = (rows / steps).round_().nan_to_num_(nan=0.0)  # 0 times a scale that is not finite is NaN
    return codes.to(torch.int8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows that codes and scales stand for, in `dtype`; none becomes infinite by that."""
    compute = torch.promote_types(dtype, torch.float32)
    rows = codes.to(compute).mul_(scales.to(compute))
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)
