"""The conformance kit on the CUDA backend's code, run on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

from kvcache_core.testing import BackendConformance
from kvcache_cuda.plugin import CAPABILITIES


class TestOnTheCpu(BackendConformance):
    backend = "cuda"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    options: ClassVar[Any] = {"device": "cpu", "swap_blocks": 6}
    capabilities = CAPABILITIES
