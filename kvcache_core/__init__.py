"""One interface for the key/value cache of transformer inference, many memories behind it."""

from kvcache_core import _first_model  # noqa: F401 - before any other model; see there
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
]
