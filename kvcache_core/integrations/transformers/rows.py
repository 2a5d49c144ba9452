"""The rows of a batch: one handle each, and the pads between their tokens, which are counted and never stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvcache_core.errors import ShapeError
from kvcache_core.handle import KvCacheHandle

__all__ = ["Gap", "Row", "Run", "discard", "drop", "forget", "forked", "num_columns", "pick", "row_indices"]


class Gap(NamedTuple):
    """Columns of a row that hold pads.

    Attributes:
        before: Index of the token that follows them.
        columns: How many.
    """

    before: int
    columns: int


class Run(NamedTuple):
    """Tokens of a row that stand in consecutive columns.

    Attributes:
        start: Index of the first token.
        stop: One past the index of the last.
        column: Column of the first.
    """

    start: int
    stop: int
    column: int


@dataclass(frozen=True)
class Row:
    """One sequence of a batch.

    A model sees a batch as columns, which all rows have the same number of. Tokens keep their order in them.

    Attributes:
        handle: The tokens.
        gaps: The pads, in ascending order of `before`.
        by_column: Keys were rotated by their column, where a row without pads has its position.
    """

    handle: KvCacheHandle
    gaps: tuple[Gap, ...] = ()
    by_column: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens stored."""
        return self.handle.num_tokens

    @property
    def num_columns(self) -> int:
        """Tokens and pads."""
        return self.handle.num_tokens + sum([gap.columns for gap in self.gaps])

    def runs(self, num_tokens: int | None = None) -> Iterator[Run]:
        """The stretches of columns that hold tokens; those of `num_tokens` tokens, if they are not stored yet."""
        start = column = 0
        if num_tokens is None:
            num_tokens = self.num_tokens
        for gap in self.gaps:
            if gap.before > start:
                yield Run(start, gap.before, column)
                column += gap.before - start
                start = gap.before
            column += gap.columns
        if num_tokens > start:
            yield Run(start, num_tokens, column)

    def followed_by(self, is_token: Sequence[bool]) -> Row:
        """The row with further columns, of which some hold tokens; its handle is to store these."""
        gaps, tokens = list(self.gaps), self.num_tokens
        for real in is_token:
            if real:
                tokens += 1
            elif gaps and gaps[-1].before == tokens:
                gaps[-1] = Gap(tokens, gaps[-1].columns + 1)
            else:
                gaps.append(Gap(tokens, 1))
        return replace(self, gaps=tuple(gaps))

    def tokens_in(self, columns: int) -> int:
        """Tokens among the first `columns` columns."""
        tokens = 0
        for run in self.runs():
            if run.column >= columns:
                break
            tokens = min(run.stop, run.start + columns - run.column)
        return tokens

    def cut(self, columns: int) -> Row:
        """Keep the first `columns` columns, and give back the tokens beyond them."""
        tokens, kept = self.tokens_in(columns), []
        pads = columns - tokens
        for gap in self.gaps:
            if pads <= 0:
                break
            kept.append(Gap(gap.before, min(gap.columns, pads)))
            pads -= gap.columns
        if tokens < self.num_tokens:
            self.handle.truncate(tokens)
        return replace(self, gaps=tuple(kept))


def num_columns(rows: Sequence[Row]) -> int:
    """The columns of a batch.

    Raises:
        ShapeError: A handle was changed by other hands, so that its row no longer fits the others.
    """
    columns = rows[0].num_columns
    for row in rows[1:]:
        if row.num_columns != columns:
            raise ShapeError(
                f"the rows of this cache have {columns} and {row.num_columns} columns: one of their handles was "
                "changed directly; call cache.reset()"
            )
    return columns


def pick(rows: Sequence[Row], indices: Iterable[int]) -> list[Row]:
    """Return the rows at `indices`: a row that is asked for again comes as a fork.

    What is asked for once is moved and not copied. `drop` then gives back those that nobody asked for.

    Raises:
        CacheFullError: The backend has to copy something and there is no room; nothing has changed.
    """
    picked: list[Row] = []
    taken: set[int] = set()
    try:
        for index in indices:
            row = rows[index]
            picked.append(replace(row, handle=row.handle.fork()) if index in taken else row)
            taken.add(index)
    except BaseException:
        drop(picked, keep=rows)
        raise
    return picked


def drop(rows: Iterable[Row], *, keep: Iterable[Row] = ()) -> None:
    """Free the handles of rows that are not among those to keep."""
    kept = {id(row.handle) for row in keep}
    for row in rows:
        if id(row.handle) not in kept and row.handle.is_valid:
            row.handle.free()


def discard(rows: Iterable[Row]) -> None:
    """Give the handles of rows back from a finalizer."""
    for row in rows:
        row.handle.discard()


def forget(rows: Iterable[Row], *, keep: Iterable[Row] = ()) -> None:
    """Empty the rows that are not among those to keep, so that nothing is left of them for others to find."""
    kept = {id(row.handle) for row in keep}
    for row in rows:
        if id(row.handle) not in kept:
            row.handle.truncate(0)


def forked(rows: Sequence[Row]) -> list[Row]:
    """Return a fork of each row.

    Raises:
        CacheFullError: The backend has to copy something and there is no room; nothing has changed.
    """
    forks: list[Row] = []
    try:
        for row in rows:
            forks.append(replace(row, handle=row.handle.fork()))
    except BaseException:
        drop(forks)
        raise
    return forks


def row_indices(indices: Any, num_rows: int) -> list[int]:
    """Indices of rows as a list of ints, given as a tensor or a sequence.

    Raises:
        ShapeError: There are none, or one is not that of a row.
    """
    values = indices.tolist() if hasattr(indices, "tolist") else list(indices)
    if not values or not all(type(index) is int and 0 <= index < num_rows for index in values):
        raise ShapeError(f"row indices must be ints from 0 to {num_rows - 1}, at least one, not {indices!r}")
    return values
