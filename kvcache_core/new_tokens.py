"""What sequences add in a step, packed in the order in which they are named."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcache_core.counts import check_count
from kvcache_core.request import token_array

__all__ = ["NewTokens", "PackedTokens", "pack"]

#: What a sequence adds in a step: the token ids, or how many when the caller will not name them.
NewTokens = int | Iterable[int]


class PackedTokens(NamedTuple):
    """The new tokens of several sequences, as columns: a decode step over many sequences is a few operations on lists.

    Attributes:
        counts: New tokens of each sequence.
        named: Whether their ids are known.
        ids: The ids of all named tokens, in packing order.
        one_each: Whether each sequence adds one named token, as in a decode step.
        total: New tokens of all sequences.
    """

    counts: Sequence[int]
    named: Sequence[bool]
    ids: array[int]
    one_each: bool
    total: int


def pack(new_tokens: Sequence[NewTokens]) -> PackedTokens:
    """Check and copy what each sequence is to add.

    Raises:
        ShapeError: A negative count, a bool, or ids that are no flat sequence of 64-bit ints.
    """
    if new_tokens and list(map(type, new_tokens)).count(list) == len(new_tokens):
        try:
            ids = array("q", [token for (token,) in new_tokens])  # type: ignore[misc]
        except (TypeError, ValueError, OverflowError):  # not one each, or no ids: found out one by one
            pass
        else:
            return PackedTokens([1] * len(ids), [True] * len(ids), ids, True, len(ids))
    counts, named, ids = [], [], array("q")
    for new in new_tokens:
        if isinstance(new, int):
            count = check_count("a number of new tokens", new)
        else:
            some = token_array(new)
            count = len(some)
            ids.extend(some)
        counts.append(count)
        named.append(not isinstance(new, int))
    return PackedTokens(counts, named, ids, False, sum(counts))
