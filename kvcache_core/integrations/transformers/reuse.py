"""Making the rows of a cache fit prompts: what they keep of their own, and what they find that others have stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.errors import CacheFullError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.integrations.transformers.opener import Opener
from kvcache_core.integrations.transformers.prompt import Prompt, common_prefix
from kvcache_core.integrations.transformers.rows import Gap, Row, drop

__all__ = ["fitting_rows"]


@dataclass(frozen=True)
class _Source:
    """Where a row gets its first tokens from.

    Attributes:
        row: Index of a row that has them, or None to open a sequence that finds what others have stored.
        num_tokens: How many it gets.
    """

    row: int | None
    num_tokens: int


def fitting_rows(rows: Sequence[Row], prompts: Sequence[Prompt], opener: Opener) -> list[Row]:
    """Return a row for each prompt, all of as many columns, that hold the beginnings of the prompts.

    Rows of `rows` may be among them, cut to size; the others are the caller's to free. At least the last column of
    the prompts is left to compute.

    Args:
        rows: The rows there are.
        prompts: The prompts; with their pads all of one length.
        opener: Opens further rows.

    Raises:
        CacheFullError: The backend has to copy something and there is no room; nothing has changed.
    """
    known = [array("q", row.handle.sequence.token_ids) for row in rows]
    own = [_best_row(known, prompt, number) for number, prompt in enumerate(prompts)]
    if opener.finds:
        sources = [_better(source, prompt, opener) for source, prompt in zip(own, prompts, strict=True)]
        try:
            return _take(rows, prompts, sources, opener)
        except CacheFullError:
            pass  # what the rows have of their own needs no room
    return _take(rows, prompts, own, opener)


def _best_row(known: Sequence[array[int]], prompt: Prompt, number: int) -> _Source:
    """The row that has most of a prompt; of several the one in its place, or else the first."""
    first = number if number < len(known) else 0
    order = [first, *(row for row in range(len(known)) if row != first)]
    best = max(order, key=lambda row: common_prefix(known[row], prompt.token_ids))
    return _Source(best, min(common_prefix(known[best], prompt.token_ids), len(prompt.token_ids) - 1))


def _better(own: _Source, prompt: Prompt, opener: Opener) -> _Source:
    found = opener.count_cached(prompt.token_ids)
    return own if own.num_tokens and found <= own.num_tokens else _Source(None, found)


def _take(rows: Sequence[Row], prompts: Sequence[Prompt], sources: Sequence[_Source], opener: Opener) -> list[Row]:
    columns = min(prompt.pads + source.num_tokens for prompt, source in zip(prompts, sources, strict=True))
    taken: list[Row] = []
    moved: set[int] = set()
    try:
        for prompt, source in zip(prompts, sources, strict=True):
            kept = max(0, columns - prompt.pads)
            if source.row is None:
                handle = opener.open(prompt.token_ids)
            else:
                handle = rows[source.row].handle
                if source.row in moved or _can_be_found(handle, kept):
                    handle = handle.fork()
                else:
                    moved.add(source.row)
            pads = min(prompt.pads, columns)
            taken.append(Row(handle, (Gap(0, pads),) if pads else ()))
        for row, prompt in zip(taken, prompts, strict=True):
            row.handle.truncate(min(row.num_tokens, max(0, columns - prompt.pads)))
    except BaseException:
        drop(taken, keep=rows)
        raise
    return taken


def _can_be_found(handle: KvCacheHandle, kept: int) -> bool:
    """Whether others can find tokens of a sequence beyond the first `kept`, which are worth leaving to them."""
    tip = handle.sequence.tip
    return tip is not None and tip.depth * handle.manager.block_size > kept
