"""What the fields of a `BackendDescriptor` may hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from kvcache_core.geometry import DTYPE_SIZES
from kvcache_core.interface import INTERFACE_VERSION
from kvcache_core.names import canonical, name_problem
from kvcache_core.storage import CAPABILITIES, Placement

if TYPE_CHECKING:
    from kvcache_core.plugin import BackendDescriptor

__all__ = ["check_descriptor"]

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*")
_EXPORT = re.compile(r"export\.[a-z][a-z0-9_]*")


def check_descriptor(descriptor: BackendDescriptor) -> None:
    """Check all fields, and turn lists into the tuples and sets they are declared as.

    A descriptor for another interface version is only held to its name and that version: its vocabulary may be
    newer than ours, and core reports the versions rather than the words.

    Raises:
        ValueError: A field does not hold what it should.
    """
    _check_name(descriptor.name)
    _check_interface(descriptor.interface)
    for field, kind in (("devices", str), ("dtypes", str), ("block_sizes", int)):
        object.__setattr__(descriptor, field, _items(field, getattr(descriptor, field), kind))
    object.__setattr__(descriptor, "capabilities", frozenset(_items("capabilities", descriptor.capabilities, str)))
    if not _speaks_our_interface(descriptor.interface):
        return
    _check_targets(descriptor)
    _check_vocabulary(descriptor)
    _check_block_sizes(descriptor)
    _require(isinstance(descriptor.summary, str), "summary", "a line of text", descriptor.summary)
    _require(type(descriptor.priority) is int, "priority", "an int", descriptor.priority)
    error = descriptor.round_trip_error
    _require(type(error) in (int, float) and 0 <= error < 1, "round_trip_error", "a number from 0 to below 1", error)


def _require(holds: bool, field: str, wanted: str, value: object) -> None:
    if not holds:
        raise ValueError(f"BackendDescriptor.{field} must be {wanted}, not {value!r}")


def _check_name(name: Any) -> None:
    _require(isinstance(name, str), "name", "a string", name)
    problem = name_problem(name)
    if problem:
        raise ValueError(f"BackendDescriptor.name: {problem}")
    _require(name == canonical(name), "name", f"written as {canonical(name)!r}", name)


def _check_interface(interface: Any) -> None:
    _require(
        isinstance(interface, tuple)
        and len(interface) == len(("major", "minor"))
        and all(type(number) is int and number >= 0 for number in interface),
        "interface",
        "two ints (major, minor)",
        interface,
    )


def _speaks_our_interface(interface: tuple[int, int]) -> bool:
    return interface[0] == INTERFACE_VERSION[0] and interface[1] <= INTERFACE_VERSION[1]


def _items(field: str, value: Any, kind: type) -> tuple[Any, ...]:
    wanted = f"a tuple of {kind.__name__}"
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes), field, wanted, value)
    items = tuple(sorted(value, key=repr) if isinstance(value, Set) else value)
    _require(all(type(item) is kind for item in items), field, wanted, value)
    return items


def _check_targets(descriptor: BackendDescriptor) -> None:
    for field in ("storage", "options", "probe"):
        value = getattr(descriptor, field)
        if isinstance(value, str):
            _require(_TARGET.fullmatch(value) is not None, field, "an import path such as 'package.module:name'", value)
    _require(
        isinstance(descriptor.storage, str),
        "storage",
        "an import path, so that its module is imported only when the backend is chosen",
        descriptor.storage,
    )
    options = descriptor.options
    _require(
        isinstance(options, str) or (isinstance(options, type) and issubclass(options, BaseModel)),
        "options",
        "a pydantic model or its import path",
        options,
    )
    _require(
        isinstance(descriptor.probe, str) or callable(descriptor.probe),
        "probe",
        "a function or its import path",
        descriptor.probe,
    )


def _check_vocabulary(descriptor: BackendDescriptor) -> None:
    placements = get_args(Placement)
    _require(descriptor.placement in placements, "placement", f"one of {placements}", descriptor.placement)
    _require(bool(descriptor.devices), "devices", "at least one device type", descriptor.devices)
    for device in descriptor.devices:
        _require(_DEVICE_TYPE.fullmatch(device) is not None, "devices", "device types without an index", device)
    _require(bool(descriptor.dtypes), "dtypes", "at least one dtype", descriptor.dtypes)
    for dtype in descriptor.dtypes:
        _require(dtype in DTYPE_SIZES, "dtypes", f"of {tuple(DTYPE_SIZES)}", dtype)
    for capability in sorted(descriptor.capabilities):
        _require(
            capability in CAPABILITIES or _EXPORT.fullmatch(capability) is not None,
            "capabilities",
            f"of {tuple(sorted(CAPABILITIES))} or 'export.<name>'",
            capability,
        )


def _check_block_sizes(descriptor: BackendDescriptor) -> None:
    for size in descriptor.block_sizes:
        _require(size >= 1, "block_sizes", "positive", size)
    default = descriptor.default_block_size
    _require(type(default) is int and default >= 1, "default_block_size", "a positive int", default)
    if descriptor.block_sizes:
        _require(default in descriptor.block_sizes, "default_block_size", f"one of {descriptor.block_sizes}", default)
    else:
        _require(default.bit_count() == 1, "default_block_size", "a power of two", default)
