"""The one check for a number of tokens, blocks or layers that a caller gave."""

from __future__ import annotations

from kvcache_core.errors import ShapeError
from kvcache_core.validation import show

__all__ = ["check_count"]

#: Beyond it a number fits neither an index tensor nor, soon, a message.
_LIMIT = 1 << 63


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """Return `value` if it is a count.

    Raises:
        ShapeError: It is not an int (a bool is not one), less than `least`, or beyond 64 bits.
    """
    if type(value) is int and least <= value < _LIMIT:
        return value
    raise ShapeError(f"{name} must be an int of at least {least} that fits 64 bits, not {show(value)}")
