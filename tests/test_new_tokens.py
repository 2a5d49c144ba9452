"""What a step is to add, checked and packed."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from kvcache_core import ShapeError
from kvcache_core.new_tokens import pack


@pytest.mark.parametrize(
    ("new", "counts", "named", "ids"),
    [
        ([], [], [], []),
        ([[7]], [1], [True], [7]),
        ([[7], [8], [-9]], [1, 1, 1], [True] * 3, [7, 8, -9]),
        ([[7], 2, [8, 9], []], [1, 2, 2, 0], [True, False, True, True], [7, 8, 9]),
        ([(7,), [8]], [1, 1], [True, True], [7, 8]),
        ([1, 3], [1, 3], [False, False], []),
        ([iter([5, 6]), torch.tensor([7]), range(2)], [2, 1, 2], [True] * 3, [5, 6, 7, 0, 1]),
        ([array("q", [5])], [1], [True], [5]),
        ([[torch.tensor(5)], [6]], [1, 1], [True, True], [5, 6]),
        ([2**40], [2**40], [False], []),
    ],
)
def test_counts_and_ids_stand_in_the_order_in_which_they_are_named(
    new: list[Any], counts: list[int], named: list[bool], ids: list[int]
) -> None:
    packed = pack(new)
    assert (packed.counts, packed.named, packed.ids.tolist()) == (counts, named, ids)


@pytest.mark.parametrize("wrong", [True, -1, [1.5], ["a"], "a", [[1]], [None], [2**63], b"ab", None, 1.0, [1, "a"]])
@pytest.mark.parametrize("others", [[], [[1]], [[1, 2]], [3]])
def test_what_is_no_token_id_is_refused_among_whatever_others(wrong: Any, others: list[Any]) -> None:
    for new in ([*others, wrong], [wrong, *others]):
        with pytest.raises(ShapeError):
            pack(new)


def test_what_was_packed_does_not_follow_the_callers_lists() -> None:
    mine = [[7], [8]]
    packed = pack(mine)
    mine[0][0] = 0
    assert packed.ids.tolist() == [7, 8]
