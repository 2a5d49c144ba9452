"""The conformance kit on the CPU backend, in each kind of memory that it has here."""

from __future__ import annotations

import pytest

from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.testing import BackendConformance
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.pages import mapping_fault
from kvcache_cpu.storage import CpuStorage


class CpuConformance(BackendConformance):
    dtypes = ("float32", "bfloat16", "float16")
    capabilities = CpuStorage.capabilities

    def open_storage(self, spec: StorageSpec) -> Storage:
        return CpuStorage(spec)


@pytest.mark.skipif(mapping_fault() is not None, reason="this system has no mapped memory")
class TestMapped(CpuConformance):
    options = CpuOptions(memory="mapped")


class TestHeap(CpuConformance):
    options = CpuOptions(memory="heap")
