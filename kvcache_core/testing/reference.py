"""Attention as one would write it on a blackboard, in float64: what every backend's `attend` is judged by."""

from __future__ import annotations

import torch

__all__ = ["reference_attention"]


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention with an explicit mask, aligned to the bottom right: the last query sees every key.

    Args:
        query: `[T, num_heads, head_dim]`; query head `h` reads kv head `h // (num_heads // num_kv_heads)`.
        key: `[S, num_kv_heads, head_dim]`, the rows of the `T` queries last.
        value: `[S, num_kv_heads, value_head_dim]`.
        scale: Factor on the scores.
        window: Tokens that a query sees, itself included; all before it when None.

    Returns:
        `[T, num_heads, value_head_dim]`, float64. A key or value that a query does not see has no influence on its
        row, whatever it holds; one that it sees and that is NaN makes the row NaN.
    """
    query, key, value = (tensor.detach().cpu().double() for tensor in (query, key, value))
    num_new, num_heads, _ = query.shape
    length, num_kv_heads, value_dim = value.shape
    group = num_heads // num_kv_heads
    positions = torch.arange(length - num_new, length)[:, None]
    keys = torch.arange(length)[None, :]
    mask = keys <= positions
    if window is not None:
        mask &= keys > positions - window
    out = torch.empty(num_new, num_heads, value_dim, dtype=torch.float64)
    for row in range(num_new):
        seen = mask[row].nonzero()[:, 0]
        for head in range(num_heads):
            scores = key[seen, head // group] @ query[row, head] * scale
            out[row, head] = torch.softmax(scores, dim=0) @ value[seen, head // group]
    return out
