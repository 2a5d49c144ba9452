"""One interface for the key/value cache of transformer inference, many memories behind it."""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_core.block_table import BlockTable, MutableBlockTable
    from kvcache_core.budget import Budget
    from kvcache_core.config import CacheConfig, PrefixCacheConfig, PressureThresholds
    from kvcache_core.errors import (
        AmbiguousBackendError,
        BackendDisabledError,
        BackendError,
        BackendLoadError,
        BackendSkippedWarning,
        BackendUnavailableError,
        CacheFullError,
        ConfigError,
        ConfigWarning,
        HandleError,
        IncompatibleBackendError,
        KvCacheError,
        KvCacheWarning,
        NoBackendAvailableError,
        OptionsError,
        ShapeError,
        StepError,
        UnknownBackendError,
        UnsupportedError,
        WouldCopy,
    )
    from kvcache_core.geometry import CacheGeometry, LayerGroup, LayerSpec
    from kvcache_core.handle import KvCacheHandle
    from kvcache_core.manager import KvCacheManager
    from kvcache_core.multi_device import MultiDeviceManager, open_caches
    from kvcache_core.opening import open_cache
    from kvcache_core.prefix import PrefixExplanation
    from kvcache_core.request import AllocationRequest
    from kvcache_core.sequence import HandleState
    from kvcache_core.stats import CacheGcStats, CacheHandleStats, CacheManagerStats, MemoryPressure
    from kvcache_core.step import Step

__all__ = [
    "AllocationRequest",
    "AmbiguousBackendError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendSkippedWarning",
    "BackendUnavailableError",
    "BlockTable",
    "Budget",
    "CacheConfig",
    "CacheFullError",
    "CacheGcStats",
    "CacheGeometry",
    "CacheHandleStats",
    "CacheManagerStats",
    "ConfigError",
    "ConfigWarning",
    "HandleError",
    "HandleState",
    "IncompatibleBackendError",
    "KvCacheError",
    "KvCacheHandle",
    "KvCacheManager",
    "KvCacheWarning",
    "LayerGroup",
    "LayerSpec",
    "MemoryPressure",
    "MultiDeviceManager",
    "MutableBlockTable",
    "NoBackendAvailableError",
    "OptionsError",
    "PrefixCacheConfig",
    "PrefixExplanation",
    "PressureThresholds",
    "ShapeError",
    "Step",
    "StepError",
    "UnknownBackendError",
    "UnsupportedError",
    "WouldCopy",
    "open_cache",
    "open_caches",
]

#: Where each public name lives. It is imported when it is first asked for, so that a program pays for what it uses.
_HOMES = {
    "AllocationRequest": "request",
    "AmbiguousBackendError": "errors",
    "BackendDisabledError": "errors",
    "BackendError": "errors",
    "BackendLoadError": "errors",
    "BackendSkippedWarning": "errors",
    "BackendUnavailableError": "errors",
    "BlockTable": "block_table",
    "Budget": "budget",
    "CacheConfig": "config",
    "CacheFullError": "errors",
    "CacheGcStats": "stats",
    "CacheGeometry": "geometry",
    "CacheHandleStats": "stats",
    "CacheManagerStats": "stats",
    "ConfigError": "errors",
    "ConfigWarning": "errors",
    "HandleError": "errors",
    "HandleState": "sequence",
    "IncompatibleBackendError": "errors",
    "KvCacheError": "errors",
    "KvCacheHandle": "handle",
    "KvCacheManager": "manager",
    "KvCacheWarning": "errors",
    "LayerGroup": "geometry",
    "LayerSpec": "geometry",
    "MemoryPressure": "stats",
    "MultiDeviceManager": "multi_device",
    "MutableBlockTable": "block_table",
    "NoBackendAvailableError": "errors",
    "OptionsError": "errors",
    "PrefixCacheConfig": "config",
    "PrefixExplanation": "prefix",
    "PressureThresholds": "config",
    "ShapeError": "errors",
    "Step": "step",
    "StepError": "errors",
    "UnknownBackendError": "errors",
    "UnsupportedError": "errors",
    "WouldCopy": "errors",
    "open_cache": "opening",
    "open_caches": "multi_device",
}


if not TYPE_CHECKING:  # else a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return __all__
