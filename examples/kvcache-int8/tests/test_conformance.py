"""The conformance kit of kvcache-core on this backend."""

from __future__ import annotations

from typing import Any, ClassVar

from kvcache_core.testing import BackendConformance

from kvcache_int8.plugin import CAPABILITIES, ROUND_TRIP_ERROR


class TestInt8(BackendConformance):
    backend = "int8"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    capabilities = CAPABILITIES
    round_trip_error = ROUND_TRIP_ERROR


class TestSmallChunks(BackendConformance):
    """Where rows are read back in full, the error is that of 8 bits alone; and chunks end everywhere."""

    backend = "int8"
    dtypes = ("float32", "float64")
    options: ClassVar[dict[str, Any]] = {"chunk_tokens": 3}
    capabilities = CAPABILITIES
    round_trip_error = 0.00396
