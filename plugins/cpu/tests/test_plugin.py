from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from kvcache_core.plugin import INTERFACE_VERSION, BackendDescriptor, HostInfo
from kvcache_cpu.plugin import kvcache_backends
from kvcache_cpu.storage import CpuStorage


def descriptor() -> BackendDescriptor:
    (found,) = kvcache_backends(HostInfo())
    return found


def test_the_distribution_names_the_plugin_in_its_metadata() -> None:
    (found,) = entry_points(group="kvcache_core.backends", name="cpu")
    assert found.value == "kvcache_cpu.plugin"


def test_the_declaration_fits_the_storage() -> None:
    declared = descriptor()
    assert declared.name == "cpu"
    assert declared.interface[0] == INTERFACE_VERSION[0]
    assert declared.placement == CpuStorage.placement
    assert declared.capabilities == CpuStorage.capabilities
    assert declared.storage == f"{CpuStorage.__module__}:{CpuStorage.__name__}"


def test_describing_and_probing_imports_no_torch() -> None:
    script = """
import sys
from kvcache_core.plugin import HostInfo, ProbeRequest
from kvcache_cpu.plugin import kvcache_backends
kvcache_backends(HostInfo())
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.probe import probe
probe(ProbeRequest(options=CpuOptions()))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
