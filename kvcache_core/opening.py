"""From a configuration to a running cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvcache_core.config import CacheConfig
from kvcache_core.disabling import Disabled
from kvcache_core.errors import ConfigError
from kvcache_core.manager import KvCacheManager
from kvcache_core.observers import named_observers
from kvcache_core.registry import BackendRegistry, get_registry
from kvcache_core.selection import choose
from kvcache_core.storage import StorageSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcache_core.config import ConfigValues

__all__ = ["open_cache"]


def open_cache(
    config: CacheConfig | str | os.PathLike[str] | None = None,
    *,
    registry: BackendRegistry | None = None,
    **overrides: Unpack[ConfigValues],
) -> KvCacheManager:
    """Choose a backend, load it and open a cache on it.

    ```python
    with open_cache("kvcache.toml", geometry=CacheGeometry.uniform(30, 3, 64)) as cache:
        handle = cache.allocate(token_ids=prompt)
    ```

    Args:
        config: A configuration; or the path of a TOML or JSON file, which is read with the environment as
            `CacheConfig.load` does; or None to read the environment alone.
        registry: Where to look for backends; the registry of this process when None.
        **overrides: Any key of the configuration; stands above everything else.

    Raises:
        ConfigError: A value is wrong or missing, the budget is too small for one block, or an observer that the
            configuration names cannot be used.
        BackendError: The backend cannot be found, loaded or used; see `kvcache_core.selection.choose`.
    """
    if not isinstance(config, CacheConfig):
        config = CacheConfig.load(config, **overrides)
    elif overrides:
        config = config.replace(**overrides)
    geometry = config.geometry
    if geometry is None:
        raise ConfigError(
            "geometry is missing: give it in the configuration, or take it from a model with "
            "CacheConfig.from_pretrained_config(model.config)",
            key="geometry",
        )
    registry = registry or get_registry()
    observers = named_observers(config, registry, Disabled.read(config))
    selection = choose(config, registry)
    storage_class = registry.load(selection.backend)
    num_blocks = config.budget.resolve(
        bytes_per_block=selection.block_size
        * storage_class.bytes_per_token(geometry, selection.dtype, selection.options),
        block_size=selection.block_size,
        device_memory=lambda: storage_class.device_memory(selection.device, selection.options),
        origin=config.origin("budget"),
    )
    storage = storage_class(
        StorageSpec(
            geometry=geometry,
            block_size=selection.block_size,
            num_blocks=num_blocks,
            max_sequence_length=config.longest_sequence(num_blocks * selection.block_size),
            dtype=selection.dtype,
            device=selection.device,
            initial_blocks=min(config.initial_blocks, num_blocks),
            scrub=config.scrub_freed,
            options=selection.options,
        )
    )
    pressure = config.pressure
    try:
        manager = KvCacheManager(
            storage,
            backend=selection.backend.name,
            allow_dtype_cast=config.allow_dtype_cast,
            pressure_thresholds=(pressure.medium, pressure.high, pressure.critical),
            prefix=config.prefix,
        )
    except ConfigError:
        storage.shutdown()
        raise
    for observer in observers:
        manager.attach(observer)
    return manager
