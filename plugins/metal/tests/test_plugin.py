"""The declaration: light, and true to the storage."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from kvcache_core import CacheGeometry, open_cache
from kvcache_core.errors import KvCacheError
from kvcache_core.plugin import HostInfo
from kvcache_metal.guards import GUARDS
from kvcache_metal.handle import MetalKvCacheHandle
from kvcache_metal.options import GuardName
from kvcache_metal.plugin import kvcache_backends
from kvcache_metal.storage import MetalStorage

GEOMETRY = CacheGeometry.uniform(2, 2, 8)


def test_describing_and_probing_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from kvcache_core.plugin import HostInfo, ProbeRequest\n"
        "from kvcache_metal.plugin import kvcache_backends\n"
        "from kvcache_metal.options import MetalOptions\n"
        "from kvcache_metal.probe import probe\n"
        "kvcache_backends(HostInfo())\n"
        "found = probe(ProbeRequest(options=MetalOptions())), probe(ProbeRequest(options=MetalOptions(device='cpu')))\n"
        "sys.exit('torch' in sys.modules and sys.platform != 'darwin')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_declaration_is_true_to_the_storage() -> None:
    (descriptor,) = kvcache_backends(HostInfo())
    assert descriptor.placement == MetalStorage.placement
    assert descriptor.capabilities == MetalStorage.capabilities
    assert MetalStorage.handle_type is MetalKvCacheHandle
    assert descriptor.priority > 0  # the CPU's


def test_the_options_name_every_guard_and_no_other() -> None:
    assert set(get_args(GuardName)) == set(GUARDS)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float64"])
def test_what_mps_cannot_compute_with_is_not_stored(dtype: str) -> None:
    with pytest.raises(KvCacheError, match="dtype"):
        open_cache(backend="metal", geometry=GEOMETRY, dtype=dtype, budget="4 blocks", options={"device": "cpu"})


def test_swapping_is_not_offered() -> None:
    with (
        open_cache(backend="metal", geometry=GEOMETRY, budget="4 blocks", options={"device": "cpu"}) as cache,
        cache.allocate() as handle,
        pytest.raises(NotImplementedError, match="swap"),
    ):
        cache.swap_out(handle)
