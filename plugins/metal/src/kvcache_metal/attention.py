"""Scaled dot product attention on torch MPS, through the guards."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_metal.guards import Guards, SdpaMask
from kvcache_metal.plan import Piece

__all__ = ["attend_visible", "hidden_rows_are_harmless"]


def attend_visible(
    guards: Guards, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, *, scale: float
) -> torch.Tensor:
    """Attend to what each query sees. What it does not see has to be finite.

    Args:
        guards: The guards in force.
        query: `[batch, tokens, num_heads, head_dim]`, floating.
        key: `[batch, keys, num_kv_heads, head_dim]`, of the same dtype.
        value: `[batch, keys, num_kv_heads, value_head_dim]` likewise.
        piece: Says what each query sees.
        scale: Factor on the scores.

    Returns:
        `[batch, tokens, num_heads, value_head_dim]` in the dtype of `query`.
    """
    batch, tokens, num_heads, _ = query.shape
    num_kv_heads, width = value.shape[2:]
    query, key, value = guards.equal_head_dims(query, key, value)
    folded, members = guards.folded_heads(query, num_kv_heads)
    mask = _mask(guards, piece, query.dtype, folded.shape[1], members)
    out = scaled_dot_product_attention(
        guards.contiguous_operands(folded),
        guards.contiguous_operands(key.transpose(1, 2)),
        guards.contiguous_operands(value.transpose(1, 2)),
        attn_mask=mask.attn_mask,
        is_causal=mask.is_causal,
        scale=scale,
        enable_gqa=folded.shape[1] != num_kv_heads,
    )
    out = out[..., :width].view(batch, folded.shape[1], members, tokens, width)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, tokens, num_heads, width)


def _mask(guards: Guards, piece: Piece, dtype: torch.dtype, heads: int, members: int) -> SdpaMask:
    """The mask of a piece, made once for all layers where the piece may keep it."""
    kept = piece.masks if piece.masks is not None else {}
    mask = kept.get((dtype, heads, members))
    if mask is None:
        mask = guards.float_mask(piece.visible(), dtype, heads=heads, members=members, causal=piece.causal)
        kept[dtype, heads, members] = mask
    return mask


def hidden_rows_are_harmless(guards: Guards, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether these keys and values cannot reach a query that must not see them.

    Attention hides a key by adding -infinity to its score and weighing its value with 0. That fails for values that are
    not finite, and for scores that are not, also where they overflow. Reads one flag back from the device.

    Args:
        guards: The guards in force.
        query: `[tokens, num_heads, head_dim]`.
        key: `[keys, num_kv_heads, head_dim]`.
        value: `[keys, num_kv_heads, value_head_dim]`.
    """
    query, key, value = (guards.contiguous_operands(tensor) for tensor in (query, key, value))
    largest_score = query.abs().amax().float() * key.abs().amax().float() * query.shape[-1]
    # Each looked at by itself: the largest of numbers does not show a NaN among them on MPS (pytorch#188147).
    finite = torch.isfinite(largest_score) & torch.isfinite(value).all()
    return bool(finite & torch.isfinite(query).all() & torch.isfinite(key).all())
