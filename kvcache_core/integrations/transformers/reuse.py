"""Making the rows of a cache fit prompts: what they keep of their own, and what they find that others have stored."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
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
            return _take(rows, prompts, sources, lambda prompt: opener.open(prompt.token_ids))
        except CacheFullError:
            pass  # what the rows have of their own needs no room
    return _take(rows, prompts, own, lambda prompt: opener.open())


def _best_row(known: Sequence[array[int]], prompt: Prompt, number: int) -> _Source:
    """The row that has most of a prompt; of several the one in its place, or else the first."""
    most = len(prompt.token_ids) - 1
    best = _Source(None, 0)
    for row, token_ids in enumerate(known):
        kept = min(common_prefix(token_ids, prompt.token_ids), most)
        if best.row is None or (kept, row == number) > (best.num_tokens, best.row == number):
            best = _Source(row, kept)
    return best


def _better(own: _Source, prompt: Prompt, opener: Opener) -> _Source:
    found = opener.count_cached(prompt.token_ids)
    return own if own.num_tokens and found <= own.num_tokens else _Source(None, found)


def _take(
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    sources: Sequence[_Source],
    open_for: Callable[[Prompt], KvCacheHandle],
) -> list[Row]:
    columns = min(prompt.pads + source.num_tokens for prompt, source in zip(prompts, sources, strict=True))
    taken: list[Row] = []
    moved: set[int] = set()
    try:
        for prompt, source in zip(prompts, sources, strict=True):
            kept = max(0, columns - prompt.pads)
            if source.row is None:
                handle = open_for(prompt)
            else:
                handle = rows[source.row].handle
                if source.row in moved or _can_be_found(handle, kept):
                    handle = handle.fork()
                else:
                    moved.add(source.row)
            pads = min(prompt.pads, columns)
            taken.append(Row(handle, (Gap(0, pads),) if pads else ()))
        for row, prompt in zip(taken, prompts, strict=True):
            if row.num_tokens > (kept := max(0, columns - prompt.pads)):
                row.handle.truncate(kept)
    except BaseException:
        drop(taken, keep=rows)
        raise
    return taken


def _can_be_found(handle: KvCacheHandle, kept: int) -> bool:
    """Whether others can find tokens of a sequence beyond the first `kept`, which are worth leaving to them."""
    tip = handle.sequence.tip
    return tip is not None and tip.depth * handle.manager.block_size > kept
