"""All that a backend author imports.

A distribution names one light module in the entry-point group `kvcache_core.backends`. That module imports this
one and nothing heavy, and implements the hook:

```python
from kvcache_core.plugin import BackendDescriptor, HostInfo, hookimpl

@hookimpl
def kvcache_backends(host: HostInfo) -> list[BackendDescriptor]:
    return [BackendDescriptor(name="acme", interface=(1, 0), storage="kvcache_acme.storage:AcmeStorage", ...)]
```

torch, and the storage's own module, are imported only when the backend has been chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pluggy
from pydantic import BaseModel, ConfigDict

from kvcache_core import _first_model  # noqa: F401 - before any other model; see there
from kvcache_core.descriptor_rules import check_descriptor
from kvcache_core.geometry import CacheGeometry, LayerGroup, LayerSpec
from kvcache_core.handle import KvCacheHandle
from kvcache_core.host_memory import host_memory
from kvcache_core.interface import ENTRY_POINT_GROUP, INTERFACE_VERSION
from kvcache_core.storage import (
    CAPABILITIES,
    Batch,
    BlockCopy,
    BlockRows,
    DeviceMemory,
    Placement,
    Segment,
    Storage,
    StorageSpec,
)

__all__ = [
    "CAPABILITIES",
    "ENTRY_POINT_GROUP",
    "INTERFACE_VERSION",
    "Available",
    "BackendDescriptor",
    "BackendOptions",
    "Batch",
    "BlockCopy",
    "BlockRows",
    "CacheGeometry",
    "DeviceMemory",
    "HostInfo",
    "KvCacheHandle",
    "LayerGroup",
    "LayerSpec",
    "Placement",
    "ProbeRequest",
    "ProbeResult",
    "Segment",
    "Storage",
    "StorageSpec",
    "Unavailable",
    "hookimpl",
    "host_memory",
]

#: Marks a function of the plugin module as the implementation of a hook.
hookimpl = pluggy.HookimplMarker("kvcache_core")


class BackendOptions(BaseModel):
    """Base of a backend's options: frozen, unknown keys refused, numbers and flags taken literally."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """What core tells a plugin when it asks for its backends.

    Attributes:
        interface: Core's interface version.
        version: Version of the installed kvcache-core.
    """

    interface: tuple[int, int] = INTERFACE_VERSION
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The question to a probe: could this configuration run here?

    Attributes:
        options: The backend's own options, validated.
        device: Device by torch's name, or `"auto"`.
        dtype: Stored dtype by torch's name.
        geometry: What would be cached.
        block_size: Tokens per block that the configuration asks for, or None when it leaves them open.
    """

    options: Any
    device: str = "auto"
    dtype: str = "float32"
    geometry: CacheGeometry | None = None
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Available:
    """Yes.

    Attributes:
        device: The concrete device that would be used.
        detail: A phrase for reports.
        block_size: Tokens per block to use when the configuration leaves them open, where the descriptor's
            default does not suit what was found here.
    """

    device: str
    detail: str = ""
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """No, and why.

    Attributes:
        code: A short stable word, such as `"torch-without-cuda"`.
        reason: What is missing, as a phrase that can follow "cannot run on this machine:".
        hint: What would help, or an empty string.
    """

    code: str
    reason: str
    hint: str = ""


ProbeResult = Available | Unavailable


@dataclass(frozen=True, kw_only=True)
class BackendDescriptor:
    """What a plugin declares about one backend, without importing anything heavy.

    Attributes:
        name: The name users write: lower-case letters, digits and hyphens.
        interface: The interface version the backend was written for. Write the numbers down; do not compute
            them from core's own constant, or a mismatch can never be seen.
        storage: Import path of the `Storage` class, `"package.module:Class"`.
        summary: One line for `kvcache list`.
        placement: `"contiguous"` or `"paged"`.
        devices: Device types it runs on, by torch's names, preferred first.
        dtypes: Dtypes it can store, by torch's names, preferred first.
        options: The options model, or its import path `"package.module:Class"`.
        probe: The probe, or its import path. It takes a `ProbeRequest` and must be quick, must not raise for a
            merely absent device, and must not initialise the device.
        capabilities: What it can do beyond the mandatory contract.
        priority: Rank in `auto`, higher first. Third parties are capped at the first parties' highest.
        block_sizes: Block sizes it takes, or empty for any power of two.
        default_block_size: Used when the configuration leaves the block size open.
        round_trip_error: Largest difference between an element written and read back, divided by the largest element
            of its row, with any options: 0 where bits come back unchanged.
    """

    name: str
    interface: tuple[int, int]
    storage: str
    summary: str
    placement: Placement
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: str | type[BaseModel] = BackendOptions
    probe: str | Callable[[ProbeRequest], ProbeResult]
    capabilities: frozenset[str] = field(default_factory=frozenset)
    priority: int = 0
    block_sizes: tuple[int, ...] = ()
    default_block_size: int = 16
    round_trip_error: float = 0.0

    def __post_init__(self) -> None:
        """Check every field, so that a slip of the author is found where it was made.

        Raises:
            ValueError: A field has a value that core could not work with; the message names it.
        """
        check_descriptor(self)
