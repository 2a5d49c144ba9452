"""Whether what a configuration asks for goes with what a backend declares, and the concrete values that follow.

Nothing here runs plugin code. Each refusal names both sides: the key with its value and origin, and the backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from kvcache_core.errors import ConfigError, UnsupportedError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.registry import Backend

__all__ = [
    "Wishes",
    "block_size_for",
    "check_device",
    "check_geometry",
    "dtype_for",
]

_AUTO = "auto"
_DEFAULT_DTYPE = "float32"


class Wishes(Protocol):
    """What selection reads of a configuration; `CacheConfig` has it all."""

    @property
    def backend(self) -> str: ...  # noqa: D102 - the keys are described at CacheConfig
    @property
    def backend_order(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def disable(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def block_size(self) -> int | Literal["auto"]: ...  # noqa: D102
    @property
    def options(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def geometry(self) -> CacheGeometry | None: ...  # noqa: D102
    def origin(self, key: str) -> str:
        """Say where the value of a key came from."""
        ...


def _device_type(device: str) -> str:
    return device.partition(":")[0]


def check_device(wishes: Wishes, backend: Backend) -> None:
    """Raise `ConfigError` unless the backend runs on the device type that is asked for."""
    devices = backend.descriptor.devices
    if wishes.device != _AUTO and _device_type(wishes.device) not in devices:
        raise _clash(wishes, "device", wishes.device, backend, f"runs on {_listed(devices)}")


def dtype_for(wishes: Wishes, backend: Backend) -> str:
    """Return the dtype to store: what is asked for, else the model's, else float32 where the backend has it.

    Raises:
        ConfigError: The backend cannot store it.
    """
    dtypes = backend.descriptor.dtypes
    asked, key = wishes.dtype, "dtype"
    if asked == _AUTO:
        own = wishes.geometry.dtype if wishes.geometry else None
        if own is None:
            return _DEFAULT_DTYPE if _DEFAULT_DTYPE in dtypes else dtypes[0]
        asked, key = own, "geometry.dtype"
    if asked not in dtypes:
        raise _clash(wishes, key, asked, backend, f"stores {_listed(dtypes)}", change="dtype")
    return asked


def block_size_for(wishes: Wishes, backend: Backend) -> int:
    """Return the tokens per block: what is asked for, else the backend's default.

    Raises:
        ConfigError: The backend does not take it.
    """
    asked = wishes.block_size
    if isinstance(asked, str):
        return backend.descriptor.default_block_size
    sizes = backend.descriptor.block_sizes
    if sizes and asked not in sizes:
        raise _clash(wishes, "block_size", asked, backend, f"takes {_listed(sizes)}")
    if not sizes and (asked < 1 or asked.bit_count() != 1):
        raise _clash(wishes, "block_size", asked, backend, "takes powers of two")
    return asked


def check_geometry(wishes: Wishes, backend: Backend) -> None:
    """Raise `UnsupportedError` where the geometry needs a capability that the backend does not declare."""
    capability = "unequal_head_dims"
    if wishes.geometry is None or capability in backend.descriptor.capabilities:
        return
    for group in wishes.geometry.groups:
        if group.value_head_dim != group.head_dim:
            raise UnsupportedError(
                f"backend {backend.label} does not declare the capability {capability!r}, which geometry needs: "
                f"head_dim is {group.head_dim} and value_head_dim {group.value_head_dim} in layer {group.layers[0]}; "
                "choose another backend",
                capability=capability,
                backend=backend.name,
            )


def _listed(values: Collection[object]) -> str:
    return ", ".join(repr(value) for value in values)


def _clash(
    wishes: Wishes, key: str, value: object, backend: Backend, ability: str, change: str | None = None
) -> ConfigError:
    origin = wishes.origin(key)
    return ConfigError(
        f"{key} {value!r} ({origin}) does not go with backend {backend.label}, which {ability}; "
        f"change {change or key} or backend",
        key=key,
        origin=origin,
    )
