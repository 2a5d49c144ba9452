"""What the driver says about GPUs, and which of them CUDA would see."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from kvcache_cuda import devices
from kvcache_cuda.devices import DriverProblem, Gpu, visible_gpus

GPUS = [Gpu(f"GPU-{letter * 8}-1111", f"NVIDIA {letter}", (9, 0)) for letter in "abc"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver with three GPUs."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(GPUS))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: GPUS[number])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda gpu: gpu.uuid.encode())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda gpu: gpu.name)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda gpu: list(gpu.compute_capability))
    return monkeypatch


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, "abc"),
        ("", ""),
        ("1", "b"),
        ("2,0", "ca"),
        (" 1 , 2 ", "bc"),
        ("0,7,1", "a"),
        ("-1", ""),
        ("GPU-bbbb", "b"),
        ("GPU-cccccccc-1111,0", "ca"),
        ("GPU-dddd,0", ""),
        ("MIG-12345678", "a"),
        ("nonsense", ""),
    ],
)
def test_gpus_are_seen_as_cuda_would_see_them(driver: Any, chosen: str | None, seen: str) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [gpu.name[-1] for gpu in visible_gpus(environ)] == list(seen)


def test_a_described_gpu_is_plain_values(driver: Any) -> None:
    assert visible_gpus({})[1] == GPUS[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no-driver"), (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver-error")],
)
def test_a_missing_driver_and_a_broken_one_are_told_apart(driver: Any, error: int, code: str) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(error)

    driver.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(DriverProblem) as caught:
        visible_gpus({})
    assert caught.value.code == code


def test_a_driver_that_fails_half_way_is_shut_down_all_the_same(driver: Any) -> None:
    ended: list[bool] = []

    def fail(number: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    driver.setattr(pynvml, "nvmlDeviceGetHandleByIndex", fail)
    driver.setattr(pynvml, "nvmlShutdown", lambda: ended.append(True))
    with pytest.raises(DriverProblem, match="lost"):
        visible_gpus({})
    assert ended == [True]
    assert devices.DriverProblem is DriverProblem
