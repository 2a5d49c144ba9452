"""Causal attention of new tokens over one sequence's dense keys and values, in plain torch.

The building block of every storage whose rows of a layer can be seen as one strided tensor, and the reference
for those that bring kernels of their own.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core.errors import ShapeError

__all__ = ["attend_dense"]

#: Largest number of (query, key) pairs for which a mask is built at once. Longer prefills go in query chunks, so
#: that peak memory stays bounded and no kernel meets 32-bit offsets into a mask.
_MAX_MASK_ELEMENTS = 1 << 24

#: With fewer keys than this, torch's CPU kernel returns zeros for a query whose scores are all NaN, which would
#: hide a fault elsewhere (pytorch#141128); they are attended to in plain steps instead.
_FEWEST_FUSED_KEYS = 16

#: Up to so many new tokens the query group is folded into the query length, so that K and V are read once for
#: all query heads of a kv head. Beyond, attention is bound by arithmetic and the folded mask would only grow.
_MAX_FOLDED_TOKENS = 16


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend causally with bottom-right alignment: the last query sees every key.

    Query `i` of `T` has position `S - T + i` and sees keys at positions `p` with
    `position - window < p <= position`. A key that a query does not see has no influence on it, even
    when it holds NaN or infinity.

    Args:
        query: `[T, num_heads, head_dim]`, floating.
        key: `[S, num_kv_heads, head_dim]`, any strides, the new tokens included.
        value: `[S, num_kv_heads, value_head_dim]` likewise.
        scale: Factor on the scores.
        window: Tokens a query sees, itself included, or None for all.

    Returns:
        `[T, num_heads, value_head_dim]` in the dtype of `query`.

    Raises:
        ShapeError: There are more queries than keys.
    """
    num_new, num_heads, _ = query.shape
    length, num_kv_heads, value_dim = value.shape
    if num_new > length:
        raise ShapeError(f"{num_new} queries need at least {num_new} keys, got {length}")
    if num_new == 0:
        return query.new_empty(0, num_heads, value_dim)
    compute = torch.promote_types(query.dtype, key.dtype)
    group = num_heads // num_kv_heads
    start = length - num_new
    chunk = max(1, min(num_new, _MAX_MASK_ELEMENTS // max(1, _span(length, num_new, window))))
    out = []
    for first in range(0, num_new, chunk):
        last = min(first + chunk, num_new)
        low = 0 if window is None else max(0, start + first - window + 1)
        high = start + last
        q = query[first:last].to(compute)
        k = key[low:high].to(compute).transpose(0, 1)
        v = value[low:high].to(compute).transpose(0, 1)
        out.append(_attend_chunk(q, k, v, group, scale, window))
    result = out[0] if len(out) == 1 else torch.cat(out)
    return result.to(query.dtype)


def _span(length: int, num_new: int, window: int | None) -> int:
    """Most keys that one chunk of queries can touch."""
    return length if window is None else min(length, window + num_new)


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: int, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of `query` `[t, Hq, D]` over `key`, `value` `[Hk, s, D]`, whose last key the last query sees."""
    num_new, num_heads, head_dim = query.shape
    num_kv_heads, length, value_dim = value.shape
    if num_new > 1 and not _masked_keys_are_harmless(query, key, value, window):
        return _attend_row_by_row(query, key, value, group, scale, window)
    if length < _FEWEST_FUSED_KEYS:
        return _attend_in_plain_steps(query, key, value, group, scale, window)
    if num_new == 1:  # the caller has cut the keys to the window, so the one query sees them all
        folded = query.view(1, num_kv_heads, group, head_dim)
        out = scaled_dot_product_attention(folded, key[None], value[None], scale=scale)
        return out.reshape(1, num_heads, value_dim)
    grouped = query.view(num_new, num_kv_heads, group, head_dim)
    if num_new <= _MAX_FOLDED_TOKENS:
        folded = grouped.permute(1, 0, 2, 3).reshape(1, num_kv_heads, num_new * group, head_dim)
        mask = _mask(num_new, length, window, query.device).repeat_interleave(group, dim=0)
        out = scaled_dot_product_attention(folded, key[None], value[None], attn_mask=mask, scale=scale)
        out = out.view(num_kv_heads, num_new, group, value_dim).permute(1, 0, 2, 3)
        return out.reshape(num_new, num_heads, value_dim)
    # One batch entry per member of the query group; K and V are the same memory in each (stride 0).
    batched = grouped.permute(2, 1, 0, 3)
    key = key.expand(group, -1, -1, -1)
    value = value.expand(group, -1, -1, -1)
    if num_new == length and (window is None or window >= length):
        out = scaled_dot_product_attention(batched, key, value, is_causal=True, scale=scale)
    else:
        mask = _mask(num_new, length, window, query.device)
        out = scaled_dot_product_attention(batched, key, value, attn_mask=mask, scale=scale)
    return out.permute(2, 1, 0, 3).reshape(num_new, num_heads, value_dim)


def _mask(num_new: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean mask `[num_new, length]`, True where a query sees a key."""
    positions = torch.arange(length - num_new, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    seen = keys <= positions
    if window is not None:
        seen &= keys > positions - window
    return seen


def _masked_keys_are_harmless(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    """Whether no key or value can reach a query that must not see it.

    Kernels mask by adding -infinity to a score and weighing the value with 0. That fails for values that are not
    finite, and for scores that are not: also those that overflow, although query and key are finite.
    """
    num_new, length, head_dim = query.shape[0], key.shape[1], query.shape[2]
    masked = slice(0 if window is not None and length > window else length - num_new + 1, length)
    largest_score = query.abs().amax().float() * key[:, masked].abs().amax().float() * head_dim
    return bool(torch.isfinite(largest_score) & torch.isfinite(value[:, masked]).all())


def _attend_in_plain_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: int, scale: float, window: int | None
) -> torch.Tensor:
    """Scores, softmax and weighted sum one after the other, in float32 at least."""
    num_new, num_heads, head_dim = query.shape
    num_kv_heads, length, value_dim = value.shape
    compute = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(compute).view(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ key.to(compute)[:, None].transpose(-1, -2) * scale
    if num_new > 1:
        scores = scores.masked_fill(~_mask(num_new, length, window, query.device), -torch.inf)
    out = torch.softmax(scores, dim=-1) @ value.to(compute)[:, None]
    return out.permute(2, 0, 1, 3).reshape(num_new, num_heads, value_dim).to(query.dtype)


def _attend_row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: int, scale: float, window: int | None
) -> torch.Tensor:
    """The slow path for memory that holds NaN or infinity: each query meets only the keys it sees."""
    num_new, length = query.shape[0], key.shape[1]
    rows = []
    for row in range(num_new):
        high = length - num_new + row + 1
        low = 0 if window is None else max(0, high - window)
        rows.append(_attend_chunk(query[row : row + 1], key[:, low:high], value[:, low:high], group, scale, None))
    return torch.cat(rows)
