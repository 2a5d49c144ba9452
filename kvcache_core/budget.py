"""How much a cache may hold: bytes, blocks, tokens, or a share of the device's memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal

from kvcache_core.errors import ConfigError
from kvcache_core.storage import DeviceMemory
from kvcache_core.validation import show

__all__ = ["BUDGET_SCHEMA", "Budget", "BudgetKind", "format_bytes"]

BudgetKind = Literal["bytes", "blocks", "tokens", "fraction"]

_UNITS: Mapping[str, int] = MappingProxyType(
    {"B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)}
    | {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)}
)
_BINARY_UNITS = ("TiB", "GiB", "MiB", "KiB")
_FOLDED_UNITS = {unit.lower(): size for unit, size in _UNITS.items()}
_COUNTED: Mapping[str, BudgetKind] = MappingProxyType(
    {"block": "blocks", "blocks": "blocks", "token": "tokens", "tokens": "tokens"}
)
_TEXT = re.compile(r"(?P<number>\d[\d_]{0,30}(?:\.\d{1,30})?)\s*(?P<unit>[A-Za-z%]*)", re.ASCII)
_FORMS = 'bytes (4294967296 or "4GiB"), "1000 blocks", "16000 tokens", or a share of the memory ("50%" or 0.5)'

#: Block ids are 32-bit integers in the kernels that read block tables, and block 0 is the null block.
_MAX_BLOCKS = 2**31 - 1
_LIMITS: Mapping[str, int] = MappingProxyType({"bytes": 2**63 - 1, "blocks": _MAX_BLOCKS, "tokens": 2**63 - 1})

#: The budget's forms for an editor.
BUDGET_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "description": "Bytes."},
        {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1,
            "description": "A share of the device's free memory.",
        },
        {
            "type": "string",
            "pattern": r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*([KkMmGgTt][Ii]?)?[Bb]\s*$",
            "description": "Bytes with a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024).",
        },
        {
            "type": "string",
            "pattern": r"^\s*[0-9][0-9_]*\s*([Bb][Ll][Oo][Cc][Kk]|[Tt][Oo][Kk][Ee][Nn])[Ss]?\s*$",
            "description": "A number of blocks, or of tokens (rounded up to whole blocks).",
        },
        {
            "type": "string",
            "pattern": r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*%\s*$",
            "description": "A percentage of the device's free memory.",
        },
    ],
    "examples": ["4GiB", "1000 blocks", "16000 tokens", "50%", 0.5, 4294967296],
}


@dataclass(frozen=True)
class Budget:
    """The most that a cache may hold.

    Attributes:
        kind: `"bytes"`, `"blocks"`, `"tokens"`, or `"fraction"` (of the device's free memory).
        amount: A whole number of them; for a fraction, a float above 0 and up to 1.
    """

    kind: BudgetKind
    amount: int | float

    def __post_init__(self) -> None:
        _check(self.kind, self.amount, show(self.amount))

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Read a budget in any of its forms.

        A whole number is bytes, a float a share of the device's free memory, and text names its unit:
        `"4GiB"`, `"1000 blocks"`, `"16000 tokens"`, `"50%"`.

        Raises:
            ConfigError: It is none of these, or not above zero.
        """
        if isinstance(value, Budget):
            return value
        if type(value) is int:
            return cls("bytes", value)
        if type(value) is float:
            return cls("fraction", value)
        match = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(f"budget must be {_FORMS}, not {show(value)}", key="budget")
        kind, amount = _read(match["number"].replace("_", ""), match["unit"].lower(), show(value))
        _check(kind, amount, show(value))
        return cls(kind, amount)

    def __str__(self) -> str:
        if self.kind == "fraction":
            return f"{100 * self.amount:g}%"
        if self.kind == "bytes":
            return format_bytes(int(self.amount))
        return f"{self.amount} {self.kind if self.amount != 1 else self.kind[:-1]}"

    def to_plain(self) -> str | float:
        """The budget as a configuration file would hold it; `parse` makes an equal one of it."""
        if self.kind == "fraction":
            return float(self.amount)
        if self.kind == "bytes":
            return next(
                (
                    f"{int(self.amount) // _UNITS[unit]}{unit}"
                    for unit in _BINARY_UNITS
                    if self.amount % _UNITS[unit] == 0
                ),
                f"{self.amount} B",
            )
        return str(self)

    def resolve(
        self,
        *,
        bytes_per_block: int,
        block_size: int,
        device_memory: DeviceMemory | Callable[[], DeviceMemory],
        origin: str | None = None,
    ) -> int:
        """The number of whole blocks that this budget holds.

        A budget in tokens is rounded up to whole blocks, all others down.

        Args:
            bytes_per_block: Bytes of K and V that one block takes in all layers together.
            block_size: Tokens per block.
            device_memory: The device's memory, or how to ask for it; a fraction is taken from what is free.
            origin: Where the budget came from, for the message.

        Raises:
            ConfigError: It does not hold a single block, or more blocks than can be numbered.
        """
        if self.kind == "blocks":
            return int(self.amount)
        if self.kind == "tokens":
            blocks = -(-int(self.amount) // block_size)
        else:
            held = self._bytes(device_memory)
            blocks = held // bytes_per_block
            if blocks < 1:
                raise self._too_small(held, bytes_per_block, block_size, origin)
        if blocks > _MAX_BLOCKS:
            raise ConfigError(
                f"budget {self} must be at most {_MAX_BLOCKS} blocks, not {blocks}; give less or a larger "
                f"block_size than {block_size}" + _from(origin),
                key="budget",
                origin=origin,
            )
        return blocks

    def _bytes(self, device_memory: DeviceMemory | Callable[[], DeviceMemory]) -> int:
        if self.kind == "bytes":
            return int(self.amount)
        memory = device_memory() if callable(device_memory) else device_memory
        return math.floor(memory.free * self.amount)

    def _too_small(self, held: int, bytes_per_block: int, block_size: int, origin: str | None) -> ConfigError:
        meaning = f" of the free memory ({format_bytes(held)})" if self.kind == "fraction" else ""
        needed = format_bytes(bytes_per_block, round_up=True)
        return ConfigError(
            f"budget {self}{meaning} must hold one block of {block_size} tokens at least: give "
            f'"{needed}" or more, or a smaller block_size{_from(origin)}',
            key="budget",
            origin=origin,
            details=[
                f"one block takes {bytes_per_block} bytes, the budget is {held} bytes",
                f"{held * block_size // bytes_per_block} tokens would fit",
            ],
        )


def _from(origin: str | None) -> str:
    return f" ({origin})" if origin else ""


def _check(kind: str, amount: object, shown: str) -> None:
    if kind == "fraction":
        wanted = "a share above 0 and up to 1 (100%)"
        good = type(amount) is float and 0.0 < amount <= 1.0
    elif kind in _LIMITS:
        limit = _LIMITS[kind]
        wanted = f"a whole number of {kind} from 1 to {limit}"
        good = type(amount) is int and 1 <= amount <= limit
    else:
        wanted, good, shown = f"of kind {', '.join(_LIMITS)} or fraction", False, show(kind)
    if not good:
        raise ConfigError(f"budget must be {wanted}, not {shown}", key="budget")


def _read(number: str, unit: str, shown: str) -> tuple[BudgetKind, int | float]:
    if unit == "%":
        return "fraction", float(Decimal(number) / 100)
    if unit in _COUNTED and "." not in number:
        return _COUNTED[unit], int(number)
    if unit in _FOLDED_UNITS:
        return "bytes", int(Decimal(number) * _FOLDED_UNITS[unit])
    if not unit:
        forms = f'"{number} blocks", "{number} tokens" or "{number} B"'
        raise ConfigError(f"budget must say what {shown} counts: {forms}", key="budget")
    raise ConfigError(f"budget must be {_FORMS}, not {shown}", key="budget")


def format_bytes(count: int, *, round_up: bool = False) -> str:
    """Bytes for a reader, in the largest binary unit that is not above them: `"1.5 GiB"`.

    Args:
        count: The bytes.
        round_up: Whether the shown figure must not be below `count`; else it is rounded to nearest.
    """
    for unit in _BINARY_UNITS:
        if count >= _UNITS[unit]:
            scaled = 100 * count / _UNITS[unit]
            return f"{(math.ceil(scaled) if round_up else round(scaled)) / 100:g} {unit}"
    return f"{count} B"
