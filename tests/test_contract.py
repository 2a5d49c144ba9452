"""The conformance kit on the storages that prove the protocol, and on core's pool of blocks in host memory."""

from __future__ import annotations

import pytest

from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.testing import BackendConformance, OracleConformance
from tests.paged.hostpool import HostPool
from tests.storages.int8 import Int8Storage
from tests.storages.paged import PagedStorage


class TestPaged(BackendConformance):
    dtypes = ("float32", "bfloat16", "float16")
    capabilities = frozenset({"unequal_head_dims"})

    def open_storage(self, spec: StorageSpec) -> Storage:
        return PagedStorage(spec)


class TestInt8(BackendConformance):
    dtypes = ("float32", "bfloat16")
    capabilities = frozenset({"unequal_head_dims"})
    round_trip_error = 0.008  # half a step of 1/127, and the rounding of bfloat16

    def open_storage(self, spec: StorageSpec) -> Storage:
        return Int8Storage(spec)


class TestPool(BackendConformance):
    dtypes = ("float32", "bfloat16", "float16")
    capabilities = HostPool.capabilities

    def open_storage(self, spec: StorageSpec) -> Storage:
        return HostPool(spec)


@pytest.mark.slow
class TestPagedLonger(OracleConformance):
    capabilities = PagedStorage.capabilities
    oracle_runs = 100
    oracle_steps = 60

    def open_storage(self, spec: StorageSpec) -> Storage:
        return PagedStorage(spec)


@pytest.mark.slow
class TestInt8Longer(OracleConformance):
    capabilities = Int8Storage.capabilities
    round_trip_error = 0.008
    oracle_runs = 100
    oracle_steps = 60

    def open_storage(self, spec: StorageSpec) -> Storage:
        return Int8Storage(spec)
