"""The probe's answers, each with a stable code; it starts nothing on a device."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_core import CacheGeometry, open_cache
from kvcache_core.errors import BackendUnavailableError, NoBackendAvailableError
from kvcache_core.plugin import Available, ProbeRequest, Unavailable
from kvcache_cuda import probe as module
from kvcache_cuda.devices import DriverProblem, Gpu
from kvcache_cuda.options import CudaOptions
from kvcache_cuda.probe import probe

H200 = Gpu("GPU-1", "NVIDIA H200", (9, 0))
GEOMETRY = CacheGeometry.uniform(2, 8, 128)


def ask(options: dict[str, Any] | None = None, **request: Any) -> Any:
    values = {"dtype": "bfloat16", "geometry": GEOMETRY} | request
    return probe(ProbeRequest(options=CudaOptions(**options or {}), **values))


def version_file(cuda: str | None = "13.0", hip: str | None = None, version: str = "2.13.0") -> str:
    return f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with CUDA torch 2.13 and two H200, and a way to change that."""

    def set_up(gpus: Any = (H200, H200), installed: tuple[str, ...] = ("torch",), **torch: Any) -> None:
        def visible() -> Any:
            if isinstance(gpus, Exception):
                raise gpus
            return list(gpus)

        monkeypatch.setattr(module, "visible_gpus", visible)
        monkeypatch.setattr(module, "find_spec", lambda name: object() if name in installed else None)
        monkeypatch.setattr(module._TorchBuild, "installed", lambda: module._TorchBuild(version_file(**torch)))

    set_up()
    return set_up


def test_a_gpu_and_its_kernel_are_named(machine: Any) -> None:
    found = ask()
    assert found == Available(device="cuda:0", detail=found.detail, block_size=256)
    assert found.detail.startswith("NVIDIA H200, kernel varlen: torch's own varlen_attn")
    assert "flashinfer: flashinfer is not installed" in found.detail


def test_flashinfer_takes_small_blocks(machine: Any) -> None:
    machine(installed=("torch", "flashinfer"))
    assert ask().block_size == 16
    assert ask().detail.startswith("NVIDIA H200, kernel flashinfer")


def test_the_gpu_that_is_asked_for_is_used(machine: Any) -> None:
    assert ask(device="cuda:1").device == "cuda:1"
    assert ask(device="cuda").device == "cuda:0"


@pytest.mark.parametrize(
    ("state", "request_", "code", "word"),
    [
        ({"installed": ()}, {}, "torch-missing", "not installed"),
        ({"cuda": None}, {}, "torch-without-cuda", "torch 2.13.0 is built without CUDA"),
        ({"cuda": None, "hip": "6.4"}, {}, "torch-without-cuda", "for ROCm"),
        ({"gpus": DriverProblem("no-driver", "the driver is missing")}, {}, "no-driver", "missing"),
        ({"gpus": DriverProblem("driver-error", "it hangs")}, {}, "driver-error", "hangs"),
        ({"gpus": ()}, {}, "no-device", "there is no GPU cuda:0; 0 can be seen"),
        ({}, {"device": "cuda:2"}, "no-device", "there is no GPU cuda:2; 2 can be seen"),
        ({}, {"device": "cpu"}, "other-device", "'cpu'"),
        ({}, {"device": "mps"}, "other-device", "'mps'"),
        ({}, {"options": {"kernel": "flashinfer"}}, "kernel-unavailable", "flashinfer is not installed"),
        (
            {},
            {"options": {"kernel": "varlen"}, "block_size": 16},
            "kernel-unavailable",
            "blocks of a multiple of 256 tokens, not 16",
        ),
    ],
)
def test_what_is_missing_has_a_code_a_reason_and_a_hint(
    machine: Any, state: dict[str, Any], request_: dict[str, Any], code: str, word: str
) -> None:
    machine(**state)
    found = ask(**request_)
    assert isinstance(found, Unavailable)
    assert found.code == code
    assert word in found.reason
    assert found.hint


def test_the_cpu_is_used_when_the_options_say_so(machine: Any) -> None:
    machine(cuda=None, gpus=DriverProblem("no-driver", "the driver is missing"))
    found = ask({"device": "cpu"})
    assert (found.device, found.block_size) == ("cpu", 16)
    assert "kernel reference" in found.detail
    assert ask({"device": "cpu"}, device="cuda").code == "other-device"
    assert ask({"device": "cpu", "kernel": "varlen"}).code == "kernel-unavailable"


def test_torchs_version_file_is_read_in_every_spelling() -> None:
    build = module._TorchBuild("__version__ = '2.6.0+cu124'\ncuda = '12.4'\nhip = None\n")
    assert (build.release, build.cuda, build.hip) == ((2, 6), "12.4", None)
    assert module._TorchBuild("").cuda is None


# -- through core ------------------------------------------------------------------------------------------


def test_an_open_block_size_is_the_kernels_and_an_asked_one_stays(machine: Any) -> None:
    config = {"geometry": GEOMETRY, "budget": "4 blocks", "options": {"device": "cpu"}}
    with open_cache(backend="cuda", **config) as cache:
        assert cache.block_size == 16
    with open_cache(backend="cuda", block_size=64, **config) as cache:
        assert cache.block_size == 64


def test_a_missing_gpu_is_no_cpu_in_disguise(machine: Any) -> None:
    machine(gpus=())
    with pytest.raises(BackendUnavailableError) as caught:
        open_cache(backend="cuda", geometry=GEOMETRY)
    assert caught.value.code == "no-device"
    with pytest.raises(BackendUnavailableError, match="option device to 'cpu'") as caught:
        open_cache(backend="cuda", geometry=GEOMETRY, device="cpu")
    assert caught.value.code == "other-device"
    with open_cache(backend="cuda", geometry=GEOMETRY, device="cpu", budget="4 blocks", options={"device": "cpu"}):
        pass


def test_auto_passes_over_a_missing_gpu_quietly(machine: Any) -> None:
    machine(gpus=())
    with pytest.raises(NoBackendAvailableError, match="cuda") as caught:
        open_cache(geometry=GEOMETRY, disable=["cpu", "metal"])
    assert "there is no GPU cuda:0" in str(caught.value)
