"""Reading the tokens of sequences out of their blocks, and decode attention over what was read, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core.batch import Segment

__all__ = ["SequenceRows", "attend_decode", "gather_rows"]


def attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend the last token of each sequence over its blocks, for all sequences at once.

    Rows that a query does not see are zeroed in the gathered copy, so that no NaN in them can reach the result.
    Nothing is read back to the host.

    Args:
        query: `[sequences, num_heads, head_dim]`, floating.
        key: K blocks, `[blocks, block_size, num_kv_heads, head_dim]`.
        value: V blocks likewise.
        block_tables: Block ids, `[sequences, max blocks]`.
        seq_lens: Tokens of each sequence, the last one included, `[sequences]`.
        scale: Factor on the scores.
        window: Tokens a query sees, itself included, or None for all.

    Returns:
        `[sequences, num_heads, value_head_dim]` in the dtype of `query`; zeros where a sequence has no tokens.
    """
    sequences, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value.shape
    width = block_tables.shape[1]
    if sequences == 0 or width == 0:
        return query.new_zeros(sequences, num_heads, value_dim)
    positions = torch.arange(width * block_size, device=query.device)
    ends = seq_lens[:, None]
    seen = positions < ends
    if window is not None:
        seen &= positions >= ends - window
    compute = torch.promote_types(query.dtype, key.dtype)
    index = block_tables.flatten()
    unseen = ~seen[:, :, None, None]
    keys, values = (
        blocks.index_select(0, index).view(sequences, width * block_size, num_kv_heads, -1).masked_fill_(unseen, 0)
        for blocks in (key, value)
    )
    seen[:, 0] |= seq_lens == 0  # softmax needs one key; its value is zero
    out = scaled_dot_product_attention(
        query.view(sequences, num_kv_heads, num_heads // num_kv_heads, head_dim).to(compute),
        keys.to(compute).transpose(1, 2),
        values.to(compute).transpose(1, 2),
        attn_mask=seen[:, None, None, :],
        scale=scale,
    )
    return out.reshape(sequences, num_heads, value_dim).to(query.dtype)


def gather_rows(blocks: torch.Tensor, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Copy the rows of a sequence out of its blocks.

    Args:
        blocks: `[blocks, block_size, heads, dim]`.
        ids: The sequence's block ids in logical order, as many as `num_tokens` take.
        num_tokens: How many rows.

    Returns:
        `[num_tokens, heads, dim]`, in memory that holds nothing else: the rest of the last block may be another's.
    """
    block_size, heads, dim = blocks.shape[1:]
    full, rest = divmod(num_tokens, block_size)
    rows = blocks.new_empty(num_tokens, heads, dim)
    if full:
        out = rows[: full * block_size].view(full, block_size, heads, dim)
        torch.index_select(blocks, 0, ids[:full], out=out)
    if rest:
        rows[full * block_size :] = blocks.index_select(0, ids[full:])[0, :rest]
    return rows


class SequenceRows:
    """Finds the rows of one sequence in any layer; worked out once for all layers of a step.

    Attributes:
        new_rows: Its rows in the packed tensors.
        num_tokens: Its tokens, the new ones included.
    """

    __slots__ = ("_first_slot", "_ids", "new_rows", "num_tokens")

    def __init__(self, segment: Segment, block_size: int, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.new_rows = slice(segment.row, segment.row + segment.num_new_tokens)
        self.num_tokens = segment.stop
        used = segment.blocks[: -(-segment.stop // block_size)]
        self._ids: torch.Tensor | None = None
        self._first_slot = used[0] * block_size if used else 0
        if not _are_neighbours(used):
            self._ids = upload(torch.tensor(used, dtype=torch.int64))

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return its `[num_tokens, heads, dim]` rows of `[blocks, block_size, heads, dim]`: a view where it can be."""
        if self._ids is None:
            return blocks.flatten(0, 1)[self._first_slot : self._first_slot + self.num_tokens]
        return gather_rows(blocks, self._ids, self.num_tokens)


def _are_neighbours(blocks: Sequence[int]) -> bool:
    return not blocks or list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
