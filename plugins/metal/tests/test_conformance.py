"""The conformance kit on the Metal backend's code, on the CPU."""

from __future__ import annotations

from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.testing import BackendConformance
from kvcache_metal.options import MetalOptions
from kvcache_metal.storage import MetalStorage


class TestOnTheCpu(BackendConformance):
    dtypes = ("float32", "bfloat16", "float16")
    capabilities = MetalStorage.capabilities
    options = MetalOptions(device="cpu")

    def open_storage(self, spec: StorageSpec) -> Storage:
        return MetalStorage(spec)
