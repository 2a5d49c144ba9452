"""The conformance kit on the Metal backend: on the stand-in for MPS, none of whose faults may strike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.testing import (
    AttentionConformance,
    BackendConformance,
    Declaration,
    ForkConformance,
    NumericsConformance,
    OracleConformance,
    TruncateConformance,
)
from kvcache_metal.options import MetalOptions
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.stand_in import StandIn, on_stand_in

DTYPES = ("float32", "bfloat16", "float16")


#: As many bytes as make a layer of the kit's caches lie in several tensors.
FEW_BYTES = 1 << 14


class OnTheStandIn(Declaration):
    dtypes = DTYPES
    capabilities = MetalStorage.capabilities
    options = MetalOptions(device="cpu")

    @pytest.fixture(autouse=True)
    def _no_fault_strikes(self) -> Iterator[None]:
        self.opened: list[StandIn] = []
        yield
        assert [dict(stand_in.fired) for stand_in in self.opened if stand_in.fired] == []

    def open_storage(self, spec: StorageSpec) -> Storage:
        self.opened.append(StandIn())
        storage: Storage = on_stand_in(lambda: MetalStorage(spec), self.opened[-1])
        return storage


@pytest.mark.slow
class TestOnTheStandIn(OnTheStandIn, BackendConformance):
    """The whole kit."""


@pytest.mark.slow
class TestSeveralTensorsOnTheStandIn(OnTheStandIn, OracleConformance, ForkConformance, TruncateConformance):
    """What moves rows about, with layers in several tensors."""

    options = MetalOptions(device="cpu", max_tensor_bytes=FEW_BYTES)
    oracle_runs = 10


@pytest.mark.slow
class TestAttentionOnTheCpu(AttentionConformance, NumericsConformance):
    """With torch's own attention on the CPU, which the stand-in replaces; and with layers in several tensors."""

    dtypes = DTYPES
    capabilities = MetalStorage.capabilities
    options = MetalOptions(device="cpu", max_tensor_bytes=FEW_BYTES)

    def open_storage(self, spec: StorageSpec) -> Storage:
        return MetalStorage(spec)
