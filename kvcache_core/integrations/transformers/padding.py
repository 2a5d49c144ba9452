"""Reading the 2-D mask and the positions of a forward pass: which of its columns hold tokens, and where they stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache_core.errors import ShapeError
from kvcache_core.integrations.transformers.rows import Row

__all__ = ["are_by_column", "read_mask"]


def read_mask(
    attention_mask: torch.Tensor | None, rows: Sequence[Row], columns: int, width: int
) -> torch.Tensor | None:
    """Which of the new columns of a pass hold tokens, bool `[rows, width]` on the host; None if all do.

    Args:
        attention_mask: 0 where a column holds a pad, `[rows or 1, columns + width]` or wider; None for no pads.
        rows: The rows before the pass.
        columns: Columns that they have.
        width: New columns.

    Raises:
        ShapeError: The mask covers less than that, is of another number of rows, or contradicts what is cached.
    """
    length = columns + width
    if attention_mask is None:
        if any(row.gaps for row in rows):
            raise ShapeError(
                "attention_mask is missing, and rows of this cache were padded: give it, all columns of it"
            )
        return None
    if attention_mask.shape[1] < length:
        raise ShapeError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but {columns} are cached and {width} new: "
            f"extend it to {length}, or leave it out"
        )
    if attention_mask.shape[0] not in (1, len(rows)):
        raise ShapeError(f"attention_mask has {attention_mask.shape[0]} rows and the batch has {len(rows)}")
    is_token = attention_mask[:, :length].bool().cpu().expand(len(rows), length)
    has_pads = not bool(is_token.all())
    if not has_pads and not any(row.gaps for row in rows):
        return None
    _require_same_past(is_token[:, :columns], rows)
    new = is_token[:, columns:]
    return new if has_pads and not bool(new.all()) else None


def _require_same_past(is_token: torch.Tensor, rows: Sequence[Row]) -> None:
    cached = torch.zeros_like(is_token)
    for number, row in enumerate(rows):
        for run in row.runs():
            cached[number, run.column : run.column + run.stop - run.start] = True
    if torch.equal(is_token, cached):
        return
    row_number, column = (is_token != cached).nonzero()[0].tolist()
    said, held = ("a token", "a pad") if is_token[row_number, column] else ("a pad", "a token")
    raise ShapeError(
        f"attention_mask says that column {column} of row {row_number} is {said}, but the cache holds {held} there: "
        "extend the mask of the pass before, or call cache.prepare(input_ids, attention_mask=...)"
    )


def are_by_column(
    position_ids: torch.Tensor | None, rows: Sequence[Row], columns: int, width: int, is_token: torch.Tensor | None
) -> bool:
    """Whether the new tokens are at their columns' positions, rather than at their own.

    The two differ only in rows with pads. A model that is given no `position_ids` counts columns.

    Args:
        position_ids: `[rows or 1, width]`, or anything else that does not tell.
        rows: The rows before the pass.
        columns: Columns that they have.
        width: New columns.
        is_token: What `read_mask` returned.

    Raises:
        ShapeError: The positions continue neither, or not in the way that the row began.
    """
    padded = is_token is not None or any(row.gaps for row in rows)
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != width:
        by_column = padded
    else:
        by_column = _read_positions(position_ids, rows, columns, width, is_token)
    if padded:
        for number, row in enumerate(rows):
            if row.gaps and row.num_tokens and row.by_column is not by_column:
                counted = "columns" if row.by_column else "tokens"
                raise ShapeError(
                    f"the positions of row {number} counted {counted} so far and do not any more: give position_ids in "
                    "every pass over padded rows, or in none"
                )
    return by_column


def _read_positions(
    position_ids: torch.Tensor, rows: Sequence[Row], columns: int, width: int, is_token: torch.Tensor | None
) -> bool:
    given = position_ids.cpu().expand(len(rows), width)
    starts = [row.num_tokens for row in rows]
    if width == 1 and is_token is None:
        found = given[:, 0].tolist()
        if found == starts:
            return False
        if found == [columns] * len(rows):
            return True
    else:
        expected = torch.arange(width).expand(len(rows), width)
        if is_token is not None:
            expected = is_token.cumsum(1) - 1
        own = expected + torch.tensor(starts)[:, None]
        wrong = given != own
        if is_token is not None:
            wrong &= is_token
        if not bool(wrong.any()):
            return False
        by_column = given == torch.arange(columns, columns + width)
        if is_token is not None:
            by_column |= ~is_token
        if bool(by_column.all()):
            return True
    raise _wrong_positions(given, rows, is_token)


def _wrong_positions(given: torch.Tensor, rows: Sequence[Row], is_token: torch.Tensor | None) -> ShapeError:
    for number, row in enumerate(rows):
        found = given[number] if is_token is None else given[number][is_token[number]]
        positions = found.tolist()
        if positions != list(range(row.num_tokens, row.num_tokens + len(positions))):
            break
    which = f"row {number} of " if len(rows) > 1 else ""
    return ShapeError(
        f"{which}the forward pass is at positions {_brief(positions)}, but the cache holds {row.num_tokens} tokens and "
        "continues there: call cache.prepare(input_ids) before generate",
        details=[
            "generate feeds the wrong tokens when the prompt is not longer than the cache;",
            "prepare keeps what both have in common and drops the rest",
        ],
    )


def _brief(positions: list[int]) -> str:
    first, last = positions[0], positions[-1]
    if len(positions) > 1 and positions == list(range(first, last + 1)):
        return f"{first} to {last}"
    shown = ", ".join(map(str, positions[:8]))
    return f"{shown}, ..." if len(positions) > 8 else shown
