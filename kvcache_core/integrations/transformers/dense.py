"""Dense K and V for attention that reads tensors: a view of one row, or a padded copy of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcache_core.integrations.transformers.rows import Row

__all__ = ["KeyValue", "as_model_reads", "joined", "padded"]

KeyValue = tuple[torch.Tensor, torch.Tensor]


def as_model_reads(pair: KeyValue) -> KeyValue:
    """K and V of one sequence `[tokens, heads, dim]` as views `[1, heads, tokens, dim]`."""
    return pair[0].transpose(0, 1).unsqueeze(0), pair[1].transpose(0, 1).unsqueeze(0)


def padded(rows: Sequence[Row], columns: int, read: Callable[[Row], KeyValue]) -> KeyValue:
    """A copy of the K and V of several rows, `[rows, heads, columns, dim]`, with zeros for pads.

    Args:
        rows: The rows.
        columns: Columns of each.
        read: Returns K and V `[tokens, heads, dim]` of a row.
    """
    copies: list[torch.Tensor] = []
    for number, row in enumerate(rows):
        for role, tensor in enumerate(read(row)):
            if not number:
                copies.append(tensor.new_zeros(len(rows), tensor.shape[1], columns, tensor.shape[2]))
            for run in row.runs(tensor.shape[0]):
                stop = run.column + run.stop - run.start
                copies[role][number, :, run.column : stop] = tensor[run.start : run.stop].transpose(0, 1)
    return copies[0], copies[1]


def joined(cached: KeyValue | None, key: torch.Tensor, value: torch.Tensor) -> KeyValue:
    """Cached and new K and V, one after the other, in the dtype of the new."""
    if cached is None:
        return key, value
    return (
        torch.cat([cached[0].to(key.dtype), key], dim=2),
        torch.cat([cached[1].to(value.dtype), value], dim=2),
    )
