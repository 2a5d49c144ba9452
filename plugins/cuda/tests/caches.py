"""What the tests build caches from."""

from __future__ import annotations

from typing import Any

from kvcache_core import CacheGeometry
from kvcache_core.plugin import StorageSpec
from kvcache_cuda.options import CudaOptions

GEOMETRY = CacheGeometry.uniform(2, 2, 8)


def spec_of(**changes: Any) -> StorageSpec:
    """A spec of 16 blocks of 4 tokens on the CPU."""
    values: dict[str, Any] = {
        "geometry": GEOMETRY,
        "block_size": 4,
        "num_blocks": 16,
        "max_sequence_length": 48,
        "dtype": "float32",
        "device": "cpu",
        "options": CudaOptions(device="cpu"),
    }
    return StorageSpec(**values | changes)
