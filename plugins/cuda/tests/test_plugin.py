"""The declaration: light, true to the storage, and first in line where there is a GPU."""

from __future__ import annotations

import subprocess
import sys

from kvcache_core.plugin import HostInfo
from kvcache_cuda.handle import CudaKvCacheHandle
from kvcache_cuda.plugin import kvcache_backends
from kvcache_cuda.storage import CudaStorage


def test_describing_and_probing_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from kvcache_core.plugin import HostInfo, ProbeRequest\n"
        "from kvcache_cuda.plugin import kvcache_backends\n"
        "from kvcache_cuda.options import CudaOptions\n"
        "from kvcache_cuda.probe import probe\n"
        "kvcache_backends(HostInfo())\n"
        "print(probe(ProbeRequest(options=CudaOptions())), probe(ProbeRequest(options=CudaOptions(device='cpu'))))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_declaration_is_true_to_the_storage() -> None:
    (descriptor,) = kvcache_backends(HostInfo())
    assert descriptor.placement == CudaStorage.placement
    assert descriptor.capabilities == CudaStorage.capabilities
    assert CudaStorage.handle_type is CudaKvCacheHandle
    assert descriptor.priority > 0  # the CPU's
