"""Fixtures: drivers of both kinds of memory, shut down after each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache_core.geometry import CacheGeometry
from kvcache_cpu.pages import mapping_fault
from plugins.cpu.tests.driver import MIXED, Driver, MakeDriver


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are small: threads would only wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["mapped", "heap"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "mapped" and mapping_fault() is not None:
        pytest.skip(str(mapping_fault()))
    return str(request.param)


@pytest.fixture
def make_driver(kind: str) -> Iterator[MakeDriver]:
    yield from _drivers(kind)


@pytest.fixture
def driver(make_driver: MakeDriver) -> Driver:
    return make_driver()


@pytest.fixture
def mapped_driver() -> Iterator[MakeDriver]:
    if mapping_fault() is not None:
        pytest.skip(str(mapping_fault()))
    yield from _drivers("mapped")


@pytest.fixture
def heap_driver() -> Iterator[MakeDriver]:
    yield from _drivers("heap")


def _drivers(kind: str) -> Iterator[MakeDriver]:
    drivers: list[Driver] = []

    def make(geometry: CacheGeometry = MIXED, **changes: Any) -> Driver:
        drivers.append(Driver(kind, geometry, **changes))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.storage.shutdown()
