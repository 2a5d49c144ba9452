"""Attention by the definition: float64, an explicit list of the keys that each query sees."""

from __future__ import annotations

import torch


def attend_by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """`query` `[T, Hq, D]` are the last T of the S positions in `key` and `value` `[S, Hk, D]`."""
    new, heads, _ = query.shape
    length, kv_heads, dim = value.shape
    out = torch.zeros(new, heads, dim, dtype=torch.float64)
    for row in range(new):
        stop = length - new + row + 1
        start = 0 if window is None else max(0, stop - window)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = key[start:stop, kv_head].double() @ query[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ value[start:stop, kv_head].double()
    return out
