"""The one check for numbers that a caller gave."""

from __future__ import annotations

import pytest

from kvcache_core import ShapeError
from kvcache_core.counts import check_count


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_a_count_passes(value: int) -> None:
    assert check_count("tokens", value) == value


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, [1], 2**63, 10**6000, -(10**6000)], ids=type)
def test_anything_else_is_refused_in_one_line_that_names_it(value: object) -> None:
    with pytest.raises(ShapeError, match=r"^tokens must be an int of at least 0 that fits 64 bits, not .+$") as caught:
        check_count("tokens", value)
    assert "\n" not in str(caught.value)


def test_the_least_count_can_be_raised() -> None:
    with pytest.raises(ShapeError, match=r"block_size must be an int of at least 1 .*, not 0"):
        check_count("block_size", 0, least=1)
