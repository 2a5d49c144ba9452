"""Read-only values: what a frozen model holds must not change through a reference to its inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

__all__ = ["FrozenMapping", "freeze", "thaw"]

Key = TypeVar("Key")
Value_co = TypeVar("Value_co", covariant=True)


class FrozenMapping(Mapping[Key, Value_co]):
    """A read-only copy of a mapping that keeps its order and, unlike `types.MappingProxyType`, pickles.

    It can be hashed when its values can."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Key, Value_co] | None = None) -> None:
        self._items: dict[Key, Value_co] = dict(items or {})

    def __getitem__(self, key: Key) -> Value_co:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._items,)


def freeze(value: Any) -> Any:
    """Copy `value` with every mapping in it read-only and every list a tuple."""
    if isinstance(value, Mapping):
        return FrozenMapping({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Copy `value` with every mapping in it a dict and every tuple a list: the inverse of `freeze`."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value
