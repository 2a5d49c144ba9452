"""Keys and values that say where they belong, so that a row in the wrong place gives itself away.

Every cached row spells, in plus and minus ones, the bits of the token, its position, the layer, the head, and
whether it is a key or a value. Such rows survive any float dtype, and quantisation, unchanged or nearly so; and
`decode` names what a wrong row really is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

__all__ = ["ROW_BITS", "Place", "assert_rows", "decode", "encode"]

Role = Literal["key", "value"]

#: Bits of each field, lowest first; larger numbers wrap around.
_FIELDS = {"token": 13, "position": 10, "layer": 4, "head": 3, "is_value": 1}

#: Elements that a row needs to spell all fields.
ROW_BITS = sum(_FIELDS.values())


class Place(NamedTuple):
    """What a row says about itself."""

    token: int
    position: int
    layer: int
    head: int
    role: Role

    def __str__(self) -> str:
        return (
            f"the {self.role} of token {self.token} at position {self.position}, layer {self.layer}, head {self.head}"
        )


def encode(tokens: Sequence[int], start: int, layer: int, role: Role, heads: int, dim: int) -> torch.Tensor:
    """Return the rows of `tokens` at positions from `start` on, float32 `[len(tokens), heads, dim]` of -1 and 1.

    Args:
        tokens: A number for each token, unique among those the test wants to tell apart.
        start: Position of the first.
        layer: The layer.
        role: Keys or values.
        heads: Kv heads.
        dim: Elements of a row, at least `ROW_BITS`; the code repeats in what is left.
    """
    return _encode(tuple(tokens), start, layer, role, heads, dim).clone()


@lru_cache(maxsize=4096)  # tests that compare after every operation ask for the same rows again and again
def _encode(tokens: tuple[int, ...], start: int, layer: int, role: Role, heads: int, dim: int) -> torch.Tensor:
    codes = [
        [_code(token, position, layer, head, role == "value") for head in range(heads)]
        for position, token in enumerate(tokens, start)
    ]
    bits = torch.tensor(codes, dtype=torch.int64).reshape(len(tokens), heads, 1) >> (torch.arange(dim) % ROW_BITS)
    return ((bits & 1) * 2 - 1).float()


def _code(*fields: int) -> int:
    """Pack numbers in the order of `_FIELDS`."""
    code = shift = 0
    for number, width in zip(fields, _FIELDS.values(), strict=True):
        code |= (number % (1 << width)) << shift
        shift += width
    return code


def decode(row: torch.Tensor) -> Place:
    """Return what one row `[dim]` says about itself; meaningless for a row that `encode` did not make."""
    bits = (row[:ROW_BITS] > 0).tolist()
    numbers = {}
    for name, width in _FIELDS.items():
        numbers[name] = sum(bit << index for index, bit in enumerate(bits[:width]))
        del bits[:width]
    role: Role = "value" if numbers.pop("is_value") else "key"
    return Place(**numbers, role=role)


def assert_rows(actual: torch.Tensor, expected: torch.Tensor, *, error: float = 0.0, what: str = "") -> None:
    """Assert that two tensors of rows `[tokens, heads, dim]` are equal, and name the first row that is not.

    Args:
        actual: As read from the cache.
        expected: As `encode` makes them, in any dtype.
        error: Largest difference allowed to a storage that loses precision; 0 for equal bits.
        what: What is compared, for the message.
    """
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if torch.equal(actual, expected):
        return
    actual, expected = actual.detach().cpu().double(), expected.cpu().double()
    wrong = ~((actual - expected).abs() <= error)  # so that NaN is wrong
    if bool(wrong.any()):
        position, head, _ = (int(index) for index in wrong.nonzero()[0])
        row = actual[position, head]
        found = decode(row) if bool((row.abs() - 1).abs().max() <= max(error, 0.25)) else row.tolist()
        raise AssertionError(
            f"{what}: row {position}, head {head} is {found}; expected {decode(expected[position, head])}"
        )
