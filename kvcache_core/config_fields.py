"""The types of configuration values: how each key reads what it is given, and how it looks to an editor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from kvcache_core.budget import BUDGET_SCHEMA, Budget
from kvcache_core.errors import ConfigError
from kvcache_core.frozen import freeze, thaw
from kvcache_core.geometry import DTYPE_SIZES, check_dtype
from kvcache_core.validation import show

__all__ = [
    "BackendName",
    "BlockSize",
    "BudgetValue",
    "DeviceName",
    "DtypeName",
    "Flag",
    "Names",
    "Options",
    "Share",
]

#: A block longer than any sequence would only waste memory.
_MAX_BLOCK_SIZE = 2**16
_BACKEND = re.compile(r"([\w.-]+:)?[\w.-]+", re.ASCII)
_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


def _check_block_size(value: object) -> object:
    if isinstance(value, str) and value == "auto":
        return value
    if type(value) is int and 1 <= value <= _MAX_BLOCK_SIZE and value.bit_count() == 1:
        return value
    quoted = isinstance(value, str) and value.strip().isdigit()
    hint = "; write the number without quotes" if quoted else ""
    raise ValueError(f'must be a power of two from 1 to {_MAX_BLOCK_SIZE} or "auto", not {show(value)}{hint}')


def _check_backend(value: object) -> str:
    if isinstance(value, str) and _BACKEND.fullmatch(value.strip()):
        return value.strip()
    forms = '"auto", the name of a backend, or "distribution:backend" where several have it'
    raise ValueError(f"must be {forms}, not {show(value)}")


def _check_names(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name.strip() for name in value):
        return tuple(name.strip() for name in value)
    raise ValueError(f'must be a list of names, such as ["cuda"], not {show(value)}')


def _check_device(value: object) -> str:
    is_torch_device = type(value).__module__ == "torch" and type(value).__name__ == "device"
    name = str(value) if is_torch_device or isinstance(value, str) else ""
    if _DEVICE.fullmatch(name):
        return name
    raise ValueError(f'must be "auto" or a device by torch\'s name, such as "cpu" or "cuda:1", not {show(value)}')


def _check_dtype(value: object) -> str:
    return "auto" if isinstance(value, str) and value == "auto" else check_dtype(value)


def _check_options(value: object) -> object:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return freeze(value)
    raise ValueError(f"must be a table of the backend's own options, not {show(value)}")


def _parse_budget(value: object) -> Budget:
    try:
        return Budget.parse(value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("budget ")) from None


Flag = Annotated[bool, Field(strict=True)]
Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_check_names),
    WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}}),
]
BackendName = Annotated[
    str,
    BeforeValidator(_check_backend),
    WithJsonSchema({"type": "string", "pattern": f"^{_BACKEND.pattern}$"}),
]
DeviceName = Annotated[
    str,
    BeforeValidator(_check_device),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_DEVICE.pattern}$",
            "examples": ["auto", "cpu", "cuda:0", "mps"],
        }
    ),
]
DtypeName = Annotated[
    str,
    BeforeValidator(_check_dtype),
    WithJsonSchema({"type": "string", "enum": ["auto", *DTYPE_SIZES]}),
]
BlockSize = Annotated[
    int | Literal["auto"],
    BeforeValidator(_check_block_size),
    WithJsonSchema({"enum": ["auto", *(2**power for power in range(17))]}),
]
BudgetValue = Annotated[
    Budget,
    PlainValidator(_parse_budget),
    PlainSerializer(Budget.to_plain),
    WithJsonSchema(BUDGET_SCHEMA),
]
Options = Annotated[
    Mapping[str, Any],
    PlainValidator(_check_options),
    PlainSerializer(thaw),
    WithJsonSchema({"type": "object"}),
]
