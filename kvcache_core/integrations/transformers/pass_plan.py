"""What a forward pass is to add to the rows of a cache, read from what the model was called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from kvcache_core.errors import ShapeError
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.integrations.transformers.padding import are_by_column, read_mask
from kvcache_core.integrations.transformers.rows import Row, num_columns

__all__ = ["PassPlan", "SpecialTokens", "is_own_mask", "plan_pass"]


@dataclass(frozen=True)
class SpecialTokens:
    """The ids by which a row is known to be finished.

    Attributes:
        end: Any of these ends a text.
        pad: What `generate` feeds for a row after that; None if it never does.
    """

    end: frozenset[int] = frozenset()
    pad: int | None = None


@dataclass(frozen=True)
class PassPlan:
    """What a forward pass adds to which rows.

    Attributes:
        num_rows: Rows of the model's batch.
        columns: Columns before it.
        width: New columns.
        sources: For each row of the batch, the row of the cache that it continues.
        is_token: Which new columns hold tokens, bool `[num_rows, width]` on the host; None if all do.
        by_column: Whether positions count columns where there are pads, rather than tokens.
        new_tokens: For each row the ids of its new tokens, or how many where they are not to be named.
        leaders: The rows of the batch that are stored, where others begin with the same tokens; None for all.
        followers: For each row of the batch, which of the leaders it repeats; None without leaders.
    """

    num_rows: int
    columns: int
    width: int
    sources: Sequence[int]
    is_token: torch.Tensor | None
    by_column: bool
    new_tokens: Sequence[Sequence[int] | int]
    leaders: Sequence[int] | None = None
    followers: Sequence[int] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is over one row, and adds no pads."""
        return self.num_rows == 1 and self.is_token is None

    @property
    def has_surplus(self) -> bool:
        """Whether a model that computes all columns of all rows computes more than is stored."""
        return self.is_token is not None or self.leaders is not None

    def packing(self, device: torch.device) -> Packing:
        """The way between the batch and what is stored of it."""
        return Packing(self.num_rows, self.width, self.is_token, self.leaders, self.followers, device)

    @property
    def num_stored(self) -> int:
        """How many tokens are stored."""
        added = [self.new_tokens[number] for number in self.stored_rows]
        return sum(new if isinstance(new, int) else len(new) for new in added)

    @property
    def stored_rows(self) -> Sequence[int]:
        """The rows of the batch that are stored."""
        return range(self.num_rows) if self.leaders is None else self.leaders

    def row_after(self, row: Row, number: int) -> Row:
        """The cached row that row `number` of the batch continues, with the new columns."""
        if self.is_token is not None:
            row = row.followed_by(self.is_token[number].tolist())
        return replace(row, by_column=True) if self.by_column and row.gaps else row

    def of_width(self, width: int) -> PassPlan:
        """The same for another number of columns, none of which have ids or are pads."""
        return replace(self, width=width, new_tokens=[width] * self.num_rows, leaders=None, followers=None)


def is_own_mask(attention_mask: Any) -> bool:
    """Whether a mask is of the caller's own making: one that is not 2-D, or one for each kind of layer."""
    return attention_mask is not None and getattr(attention_mask, "ndim", 0) != 2


def plan_pass(
    rows: Sequence[Row],
    num_rows: int,
    width: int,
    *,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    special: SpecialTokens,
) -> PassPlan:
    """Plan a forward pass over `rows`, and refuse one that they cannot hold; nothing changes.

    Args:
        rows: The rows of the cache.
        num_rows: Rows of the model's batch.
        width: New columns.
        input_ids: `[num_rows, width]`, or None where the model is fed something else.
        position_ids: Their positions, if given.
        attention_mask: The mask, if given; one of the caller's own hides no column from us.
        special: How to know finished rows.

    Raises:
        ShapeError: The pass does not continue where the cache ends.
    """
    columns = num_columns(rows)
    if width == 0:
        raise ShapeError(
            f"the forward pass has no new tokens, and the cache holds {columns}; a prompt must be longer than "
            "what is cached of it: call cache.prepare(input_ids) before generate"
        )
    sources = _sources(len(rows), num_rows, columns)
    continued = [rows[source] for source in sources]
    own_mask = is_own_mask(attention_mask)
    is_token = None if own_mask else read_mask(attention_mask, continued, columns, width)
    by_column = are_by_column(position_ids, continued, columns, width, is_token)
    if own_mask or input_ids is None or tuple(input_ids.shape) != (num_rows, width):
        # K and V do not follow from ids under a mask of the caller's own, and soft prompts and images have none.
        counts = [width] * num_rows if is_token is None else is_token.sum(1).tolist()
        return PassPlan(num_rows, columns, width, sources, is_token, by_column, counts)
    ids = input_ids.tolist()
    masks = None if is_token is None else is_token.tolist()
    leaders, followers = _repeated(ids, masks) if num_rows > 1 and columns == 0 else (None, None)
    if masks is not None:
        ids = [list(compress(new, mask)) for new, mask in zip(ids, masks, strict=True)]
    named = [
        len(new)
        if (by_column and (row.gaps or len(new) < width)) or (num_rows > 1 and _is_finished(row, new, special))
        else new
        for row, new in zip(continued, ids, strict=True)
    ]
    return PassPlan(num_rows, columns, width, sources, is_token, by_column, named, leaders, followers)


def _sources(num_cached: int, num_rows: int, columns: int) -> Sequence[int]:
    """For each row of a batch the row of the cache that it continues: one may be continued by several."""
    if columns == 0:
        return [0] * num_rows
    if num_rows % num_cached:
        raise ShapeError(
            f"the batch has {num_rows} rows and the cache {num_cached}: a cache continues with the rows it has, or "
            "with the same number of copies of each; reset it for another batch"
        )
    copies = num_rows // num_cached
    return range(num_rows) if copies == 1 else [row // copies for row in range(num_rows)]


def _repeated(
    ids: list[list[int]], masks: list[list[bool]] | None
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Leaders and followers of a batch whose rows may be the same; None and None if all differ."""
    first: dict[tuple[tuple[int, ...], tuple[bool, ...]], int] = {}
    followers = []
    for number, new in enumerate(ids):
        key = tuple(new), () if masks is None else tuple(masks[number])
        followers.append(first.setdefault(key, number))
    leaders = sorted(first.values())
    if len(leaders) == len(ids):
        return None, None
    return leaders, [leaders.index(leader) for leader in followers]


def _is_finished(row: Row, new: list[int], special: SpecialTokens) -> bool:
    """Whether `generate` feeds a pad for a row that has come to its end; such pads are not worth finding again."""
    if len(new) != 1 or new[0] != special.pad:
        return False
    known = row.handle.sequence.token_ids
    return bool(known) and known[-1] in special.end
